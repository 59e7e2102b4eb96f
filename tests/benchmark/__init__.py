"""Measurements on this machine; modules named ``test_`` or ``bench_`` hold the bars of some.

Time of one averaging round:

- ``averaging``: start here. Starts the worker processes, lets the systems take turns, tabulates.
- ``worker``: the process of one peer. Obeys commands from ``averaging`` and measures itself:
  processor time, traffic and memory, with its children.
- ``participant``: the interface of a measured system, and the numbers that all of them average.
- ``shoal_averager``, ``hivemind_averager``, ``gloo_averager``: the measured systems.

Speed of training:

- ``training``: starts the loops, lets them take turns, compares and tabulates.
- ``training_loops``: the process of one loop: with shoal, the same alone, and one written by hand.

Memory of an agent:

- ``memory``: real agents with stand-ins for their trainers, with the state in memory and in files.

Each of them is a program that prints a table, or JSON with ``--json``; so is each other module.
"""
