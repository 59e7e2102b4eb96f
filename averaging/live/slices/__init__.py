"""The bytes of one round: slices of a fragment, uploaded, merged by their reducers, sent back.

Start with ``exchange``, one peer's part in one round. ``parts`` are the parts that a slice is
encoded and merged in; ``uploading`` is a member's side, ``reducing`` a reducer's, ``bundling`` that
of a peer which merges for its site first. ``evidence``: signed claims about slices, and what they
prove. ``watch``: hooks for simulations and tests.

Which slice goes to whom is decided by ``averaging.round.traffic``.
"""
