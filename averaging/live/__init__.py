"""Averaging over real streams: the effects of the round machine, carried out with asyncio.

**In**: a ``dht.host.Host`` for the network, a ``LearnerPort`` for the learner (none for a keeper),
a view of the live peers, and the states of a checkpoint. **Out**: states for the learner and for
other peers, and events for people and logs.

Start reading at ``averager`` (one per run and peer: timers, turns, incoming messages) and
``services`` (its part that fragments know), then ``fragment`` (carries out effects one by one).

- ``exchange``, ``parts``, ``uploading``, ``reducing``, ``bundling``: the bytes of one round
- ``auditing``, ``evidence``: claims about slices, audits, and proofs that a peer has lied
- ``spot_checking``: the loss with another's contribution, on its author's data
- ``following``: states that others made; ``fetcher`` and ``fetch_server`` move them,
  ``partial_state`` is one on its way, ``state_files`` keep states on disk
- ``questions``: streams on which one peer asks and the other answers
- ``loss_gate``: jumps that raised the learner's loss are undone
- ``links``, ``bulk``, ``uplink``: small messages, streams of slices, their order on a slow line;
  ``fair_shares``: each peer's share of memory and of places to be served
- ``buffers``, ``threads``: memory that is used again, and processor time beside the event loop
- ``compiling``: compiled codecs, where numba is installed
- ``settings``, ``learner_port``: the values and protocols between the modules

Decisions do not belong here. ``averaging.round.machine`` decides whether a round begins, who is in
it and how it ends; ``averaging.round.traffic`` which slice goes to whom;
``averaging.round.taking_over`` whether a state is taken. ``averaging.simulated`` asks the same
modules, and ``tests/averaging/live/test_parity.py`` compares both. Everything that waits has a
deadline, every queue a maximum, and a wrong message of a peer is refused by name and ends no round.
"""
