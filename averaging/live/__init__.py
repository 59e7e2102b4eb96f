"""Averaging over real streams: the effects of the round machine, carried out with asyncio.

**In**: ``dht.host.Messaging``, a ``LearnerPort`` for the learner (none for a keeper),
a view of the live peers, and the states of a checkpoint. **Out**: states for the learner and for
other peers, and events for people and logs.

Start reading at ``averager`` (one per run and peer: timers, turns, incoming messages) and
``services`` (its part that fragments know), then ``fragment`` (carries out effects one by one).

- ``slices``: the bytes of one round
- ``states``: states that others made, and those that others ask for; ``following`` takes them
- ``guard``: what is asked of defences against members that lie, and told to them
- ``streams``: messages and streams, their order on a slow line, buffers and threads
- ``settings``, ``learner_port``: the values and protocols between the modules

Decisions do not belong here. ``averaging.round.machine`` decides whether a round begins, who is in
it and how it ends; ``averaging.round.traffic`` which slice goes to whom;
``averaging.round.fetched_states`` whether a state is taken. ``averaging.virtual`` runs whole
swarms of it in virtual time. Everything that waits has a deadline, every queue a maximum, and a
wrong message of a peer is refused by name and ends no round.
"""
