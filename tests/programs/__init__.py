"""Programs of several frameworks that take part in a run, each as one file that runs as it is.

Shoal's lines in them are the import, ``peer.join`` or a callback, ``run.log`` and ``run.over``.
``here`` has what a test needs of a program: where it runs, and what it says at its end.
``test_programs`` runs each of them as two peers.
"""
