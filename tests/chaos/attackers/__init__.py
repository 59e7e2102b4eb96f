"""Programs that attack a run of ``python -m tests.chaos``.

- ``hostile`` with ``hostile_agent``: a learner that spoils its uploads. ``lying_agent``: a member
  that lies, as its director tells it to;
- ``visit``: strangers to the run attack it: one that floods or sends garbage (``stranger``,
  ``hostile_requests``), or many (``crowd``).

They start from the programs of honest peers and change what these send.
"""
