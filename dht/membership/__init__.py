"""Decisions about the members of a run, as one peer sees them. Pure: no clock, network or disk.

In: signed records, signs of life, results of dials, and the present time as an argument. Out: the
tables of members, and the next steps: which peers to greet, which part of the directory to read,
which seed to dial, whether this peer counts as reachable. ``dht.presence`` carries them out.

Start reading at ``table`` (the members of a run, and the directory's buckets). ``contacts`` and
``seeds`` choose peers to connect to, ``reachability`` judges whether and from where others can dial
this peer, ``admission`` decides who may take part by the signatures in ``credentials``, ``orders``
is what the run's owner says besides bans, ``hello`` is the wire format of direct messages and what
it tells of clocks, and ``replicas`` chooses the nodes that hold a key.

Randomness is passed in as a generator. Nothing here may wait, send, read a clock or open a file.
"""
