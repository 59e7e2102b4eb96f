"""Learners in several regions, each behind a line of its own: ``python -m`` this package.

- ``trial``: real commands on such lines (``tests.swarms.wide_area``), and what is counted.
- ``figures``: what one trial shows, beside what ``examples/paper/bandwidth`` predicts.
"""
