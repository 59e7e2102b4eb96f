"""Training data: for each peer an order of its own, and a held-out part that no peer trains on.

There is no coordinator. A peer's order follows from the run's id and its own peer id, and its
position is a few integers, so that it resumes at the exact sequence. Whether a document (or a
chunk of one) is held out follows from a hash of it, so that all peers hold out the same ones.

In: a run file, a peer id and the data folder, or the dataset of the user's program. Out: batches
of token sequences, the held-out sequences, and a position to save.

Start with ``sources.open_data``, which opens the recipe of a run, and ``feed``, which hands
``batches`` to the training loop until the run is over. ``text`` has the way from files to tokens.

- ``finding`` finds the files of a recipe, ``hub`` those of a dataset of the Hugging Face hub.
- ``files`` streams over weighted sources of them; ``pieces`` has their pieces prepared ahead.

A dataset's author and a run file's author are strangers: nothing here reads a local file outside
of the data folder that they name, asks a host that is not public, or executes code of theirs.
"""
