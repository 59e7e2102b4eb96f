"""Lists of runs, to choose one from: ``shoal runs``, and ``shoal join`` without a link.

In: an address or a file of a list (``listed``). Out: its runs with who trains in them now, and the
link of one (``commands``). The page of a run serves a list (``peer.extras.site``).
"""
