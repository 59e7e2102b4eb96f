"""Rules of one peer, apart from those of averaging. Pure.

    limits      what the owner of a machine allows, the traffic of a month, and whether the peer
                may train now
    ledger      the fate of every token that this peer processed: merged, pending or discarded
    amendments  the settings of the run after its owner's orders
    ending      when a run is over, when a peer may leave, and how long it stays for its work
    held_out    which peer measures the held-out loss
    foundings   which history goes on when a run was founded twice
    reach       what follows from who can be dialled
    rented      the public ports of a rented container, from its provider's variables
    releases    this peer's release beside those of the others
    state_place     memory or files for the run's state
    devices         names of the devices to train on

In come facts and the time, out go verdicts and sums. The effects are elsewhere: ``peer.guest``
enforces limits, ``peer.agent`` keeps the ledger and ends a run. No module here may use a clock, a
file, a socket, a thread or torch. Start with ``limits.decide`` or ``ledger.Ledger``.
"""
