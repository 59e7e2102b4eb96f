"""Training problems for simulated learners, behind one small interface.

- ``problem``: start here. The protocols ``Problem`` and ``LocalTraining``, and ``Places``, which
  finds the values of a fragment in a flat parameter vector; and ``Quadratic``, noisy gradients of a
  quadratic function, which needs numpy alone, and is cheap for thousands of peers.
- ``text_gpt``: the built-in transformer, very small, on Python source; needs torch.
"""
