"""Opinions of a round machine about other peers, its learner and the run.

- ``neighbourhood``: which peers live, answer and count; ``pacemaker``: which of them leads;
- ``certificates``: which versions of others count as signed by enough of those that count;
- ``pace``: what the own learner will have to offer, and when; ``ending``: whether the run ends;
- ``fragment``: all of that for one fragment, with where it stands and the effects that it wants.

The other rooms of a machine ask here. No opinion depends on joins, rosters or ballots; ``fragment``
has the open roster among its facts.
"""
