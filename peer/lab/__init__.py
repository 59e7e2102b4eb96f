"""Tools to try, measure and test Shoal; nothing that a training run needs.

- ``processes``: starts Shoal's commands as processes, reads their output, kills them.
- ``sizes``: how many peers a swarm has over time.
- ``network``: network namespaces as an internet of shaped lines, distances and routers.
- ``demo``: ``shoal demo``, a swarm on one machine in a few minutes.
- ``bench``: ``shoal bench``, an averaging round compared with other systems.
- ``regions``: ``shoal bench regions``, learners on limited lines beside what ``simulate`` predicts.
- ``chaos``: ``shoal chaos``, real processes under injected faults, and verdicts.

``demo``, ``bench`` and ``chaos`` import the first three, and never each other. The commands are in
``peer.cli.trying``.
"""
