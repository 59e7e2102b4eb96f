"""A run's model put to use: it continues texts, and its loss on texts is measured.

In: the parameters of a run, or a folder that ``shoal export --to hf`` has written. Out: a model in
memory together with the text form of its tokens, continuations of texts, losses.

Start with ``ready``; ``finding`` gets a model from a folder or from the peers of a run, and
``adapted`` puts adapters on their base. ``codec`` turns text into tokens and back; ``continuing``
draws tokens; ``measuring`` computes losses; ``tasks`` runs the tasks of lm-eval;
``commands`` has ``shoal say`` and ``shoal eval``.

The built-in model of bytes needs torch alone; everything else needs transformers. No code of a
folder or of the hub is executed.
"""
