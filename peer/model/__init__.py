"""Models as peers exchange them: names of parameters, weights in files, built-in recipes.

In: a torch module, wrapped or not, or the model section of a run file. Out: parameters by their
names in the bare model, which are the same at every peer; weights read from and written to
safetensors files.

Start with ``naming``. ``weights`` draws first weights, reads and writes files; ``muon`` is an
optimizer. The rooms:
``recipes`` builds the model and the optimizer of a run file, ``export`` writes a run's model for
other programs, ``use`` continues texts and measures losses with it.

Nothing in a file of weights is executed.
"""
