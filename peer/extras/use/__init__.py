"""A run's model put to use: it continues texts, and its loss on texts is measured.

In: the parameters of a run, or a folder that ``shoal export --to hf`` has written. Out: a model in
memory together with the text form of its tokens, continuations of texts, losses.

Start with ``ready``; ``adapters`` writes a folder of adapters, and puts them on their base.
``continuing`` draws tokens; ``measuring`` computes losses; ``commands`` has ``shoal say`` and
``shoal eval``.

The built-in model of bytes needs torch alone; everything else needs transformers. No code of a
folder or of the hub is executed.
"""
