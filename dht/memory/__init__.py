"""A network in memory on virtual time, for tests and simulations.

In: a seed, and weather (latency, bandwidth, losses). Out: hosts that keep the same contract as the
real ones (``tests/contract``), and the same events in the same order for the same seed.

Start reading at ``host`` (``MemoryNetwork`` makes hosts; ``run`` runs a coroutine on virtual time).
Below it: ``event_heap`` (virtual time), ``network`` (when a message arrives, if it does),
``virtual_loop`` (asyncio on the event heap), ``directory`` and ``stream`` (the two other interfaces
of ``dht.host``).

Nothing here may read a real clock, open a socket, or depend on ``hash``, ``id`` or the order of a
set: a failing seed must fail again on any machine.
"""
