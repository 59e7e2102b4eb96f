"""A wide-area network in network namespaces: homes behind routers, distances, lines and faults.

``topology`` builds the namespaces: public machines, and routers of each kind of address translation
with one or more home computers behind them. ``delay_line`` is a program that delays packets, for
kernels without netem. ``experiment`` trains on such a network while faults happen to it, and prints
what they cost; ``python -m tests.integration.wan --help`` shows its options. Everything needs root,
iproute2 and nftables; tests are skipped where these are missing.
"""
