"""The network as it really is: ``dht.host.Host`` on hivemind's libp2p daemon.

In: unary calls, streams and directory records of a peer. Out: the same on the network, with sizes,
counts and waiting times bounded. Start reading at ``hivemind_host`` (the host and the daemon's
life), then ``hivemind_daemon`` (one daemon process, which ``confinement`` keeps from QUIC;
``hivemind_calls`` has the unary calls through it), ``dialling`` (names, and who answers at all),
``framing`` (frames on a socket), ``lane`` (direct connections for bulk streams), ``places`` (at
relays) and ``hivemind_directory`` (records on hivemind's Kademlia protocol; ``directory_search``
decides which peers a search asks, and ``directory_wire`` checks each message before hivemind reads
it). Only modules named ``hivemind_*`` may use hivemind, and they take its names from
``hivemind_imports``. Nothing here knows runs, fragments or training.

Shoal uses the two lowest layers of hivemind 1.1: the libp2p daemon and the Kademlia protocol,
both in the agent's own event loop. Streams, rounds and state transfer are our own. hivemind's
``DHT`` and averager fork processes, tear large messages in a pipe, and know neither a quorum nor a
late peer. Facts about these layers that the modules rely on, each with a regression test in
``tests/dht/libp2p/test_hivemind_facts.py`` or ``test_directory_wire.py``:

- QUIC loses data: a stream that is closed right after its last write arrives truncated, without an
  error. Hence only TCP is used, and END and ACK mark a complete stream, never end-of-file.
- End-of-file looks like success: a stream that breaks ends in the same way as a complete one.
- There is no half-close: the daemon closes both directions of a stream when either one ends.
- The command pipe of hivemind's ``DHT`` process tears messages of more than about 130 kB, so the
  Kademlia protocol runs in our own process.
- One failed call removes a peer from the routing table and nothing adds it again, so the host
  pings connected peers that are missing in it.
- ``store`` reports success when only the caller itself kept the value, so own copies never count.
- An oversized unary reply leaves the caller waiting for ever, so replies are bounded beforehand.
- The end of the daemon is not noticed: pending calls never fail. Every call has a timeout, the
  process is watched, and pending calls fail when its connection ends.
- ``Multiaddr.to_bytes`` of hivemind encodes Ed25519 peer ids wrongly, so the ``multiaddr`` package
  is used.
- A relayed connection is cut after 128 KiB or 2 minutes, so relays carry control messages only.
- The daemon asks relays for places at its start alone, and then an hour after it has lost one. A
  restart breaks all streams, so ``places`` asks, over a stream like any other.
- hivemind's serializer recurses on nested extension types until the process dies, so it reads
  nothing that others sent: a record, and all records under a key, are plain values to it.
"""
