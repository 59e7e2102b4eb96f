"""How peers get into one round: from the wish to merge to a commit that all of its members hold.

- ``joining`` at a member and ``leading`` at the leader; ``roster`` composes the commit, and
  ``objections`` decides at a member whether it holds;
- ``catching_up``: compares standings, and says which state a peer should fetch first;
- ``parents``: the states that a round of several lineages continues;
- ``lingering``: shows a final state to peers that have not heard of it.

Whoever is in no round yet is here. From the commit on see ``averaging.round.participation``.
"""
