"""Credit: how many tokens each peer has contributed to a run, by day, and under which name. Pure.

In come certified merged maps, reports of days and statements, from this peer and from others; out
comes one tally that is the same at all peers.

- ``tally``: what is known, and how two peers' knowledge is united. Start here.
- ``proof``: the merged map of a version with what proves it, and the tokens of each peer in maps.
- ``reports``: a contributor's signed word on how far everybody was when a day ended.
- ``statements``: the name that a peer wants to be shown by, and which other keys are its owner's.
- ``wire``: all of it as bytes, for other peers and for a file.
- ``contributors``: the tally in rows for people.

Nothing here sends, reads a clock or a file: ``peer.extras.credit.service`` does.
"""
