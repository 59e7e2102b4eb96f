"""The way from files of text to cached tokens.

``downloads`` brings files, ``formats`` reads documents out of them, ``tokenizing`` turns these into
tokens, as a checked ``tokenizer_json`` says, in several ``workers``, and the ``token_cache`` keeps
those.

Which files these are, and which part of them a peer reads, is decided in ``peer.data``.
"""
