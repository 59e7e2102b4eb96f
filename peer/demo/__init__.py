"""``shoal demo``: a small swarm of real processes on one machine, with a kill, in a few minutes.

- ``demo``: start here. Starts and watches the processes, kills one, and sums up.
- ``report``: compares the swarm with a single learner, and writes the plot and the page.

Input: ``DemoSettings``. Output: one JSON record, ``demo.png`` and ``demo.html``.
"""
