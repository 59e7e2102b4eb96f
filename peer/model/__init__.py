"""Models as peers exchange them: names of parameters, weights in files, built-in recipes.

In: a torch module, wrapped or not, or the model section of a run file. Out: parameters by their
names in the bare model, which are the same at every peer; weights read from and written to
safetensors files.

Start with ``naming``. ``weights`` draws first weights, reads and writes files; ``muon`` is an
optimizer. The room ``recipes`` builds the model and the optimizer of a run file.

Nothing in a file of weights is executed.
"""
