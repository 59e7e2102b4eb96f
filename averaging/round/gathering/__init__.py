"""How peers get into one round: from the wish to merge to a commit that all of its members hold.

- ``joining`` at a member and ``leading`` at the leader; ``roster`` composes the commit, and
  ``objections`` decides at a member whether it holds, and which states a round may continue;
- ``catching_up``: compares standings, and says which state a peer should fetch first.

Whoever is in no round yet is here. From the commit on see ``averaging.round.participation``.
"""
