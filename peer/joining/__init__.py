"""Finding a run, and looking at it, before joining it.

    link   ``shoal://`` links, and the run file behind a link, path or https address. Start here.
           It asks the run's peers by a child process, as most processes have no network
    fetch  that child process: ``python -m peer.joining.fetch LINK``
    visit  ``shoal status LINK``: the status of every peer of a run

In comes what a person pasted, out goes a ``RunFile`` or the answers of peers. Content from the
network is checked against the hash in the link. Nothing here joins a run: ``fetch`` and ``visit``
use a key of their own and only observe.
"""
