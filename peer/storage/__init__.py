"""Files of one peer: checkpoints, counts of processed tokens, and the folder that holds them.

In: the state of an agent or a trainer. Out: files that survive ``kill -9`` and a power cut at any
moment, whole or not there, verified when they are read.

Start with ``checkpoint``, a folder of numbered checkpoints; ``tensor_file`` is the safetensors
format that they use. ``outer_state`` is the content of an agent's checkpoint (fragments with their
history, the ledger) and its export, ``inner_state`` that of a trainer's (optimizer, position in the
data, generators), and
``inner_saves`` writes it at intervals, in a thread. ``progress`` counts the tokens that the trainer
has processed.
``good_states`` keeps earlier states, to which the run's owner may take the run back, and ``proofs``
what is held against others: proofs of lies, and histories that this peer went back from.
``credentials`` prove who may take part, ``address`` has this peer's port and link and finds this
user's other peers of a run. ``home`` names the folders and locks them. ``earlier`` knows of a run
that is not on line, and looks for faults in the folders.

Nothing in a checkpoint is executed, and no lengths in it are trusted before they are checked.
One process writes a folder; any process may read it.
"""
