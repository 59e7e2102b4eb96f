"""Stories from event logs: ``shoal explain``.

In: event logs of one or several peers. Out: lines of text. ``logs`` makes one timeline of them,
``stories`` the summary of a run, a round or a peer, ``commands`` the command. Sentences, and who
gets which event, are those of ``peer.events``: the page of a peer shows the same.
"""
