"""The decisions of a run about its rounds, each a function of what a peer knows and of the time.

In come views of other peers, joins, commits and measurements, with ``now`` as an argument; out come
verdicts with their reasons. The round machine (``averaging.round``) asks these modules and acts on
the answers.

Start with ``policy`` (all settings of rounds in one place) and ``quorum`` (when a roster closes).

- ``due``: when a fragment is offered. ``peer_view grouping succession``: which peers meet, and
  which of them leads. ``quorum``: when the leader closes the roster.
- ``weights mixing sites``: how much each contribution counts and how long late work is, what a
  round does with members on different lineages, and how peers at one place share a slow link.
- ``electors``: which peers count; ``reputation``: what a peer holds against others;
  ``protocols``: which protocol number a round has.
- ``deadlines line_speed usual_norms claims plausible``: limits on what a member waits for and
  accepts.
- ``line_levels line_pace spacing``: codec, cycle and frequency that the lines carry, and the places
  of a peer's fragments in a cycle.
- ``sources``: the order in which others are asked for a state.
- ``orders``: what the run's owner has ordered, and which settings a round follows by that.
- ``final_mix``: how a run that ends by tokens ends with one model.

Peers that see the same must decide the same: nothing here may depend on the order of a dict or on
another peer's clock, and every duration is on the own clock of the peer that waits.
"""
