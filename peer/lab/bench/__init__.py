"""``shoal bench averaging``, ``training`` and ``memory``: comparisons on this machine.

Time of one averaging round:

- ``comparison``: start here. Starts the worker processes, lets the systems take turns, tabulates.
- ``worker``: the process of one peer. Obeys commands from ``comparison`` and measures itself.
- ``meter``: processor time, traffic and memory of a process with its children.
- ``participant``: the interface of a measured system, and the numbers that all of them average.
- ``shoal_averager``, ``hivemind_averager``, ``gloo_averager``: the measured systems.

Speed of training:

- ``training``: starts the loops, lets them take turns, compares and tabulates.
- ``training_loops``: the process of one loop: with shoal, the same alone, and one written by hand.

Memory of an agent:

- ``memory``: real agents with stand-ins for their trainers, with the state in memory and in files.

Input: an ``AveragingBench``, a ``TrainingBench`` or a ``MemoryBench``. Output: rows, printed as a
table or as JSON.
Nothing here is imported by the rest of the package.
"""
