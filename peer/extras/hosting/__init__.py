"""Hosting a bootstrap peer: a long-running process at a well-known address.

    commands    ``shoal bootstrap``, ``shoal host``
    group       the parts of ``shoal host``: a bootstrap peer and a keeper as processes
    bootstrap   the peer, its checks, page and metrics. Start with ``serve``
    run_pages   public pages of the runs that meet here
    service     the systemd unit, and notifications to systemd

In come the settings of ``shoal bootstrap``, out goes a running peer until it is told to stop. It
belongs to no run and imports nothing of averaging or training. Nothing is installed or started on
the machine: writing a unit file is all that ``service`` does.
"""
