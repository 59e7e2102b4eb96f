"""The protection of a peer from members that lie, behind one door.

``averaging.live.guard`` says what a peer asks of a guard and tells it, and has the one that guards
against nothing; ``averaging.rules.electors`` says the same of who counts. An invited run is
understood with those two: nothing outside imports this folder but ``door``, which those who make
peers plug in.

- ``door``: makes the guard of a peer
- ``rules``: what is decided: probation, proofs, whom to check, which states to refuse
- ``auditing``: merges pieces of a round again, from the uploads that its members keep
- ``kept_proofs``: what was proved against peers, and the proofs that can be shown
- ``spot_checking``: the loss with another's contribution, on the data of its author
- ``loss_gate``: jumps to states of others that raised the learner's loss are undone

What proves nothing counts in the reputation of a peer (``averaging.rules.reputation``), with a
guard or without one.
"""
