"""Views: what people and programs see of a running peer.

    event_log   ``events.jsonl``: writing and reading event logs
    watch       reporters for ``shoal join``: screen, sentences, JSON lines with the figures.
                Start here
    screen      drawing the screen from a ``View``
    pages       HTTP server of /healthz, /readyz, /metrics and the page for people
    connections  bounds of the connections of a page's server
    page_address  where the pages are served
    page.html   the page for people
    drawing.js  what this page and the public one of a run are drawn with
    agent_page  checks, metrics and content of the pages of a learner or keeper

In come events, statuses and a ``Run``; out go text, files and answers to HTTP requests. Sentences
of events come from ``peer.events``. A view changes nothing of what it shows, and a view that fails
(a full disk, a closed terminal, a taken port) never stops training.
"""
