"""Events: the table of all events, and sentences and curves made of them. Pure.

An event is a name and fields. It is emitted where something changes (the machine of a round, the
averager, presence, the station, the agent, the training process), and it is read as a dictionary:
the fields, ``event`` and, in a log, ``at``.

    table       every event: fields, sentence, audience, and its sentence in words. Start here
    sentences   sentences that depend on more than the values of the fields
    names       names of peers in place of ids, and their texts made safe for terminals
    board       what the page remembers of the last while

In come dictionaries, out go sentences. Files are read and written in ``peer.views``, stories told
from them in ``peer.extras.explain``. No module here may use a clock, a file, a socket or a thread.
An event is not renamed, and the meaning of a field does not change: logs of earlier versions are
read, too.
"""
