"""A wide-area network in network namespaces: homes behind routers, distances, lines and faults.

``tests.swarms`` builds the network, starts learners on it and lets faults happen. ``experiment``
counts what they cost; ``python -m tests.integration.wan --help`` shows its options. Everything
needs root, iproute2 and nftables; tests are skipped where these are missing.
"""
