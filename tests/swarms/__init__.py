"""Swarms of real processes on this machine, and networks for them; for tests and measurements.

- ``commands``: ``shoal bootstrap | start | join | keep`` as processes, on loopback or elsewhere.
- ``learners``: training loops around ``peer.join`` as processes; ``learner_process`` is one.
- ``topology``: network namespaces as an internet: sites on shaped lines, at distances, behind
  routers. ``delay_line`` is the program that delays its packets, ``hurt_internet`` cuts and changes
  it, ``namespaces`` has what tests of it share. It needs Linux, root, iproute2 and nftables.
- ``sizes``: how many peers a swarm has over time.
- ``wide_area``: a learner at each site, and faults that happen to them.

That no process is left behind is checked by ``tests.processes``.
"""
