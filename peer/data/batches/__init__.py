"""Batches of token sequences, in an order that each peer has for itself and can resume.

``sequences`` has the permutation, what is held out, and the sequences of an array of tokens;
``prefetch`` reads batches ahead in a thread.

Nothing here knows where tokens come from.
"""
