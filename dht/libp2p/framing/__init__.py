"""Frames on a byte stream: their ends and acknowledgements, compression, encryption.

``frame_stream`` has frames, END and ACK on a socket; ``packing`` compresses what goes into them;
``sealing`` encrypts and authenticates them on lanes, whose bytes pass through no daemon.
"""
