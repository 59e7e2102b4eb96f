"""Plans the faults of a chaos scenario and judges the swarm afterwards. Pure: values in and out.

- ``schedule``: kinds of faults, and a schedule of them drawn from a seed.
- ``scenarios``: the named scenarios of ``shoal chaos run``.
- ``evidence``: everything known about a swarm that has ended, as plain values.
- ``verdict``: the promises, and a verdict on one of them.
- ``oracle``: start here. ``judge`` returns a verdict on every promise, from ``history``,
  ``progress``, ``resources``, ``tokens``, ``learning`` and ``trust``.
"""
