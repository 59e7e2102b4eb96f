"""``shoal demo`` and ``simulate``.

In: options. Out: tables, plots, JSON. The experiments themselves are in ``peer.simulate`` and
``peer.demo``.
"""
