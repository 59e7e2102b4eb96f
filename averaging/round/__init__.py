"""The round machine: how the peers of a group agree on one merge of one fragment.

Start with the docstring of ``machine``: the phases, the protocol, and why it is safe.

In: ``inputs``, one value for everything a machine is told, given to ``FragmentRounds.handle`` with
the time. Out: ``effects``, a list of values for the owner to carry out in order. The owners are
``averaging.live`` (sockets, threads) and ``averaging.simulated`` (an event heap).

``machine`` routes each input to its parts and applies what they return:

- ``joining`` gets into a round, ``leading`` gathers one (``roster`` composes its commit),
  ``catching_up`` compares standings, ``doubt`` asks how a round ended, ``outcomes`` remembers it,
  ``lingering`` shows a final state to the others;
- ``participation`` is one round from its commit on, with ``paxos`` for the seal, ``seals`` for what
  follows from ballots and from what others say of its end, ``takeover`` for who coordinates, and
  ``member_slices`` and ``reducer`` for the slices;
  ``objections`` decides whether a commit holds, ``signed_commit`` reads one;
- ``neighbourhood`` is the opinion about other peers, ``pace`` that about the own learner,
  ``certificates`` about the versions of others, ``parents`` about the states that a round of
  several lineages continues, ``ending`` about the run's end; ``phase`` has the names of phases,
  stages and timers.

A part gets an ``identity`` for good and a ``situation`` for each call, both frozen. It changes its
own state only and returns effects and ``transitions``. The parts that others ask for an opinion are
given to them; apart from that no part imports another one, except that ``leading`` shares one rule
with ``catching_up``. None imports the machine.

``contributing``, ``rests``, ``traffic`` and ``taking_over`` are for the owners of a machine: what
it gives to a round, what it gives again because encoding lost it, which slice goes to whom, and
which states of others it takes. ``turns`` and ``silence`` are for owners of several machines: which
fragment goes first, and which peer is silent about all of them.

Not allowed here: clocks, randomness, sockets, threads, files, and, but for ``contributing`` and
``rests``, numbers of the model. The time is an argument; values from a set or a dict are sorted
before their order can matter. A rule that needs no state of the machine belongs to
``averaging.rules``.
"""
