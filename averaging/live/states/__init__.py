"""States of fragments on their way: from other peers, to other peers, and to disk.

``fetcher`` asks several peers for pieces of a state, ``fetch_server`` answers others,
``state_files`` keep states in files instead of memory.

Whether a state is taken is decided by ``averaging.round.fetched_states``.
"""
