"""Credit: how many tokens each peer has contributed to a run, and under which name. Pure.

In come certified merged maps and statements, from this peer and from others; out comes one tally
that is the same at all peers.

- ``tally``: what is known, how two peers' knowledge is united, and its rows for people.
- ``wire``: all of it as bytes, for other peers and for a file.

Nothing here sends, reads a clock or a file: ``peer.extras.credit.service`` does.
"""
