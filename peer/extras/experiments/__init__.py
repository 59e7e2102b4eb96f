"""``shoal demo`` and ``simulate``, and command lines of programs that run experiments.

In: options. Out: tables, plots, JSON. ``commands`` has the two commands, ``programs`` what the
programs of ``examples/paper`` and the benchmarks have in common. The experiments themselves are in
``peer.simulate`` and ``peer.demo``.
"""
