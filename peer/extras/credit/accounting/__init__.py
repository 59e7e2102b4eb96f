"""Credit: how many tokens each peer has contributed to a run, and under which name. Pure.

- ``tally``: what one peer knows: the totals of its own states, the names that peers have signed,
  and their rows for people.
- ``wire``: all of it as bytes, for other peers and for a file.

Nothing here sends, reads a clock or a file: ``peer.extras.credit.service`` does.
"""
