"""Learners in several regions, each behind a line of its own: ``python -m`` this package.

- ``trial``: real commands in network namespaces, their lines and their counters.
- ``figures``: what one trial shows, beside what ``examples/paper/bandwidth`` predicts.
- ``extrapolation``: needs of a larger run on such lines.
"""
