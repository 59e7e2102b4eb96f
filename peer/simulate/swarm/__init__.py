"""A whole swarm in virtual time: real round machines and real numbers, in one thread.

Input: an ``Experiment`` (TOML) and a seed. Output: a ``SwarmResult`` with measured points, finished
rounds, the fate of every token, and a digest of all events.

- ``swarm``: start here. ``run`` simulates one swarm; ``SimulatedSwarm`` measures it.
- ``experiment``: all settings. ``resolving`` finds the problem and checks the names in them.
- ``environment``: what the peers share. ``slots``: one place per peer, over all its lives.
- ``lifecycle``: starts, crashes, pauses, partitions. ``incidents``: schedules them,
  and the end of a run that has a date.
- ``peer``, ``learner``, ``membership``: one simulated peer, its parameters, and its view of others.
- ``token_books``: which tokens were merged. ``outcome``: the types of the results.
- ``poison``: peers that lie. ``spot_checking``: honest members that check contributions.
- ``resizing``: a swarm that grows and shrinks by schedule.
- ``report``: sweeps, tables and plots. ``plugins``: a user's own merge rules, codecs and groupings.

Nothing here reads a real clock or opens a socket; the network is ``dht.memory.network``.
"""
