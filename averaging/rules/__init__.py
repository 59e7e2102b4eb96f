"""The decisions of a run about its rounds, each a function of what a peer knows and of the time.

In come views of other peers, joins, commits and measurements, with ``now`` as an argument; out come
verdicts with their reasons. The round machine (``averaging.round``) asks these modules and acts on
the answers.

Start with ``policy`` (all settings of rounds in one place) and ``quorum`` (when a roster closes).

- ``due``: when a fragment is offered, and the places of a peer's fragments in a cycle.
  ``line_levels``: codec, cycle and frequency that the lines carry.
- ``peer_view grouping succession``: which peers meet, which of them leads, and which are asked for
  a state. ``quorum``: when the leader closes the roster.
- ``weights mixing sites``: how much each contribution counts and how long late work is, what a
  round does with members on different lineages, how a run ends with one model, and how peers at one
  place share a slow link.
- ``electors``: which peers count; ``reputation``: what a peer holds against others.
- ``line_speed usual_norms plausible``: limits on what a member waits for and accepts.
- ``orders``: what the run's owner has ordered, and which settings a round follows by that.

Peers that see the same must decide the same: nothing here may depend on the order of a dict or on
another peer's clock, and every duration is on the own clock of the peer that waits.
"""
