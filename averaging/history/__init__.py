"""The history of a fragment: comparing two peers' states, and bringing one of them up to date.

In come commits, seals, merged payloads and what other peers show of their history; out come
lineages, states, and verdicts such as "that peer is behind" or "these two are apart".

Start with ``lineage`` (the hash of a state's whole history) and ``standing`` (how two peers
compare). A state is the numbers and their history (``state``).

- ``lineage chain merged_map``: what a history consists of.
- ``parent_maps``: the merged maps that travel in a round, bound by the lineages of its parents.
- ``standing``: comparing histories, and the history after a round.
- ``replay``: applying rounds that are over, and going back along them.
- ``adoption``: how a learner takes in a new version, and what becomes of its pending work.
- ``manifest``: describing a state before its bytes are fetched; states that the run's owner
  attests, and those that a rollback makes of them.
- ``audit``: checking that equal lineages have equal bits.
- ``claims readings``: what a member signs of the bytes that it made of a slice, and where the data
  of a step stands.

Versions may not be compared across lineages; merged tokens may. Nothing here sends a message or
decides when to fetch a state.
"""
