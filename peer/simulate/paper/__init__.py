"""Experiments on figures that papers report and that this project promises.

Each module has a ``table`` that computes rows and a ``section`` that presents them:

- ``goodput``: training time that failures leave; simulated chips (``failures``).
- ``bandwidth``: link speed that each method needs; arithmetic alone.
- ``heterogeneous``: peers of different speed, and rules for how long a round waits for them.
- ``quality``: the loss that each choice costs at equal tokens.
- ``compare``: time to a given loss over slow links, against data parallel training.
- ``following``: rounds whose codec and cycle follow the line, against fixed ones.

The last four train many small swarms: ``training`` runs them in several processes, and keeps
finished ones in a folder.
"""
