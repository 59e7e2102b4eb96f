"""``shoal bench averaging``: the time of one averaging round, compared with other systems.

- ``comparison``: start here. Starts the worker processes, lets the systems take turns, tabulates.
- ``worker``: the process of one peer. Obeys commands from ``comparison`` and measures itself.
- ``meter``: processor time, traffic and memory of a process with its children.
- ``participant``: the interface of a measured system, and the numbers that all of them average.
- ``shoal_averager``, ``hivemind_averager``, ``gloo_averager``: the measured systems.

Input: an ``AveragingBench``. Output: a list of rows, printed as a table or as JSON. Nothing here is
imported by the rest of the package.
"""
