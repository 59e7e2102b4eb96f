"""A simulated swarm that grows and shrinks by schedule: ``python -m`` this package.

- ``resizing``: the swarm, looked at in windows of time.
- ``membership_cost``: what membership costs on the same schedule, with presences in virtual time.
"""
