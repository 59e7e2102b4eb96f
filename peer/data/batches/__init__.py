"""Batches of token sequences, in an order that each peer has for itself and can resume.

``order`` has the permutation and what is held out, ``sequences`` the stream over an array of
tokens, ``prefetch`` reads batches ahead in a thread, ``device_batches`` copies them to a device,
and ``sampling`` gives the samplers of other frameworks a seed for each peer.

Nothing here knows where tokens come from.
"""
