"""``shoal bench averaging`` and ``shoal bench training``: comparisons with other systems.

Time of one averaging round:

- ``comparison``: start here. Starts the worker processes, lets the systems take turns, tabulates.
- ``worker``: the process of one peer. Obeys commands from ``comparison`` and measures itself.
- ``meter``: processor time, traffic and memory of a process with its children.
- ``participant``: the interface of a measured system, and the numbers that all of them average.
- ``shoal_averager``, ``hivemind_averager``, ``gloo_averager``: the measured systems.

Speed of training:

- ``training``: starts the loops, lets them take turns, compares and tabulates.
- ``training_loops``: the process of one loop: with shoal, the same alone, and one written by hand.

Input: an ``AveragingBench`` or a ``TrainingBench``. Output: rows, printed as a table or as JSON.
Nothing here is imported by the rest of the package.
"""
