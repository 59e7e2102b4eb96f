"""A whole swarm in virtual time: live averagers, hosts in memory, and learners, in one thread.

**In**: plans of peers, a policy, a layout, the weather, and plug-ins: a ``Learner`` for each peer
that trains, ``Observers`` by which they see each other, a ``Watch`` that sees everything and may
change it. **Out**: what the watch recorded. The same seed gives the same bits.

Start reading at ``swarm``: it has the lives of peers, and what a watch may see and change
(``averaging.live.slices.watch`` has the hooks below it). ``membership`` says who sees whom.
``keys``: signatures that cost a hash.

A peer here is the shipped averager on the shipped in-memory network: messages, streams, fetches and
audits included. What is not simulated: threads, whose work takes no virtual time, and the other
processes of a peer.
"""
