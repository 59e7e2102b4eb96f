"""How this machine computes training steps: precision, micro-batches, compiled code.

Start with ``engine``, which computes the gradients of a batch and applies them.

- ``choices`` (precision, micro-batch, compiler, the device's peak) decides from facts that
  ``device_facts`` reads, which also has values of devices that nobody waits for;
- ``fitting``: a way to begin that is safe; ``tuning`` finds the best one while training and
  compiles for it, with ``probing``;
- ``compiling``: compiled code of a loss, by torch's compiler.

Nothing here knows a run's rounds or its other peers: what is exchanged does not depend on it.
"""
