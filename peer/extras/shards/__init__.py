"""Token shards of text, which spare every peer of a run the tokenizing.

In: files of text and a tokenizer. Out: ``.bin`` files, the list of their hashes, and lines of a run
file. ``commands`` has ``shoal data prepare``, ``writing`` makes the files, which ``peer.data``
reads.
"""
