"""The agent: the process that connects one trainer, or none, with the other peers of its run.

In: the messages of a trainer and its parameters in shared memory (``peer.bridge``), a run file, the
calls of other peers. Out: merged states for the trainer, facts and events, checkpoints, an event
log, a local page.

A peer has three stages, each of them a complete object that the next one builds upon:

- ``local_peer``: settings, folder, log, view of the other peers, and its ``Ending``;
- ``online_peer``: host, presence, status, page. ``go_online`` opens and closes them;
- ``active_peer``: averaging; ``saver`` writes its checkpoints.

Whether the run is over, and whether this peer leaves, only ``peer.rules.ending`` decides:
``end_of_run`` hears what happens from everywhere, ``leaving`` does what is to be done.

Around them: ``agent`` (with a trainer; the process) and ``keeper`` (without), ``entrance`` (the way
into a run), ``slots`` (the trainer as averaging sees it), ``account`` (what became of its tokens),
``loss_gate`` (states of others that raise its loss), ``trials`` (spot checks), ``meetings`` (direct
connections of peers behind routers), ``idleness``, ``services`` (work beside taking part),
``policies`` (settings that follow from the run file).

Start reading at ``Agent.run`` in ``agent``. Not allowed here: torch, imports of ``peer.trainer`` or
``peer.cli``, and blocking calls on the event loop (files go through ``asyncio.to_thread``).
"""
