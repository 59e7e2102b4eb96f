"""``shoal demo``: a small swarm of real processes on one machine, with a kill, in a few minutes.

- ``demo``: start here. Starts and watches the processes, kills one, and sums up.
- ``processes``: starts processes, reads what they print, ends them with all their children.
- ``report``: compares the swarm with a single learner; writes the plot and the page.

Input: ``DemoSettings``. Output: one JSON record, ``demo.png`` and ``demo.html``.
"""
