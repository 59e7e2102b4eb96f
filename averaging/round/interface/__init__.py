"""The values that a round machine, its parts and its owner pass to one another.

- ``inputs``: everything that a machine is told; ``effects``: everything that its owner carries out;
- ``transitions``: what a part asks of the machine, beside effects;
- ``identity``: what a part is given for good; ``situation``: what it is given with each call;
- ``phase``: names of phases, stages and timers; ``signed_commit``: a commit with its signature.

Nothing here decides anything, and nothing here knows the machine or its parts.
"""
