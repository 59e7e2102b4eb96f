"""Publishing: exports of a run that goes on, in a folder that any static web server can serve.

In: the folder of a peer, with its newest checkpoint. Out: a folder of exports with a link to the
newest and an index; and, if asked for, an upload to the hub of Hugging Face.

- ``shelf``: the folder: what is in it, adding an export, dropping old ones. Start here.
- ``hub``: uploading an export.
- ``publisher``: runs an export in a process of its own, again and again, beside a keeper.
- ``exporting``: what that process does (``python -m peer.extras.site.publishing JOB``).

An export is complete or absent, whatever happens meanwhile (``peer.extras.export.folder``).
"""
