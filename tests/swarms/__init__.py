"""Network namespaces as an internet: sites on shaped lines, at distances, behind routers.

``topology`` builds it, and ``delay_line`` is the program that delays its packets. It needs Linux,
root, iproute2 and nftables. ``sizes``: how many peers a swarm has over time.
"""
