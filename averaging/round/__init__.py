"""The round machine: how the peers of a group agree on one merge of one fragment.

Start with the docstring of ``machine``: the phases, the protocol, and why it is safe.

In: ``interface.inputs``, one value for everything a machine is told, given to
``FragmentRounds.handle`` with the time. Out: ``interface.effects``, a list of values for the owner
to carry out in order. The owner is ``averaging.live`` (sockets, threads).

``machine`` hands each input to the part that it concerns, and rings the timers of all in order:

- ``gathering``: how a round comes about, at a member and at its leader;
- ``participation``: one round from its commit on, with ``sealing`` for the agreement on what is
  merged, and ``slices``;
- ``opinions``: about other peers, the versions of others, the own learner, the run's end.

All parts share one ``Fragment`` (``opinions.fragment``): the facts, the opinions, the phase, and
the effects so far. A part changes what is its own, adds effects, and calls other parts: each those
below it (``leading`` calls ``objections``, ``catching_up`` and ``joining``, ``catching_up`` calls
``joining``). The few things that a part wants of those above it are abstract methods of
``Fragment``, which the machine has. None imports the machine.

``contributing``, ``traffic`` and ``fetched_states`` are for the owners of a machine: what it gives
to a round, which slice goes to whom, and which states of others it takes. ``turns`` is for owners
of several machines: it says which fragment goes first.

Not allowed here: clocks, randomness, sockets, threads, files, and, but for ``contributing``,
numbers of the model. The time is an argument; values from a set or a dict are sorted
before their order can matter. A rule that needs no state of the machine belongs to
``averaging.rules``.
"""
