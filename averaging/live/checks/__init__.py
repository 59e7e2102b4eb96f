"""Checks of what others contributed or merged, after a round.

- ``auditing``: merges pieces of a round again, from the uploads that its members keep;
- ``kept_proofs``: what was proved against peers, and the proofs that can be shown;
- ``spot_checking``: the loss with another's contribution, on the data of its author;
- ``loss_gate``: jumps to states of others that raised the learner's loss are undone.

What an audit proves is judged by ``averaging.audit``, what a jump costs by
``averaging.rules.loss_gate``.
"""
