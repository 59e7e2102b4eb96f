"""Fragments of a model as vectors, their bytes on the wire, and the arithmetic of a round.

In come fp32 vectors, encoded payloads, and the names of a codec and a merge rule; out come bytes or
vectors that are the same, bit for bit, on every machine. Of a round the room knows only the commit;
it knows nothing of peers and of time.

Start with ``layout`` (how tensors become fragments and units), then ``codec`` (the contract of a
codec) and ``merge`` (what a reducer does). ``arithmetic`` puts them together for the kinds of
round, with payloads of several columns and cheap bounds on norms.

- ``layout chunks``: where values are. ``layout`` has fragments and slices; ``chunks``
  divides work among threads, and slices into the pieces over which their digests are made.
- ``codec codecs tiles``: values as bytes, and the table of codecs.
- ``merge outer``: merge rules, and the outer optimizer.
- ``arrays``: sums in a fixed order.

Do not use BLAS, ``np.dot``, ``np.sum`` or a fused multiply-add where peers must agree on the
result, and do not change the order of additions: golden files in ``tests/golden`` hold the bits.
Nothing here may do I/O, start threads or read a clock.
"""
