"""Fuzzing of everything that takes bytes from strangers.

``targets`` lists the decoders with examples of what each reads, ``inputs`` makes hostile inputs
from an example, and ``once_failing`` keeps inputs that a decoder failed on once: files named
``TARGET-WHAT.bin``. A new decoder is a new row of ``TARGETS``.
"""
