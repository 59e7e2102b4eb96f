"""Codecs as machine code for this processor, where numba is installed: the same bits in less time.

Start reading at ``loading``: when codecs are compiled, and how they are taken into use.

- ``kernels``: passes over encoded payloads, which numba compiles when the module is imported
- ``codecs``: the codecs of ``averaging.numbers`` with kernels in place of numpy's passes, and the
  comparison of both

The core calls them as it calls its own. They come in by the table of codecs and by
``take_squared_norms`` of ``averaging.numbers.arrays``. Without this room, or without numba, numpy's
codecs do all of the work, and peers of both kinds agree.
"""
