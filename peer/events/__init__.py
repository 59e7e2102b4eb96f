"""Events: the table of all events, and sentences, stories and curves made of them. Pure.

An event is a name and fields. It is emitted where something changes (the machine of a round, the
averager, presence, the station, the agent, the training process), and it is read as a dictionary:
the fields, ``event`` and, in a log, ``at``.

    table       every event: fields, sentence, audience, and its sentence in words. Start here
    sentences   sentences that depend on more than the values of the fields
    logs        several peers' logs as one timeline
    names       names of peers in place of ids, and their texts made safe for terminals
    explain     stories from logs: ``shoal explain``
    board       what the page remembers of the last while
    __main__    the page of all events: ``python -m peer.events``

In come dictionaries, out go sentences and lines. Files are read and written in ``peer.views``.
No module here may use a clock, a file (except ``__main__``), a socket or a thread. An event is
not renamed, and the meaning of a field does not change: logs of earlier versions are read, too.
"""
