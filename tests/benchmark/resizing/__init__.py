"""A simulated swarm that grows and shrinks by schedule: ``python -m`` this package.

``resizing`` is the swarm, looked at in windows of time.
"""
