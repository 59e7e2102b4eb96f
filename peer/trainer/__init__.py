"""The trainer's process: a training loop that takes part in a run.

In: a model, optimizers and a run file from the caller, merged states and news from the agent. Out:
parameters of the run in the model, the learning rate, batches, events, statistics.

- ``session``: ``join`` and ``Run``, the interface of a training loop; ``rank``: its part that every
  process of a learner has (``peer.island``); ``settings``, ``arguments``: what the caller gives;
- ``parts``: opens everything that a run needs, and waits until this peer has the parameters;
- ``learner``: the safe point, the only place where parameters are read or changed;
  ``device_copies``: its copies; ``parameters``: which parameters are exchanged;
- ``lead``, ``channel``, ``units``: the other processes of a learner that has several;
- ``trials``: spot checks of other peers' contributions;
- ``news``: the agent's messages; ``pacing``: limits of the owner, and rounds to await;
  ``loop_checks``: mistakes of the caller's loop, and whether peers draw the same batches;
- ``loop``, ``preflight``: the loop of the commands, checks before joining;
- ``computing``: how this machine computes the loop's steps; ``needs``: the memory that a run file
  asks for; ``own_loops``: ``computing`` for other programs.

Start reading at ``Run._safe_point`` in ``session``. Not allowed here: a network, asyncio, imports
of ``peer.agent``, ``peer.views`` or ``peer.cli`` (views read ``peer.status``), and
any wait for other peers at a safe point, except in synchronous runs.
"""
