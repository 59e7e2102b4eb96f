"""Finding peers, and facts about peers. Imports nothing of ``averaging`` or ``peer``.

In: bootstrap addresses, a key file, and what a peer says about itself. Out: the members of a run
with their signed records, and calls and streams to them.

Start reading at ``host`` (the interface of a network host; everything above uses only that) and
``records`` (signed records and the rules for believing them). ``identity``, ``addresses`` and
``errors`` hold the values used everywhere, and ``public_ip`` says which addresses are public;
``wrapped_host`` has hosts that change a part of another one. ``record_keeper`` decides which
records a node keeps for the swarm, ``protocol`` numbers the forms of messages, and ``decoding``
reads what others sent; ``limits`` has what others may have of this peer, and ``bounded_mapping``
and ``whole_files`` are used by all packages. The rooms:

- ``membership``: pure decisions about the members of a run, the next contacts, and reachability;
- ``presence``: carries these decisions out over any host, with timers and calls;
- ``libp2p``: a host on hivemind's libp2p daemon, for real networks;
- ``memory``: a host on a simulated network and virtual time, for tests and simulations.

``tests/contract`` holds both hosts to one contract. hivemind is imported only in modules named
``hivemind_*``. No timestamp of another peer is ever compared with the own clock.
"""
