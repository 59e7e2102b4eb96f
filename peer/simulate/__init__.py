"""``shoal simulate``: experiments in virtual time, reproducible from a seed.

Input: settings and seeds. Output: rows, tables and plots, which ``peer.results`` writes.

- ``problems``: what simulated learners train, from a quadratic function to a small transformer.
- ``swarm``: a whole swarm in virtual time with real rounds and numbers (``shoal simulate swarm``).
- ``sizes``: how many peers a swarm has over time.
- ``membership_cost``: what membership costs while a swarm changes its size.
- ``paper``: experiments that check reported and promised figures. Some train swarms
  (``quality``, ``heterogeneous``, ``compare``), others only compute (``goodput``, ``bandwidth``).

Each of them may import those above it, never those below. To start reading: ``swarm.swarm.run``.
"""
