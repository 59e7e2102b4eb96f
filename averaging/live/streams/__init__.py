"""Streams and messages of a live peer, and the memory and processor time that they take.

- ``links``: small messages to each peer, and the streams that others open; ``bulk``: streams of
  slices, and the order of transfers on a slow line; ``questions``: streams on which one peer asks
  and the other answers;
- ``fair_shares``: each peer's share of memory and of places to be served;
- ``buffers``: memory that is used again; ``threads``: processor time beside the event loop.

Bytes have no meaning here: nothing in this room knows a round.
"""
