"""The agent: the process that connects one trainer, or none, with the other peers of its run.

In: the messages of a trainer and its parameters in shared memory (``peer.bridge``), a run file, the
calls of other peers. Out: merged states for the trainer, facts and events, checkpoints, an event
log, a local page.

Every peer is a ``peer.Peer``: what it knows of itself, the run and the others, as ``figures`` tell.
``life`` takes it through its run. What it is there for is its ``Role``, that of the ``agent`` (with
a trainer; the process) or of the ``keeper`` (without), and what it does besides are its
``services``:

- ``network``: host, presence, who is there, and direct connections of peers behind routers;
  ``questions`` that peers ask each other;
- ``owners_orders``: what the run's owner orders; ``histories``: states of another history;
- ``saver``: checkpoints and logs; ``policies``: settings that follow from the run file.

Whether the run is over, and whether this peer leaves, only ``peer.rules.ending`` decides:
it hears what happens from everywhere, and ``leaving`` does what is to be done.

Beside a trainer: ``entrance`` (the way into a run), ``slots`` (the trainer as averaging sees it),
``account`` (what became of its tokens), ``judging`` (what it thinks of the work of others),
``idleness``.

Start reading at ``live`` in ``life``. Not allowed here: torch, imports of ``peer.trainer`` or
``peer.cli``, and blocking calls on the event loop (files go through ``asyncio.to_thread``).
"""
