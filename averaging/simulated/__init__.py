"""Averaging in virtual time: the effects of the round machine, carried out on an event heap.

**In**: one ``FragmentRounds`` per node, a state, a ``FragmentLearner``, an ``Owner`` (the peer's
clock and safe points) and a ``Watch``. **Out**: states at the learner, and what the watch recorded.
Thousands of peers run in one thread from one seed, and the same seed gives the same bits.

Only ``peer.simulate`` uses it. Whole averagers in virtual time are ``averaging.virtual``: they need
three times the processor time, and show what is left out here, among it audits and orders.

Start reading at ``node``: ``FragmentNode`` does what ``averaging.live.fragment`` does, without
sockets and threads, and ``exchange`` has the bytes of one round. ``wires`` is the network between
nodes and holds results that come out the same at several of them.

Nothing may be decided here that a live peer decides elsewhere: routes come from
``averaging.round.traffic``, whether a state is taken from ``averaging.round.fetched_states``, the
numbers from ``averaging.numbers`` and ``averaging.history``. Simplifications: a stream brings all
of its bytes at once, a link breaks when it is used, states come whole from one source while others
confirm their bits (``fetching``), and the audit of digests does not take place. No asyncio, clock,
thread or global randomness.
"""
