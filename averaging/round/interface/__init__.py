"""The values that a round machine, its parts and its owner pass to one another.

- ``inputs``: everything that a machine is told; ``effects``: everything that its owner carries out;
- ``identity``: what never changes while a machine runs, and a commit with its signature;
- ``phase``: names of phases and stages.

Nothing here decides anything, and nothing here knows the machine or its parts.
"""
