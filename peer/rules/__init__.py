"""Rules of one peer, apart from those of averaging. Pure.

    limits      what the owner of a machine allows, the traffic of a month, whether the peer may
                train now, and memory or files for the run's state
    ledger      the fate of every token that this peer processed: merged, pending or discarded
    amendments  the settings of the run after its owner's orders
    ending      whether a run is over, and what a peer does from then on: one machine
    leaving     how long a peer that leaves stays for its work, and for others that leave too
    others      what follows from the other peers: who can be dialled, their releases, which history
                goes on when a run was founded twice, who measures the held-out loss
    rented      the public ports of a rented container, from its provider's variables

In come facts and the time, out go verdicts and sums. The effects are elsewhere: ``peer.guest``
enforces limits, ``peer.agent`` keeps the ledger and ends a run. No module here may use a clock, a
file, a socket, a thread or torch. Start with ``limits.why_rest`` or ``ledger.Ledger``.
"""
