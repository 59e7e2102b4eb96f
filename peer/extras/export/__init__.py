"""A run's model as files that other programs read: ``shoal export``.

In: the parameters of a run, of a peer's folder or downloaded (``found_models``, ``download``), and
what is known of the run. Out: one safetensors file, or a folder that transformers loads as it is:
configuration, weights, tokenizer, model card.

Start with ``folder``. ``parameters`` puts the parameters into a model, or into the architecture of
transformers that computes what the built-in model computes; ``tokenizer`` and ``card`` make the
other files, the latter with facts of the run. ``averages`` has the mean of a peer's checkpoints.
``commands`` has the command.

Nothing is uploaded, and nothing in a run file is executed.
"""
