"""``shoal doctor``: checks of this machine and of the network around it.

    commands      ``shoal doctor``
    examination   all checks in order, with the hosts that they need. Start here
    this_machine  disk, memory, torch, codecs, port; ``Finding``: state, text, remedy; exit code
    network       seeds, DHT, run, direct lane, reachability, clock, over a ``Host``; the links and
                  addresses of the command line as a ``Plan``

In comes a ``Plan``, out go findings, each as soon as its check is done. A check that fails is a
finding, not an exception. The doctor joins no run and stores nothing: it uses a key of its own, and
the record that it puts into the DHT expires after 30 s.
"""
