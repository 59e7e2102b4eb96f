"""The public page of a run: for anybody, read-only, without addresses of peers.

- ``content``: what the page says, as data; and the call by which a bootstrap peer asks a keeper for
  it. Start here.
- ``record``: the loss, the tokens and the news over the whole run, bounded, kept over restarts.
- ``server``: serves the content, and the join link as a QR code, with the files of the page
  (``page.html``, ``page.js``, ``page.css``), which load nothing from elsewhere.

The page of one's own peer, with addresses of others and for its owner alone, is in ``peer.views``.
"""
