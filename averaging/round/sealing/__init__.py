"""How the members of a round agree on its seal: on what is merged, or that nothing is.

Start with ``paxos``, one round's ballots at an acceptor and at a coordinator.

- ``seals``: what follows from ballots, and from what others say of a round's end;
- ``takeover``: which member coordinates when the one before it is dead;
- ``doubt``: asks how a round ended that this peer has lost sight of, and remembers how others did.

The order of ballots is the only thing that keeps two seals of one round apart; why that is safe
stands in docs/understand/why-safe.md.
"""
