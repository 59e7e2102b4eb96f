"""Plans the faults of a chaos scenario and judges the swarm afterwards. Pure: values in and out.

- ``schedule``: kinds of faults, and a schedule of them drawn from a seed.
- ``scenarios``: the named scenarios of ``tests.chaos``.
- ``lies``: the ways in which members lie in one of them, and when.
- ``evidence``: everything known about a swarm that has ended, as plain values.
- ``verdict``: the promises, and a verdict on one of them.
- ``oracle``: start here. ``judge`` returns a verdict on every promise, from ``history``,
  ``progress``, ``resources`` and ``tokens``.
- ``hostile``: what became of spoilt uploads, of strangers and of members that lie.
- ``figures``: losses, step times and versions per minute, which are reported and not judged.

The oracle believes no peer's account of itself alone: processed tokens are the trainer's counter,
which survives a kill -9; merged tokens are the final states' maps; that no step was merged twice is
added up from the marks in the rounds that all peers logged. A check does not call kept what it did
not observe.
"""
