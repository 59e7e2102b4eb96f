"""Tools to try, measure and test Shoal; nothing that a training run needs.

- ``processes``: starts Shoal's commands as processes, reads their output, kills them.
- ``sizes``: how many peers a swarm has over time.
- ``network``: network namespaces as an internet of shaped lines, distances and routers.
- ``results``: pages, plots and means.
- ``demo``: ``shoal demo``, a swarm on one machine in a few minutes.
- ``bench``: ``shoal bench``, an averaging round compared with other systems.
- ``regions``: ``shoal bench regions``, learners on limited lines beside what ``simulate`` predicts.
- ``chaos``: ``shoal chaos``, real processes under injected faults, and verdicts.
- ``simulate``: ``shoal simulate``, experiments in virtual time.

``demo``, ``bench``, ``chaos`` and ``simulate`` import the first four, and never each other. The
commands are in ``peer.cli.trying`` and ``peer.cli.simulating``.
"""
