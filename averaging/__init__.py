"""Agreeing on numbers with other peers, fragment by fragment.

In come a learner's snapshots, and messages and streams of other peers over ``dht.host.Messaging``;
out come merged states, each with the history that made it. The package knows nothing of trainers,
files or torch, and it imports nothing of ``peer``.

- ``messages``: what peers say to each other about a round, and its bytes. ``errors``: failures.
- ``numbers``: fragments as vectors and bytes, and the arithmetic of a round.
- ``history``: lineages, comparing two peers' states, and replaying rounds that were missed.
- ``rules``: a run's decisions about its rounds, each a function of views, settings and the time.
- ``round``: the round machine, which decides what one peer does in the rounds of one fragment.
- ``live``: carries the machine's effects out over a host, with asyncio and threads.
- ``guard``: defences against members that lie; nothing before it knows what is in it.
- ``virtual``: swarms of live averagers in virtual time.

Start with ``messages``, then with the docstring of ``round.machine``. All rooms but ``live``,
``guard`` and ``virtual`` are pure: they are given the time and return decisions. They may not
import asyncio, sockets, threads, clocks, ``random`` or torch, and ``tests/test_layers.py`` checks
it.
"""
