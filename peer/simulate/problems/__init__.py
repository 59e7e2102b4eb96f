"""Training problems for simulated learners, behind one small interface.

- ``problem``: start here. The protocols ``Problem`` and ``LocalTraining``, and ``Places``, which
  finds the values of a fragment in a flat parameter vector; and ``Quadratic``, noisy gradients of a
  quadratic function, which needs numpy alone, and is cheap for thousands of peers.
- ``text_mlp``: a small byte-level network on Python source; needs torch.
- ``text_gpt``: the built-in transformer, very small, on the same data; needs torch.
"""
