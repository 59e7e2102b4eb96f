"""Network namespaces as an internet: sites on shaped lines, at distances, behind routers.

``topology`` builds it, ``delay_line`` is the program that delays its packets, and ``accounting``
counts bytes and processor time. It needs Linux, root, iproute2 and nftables.
"""
