"""The public side of a run: its exports for web servers, and its page.

- ``keeping``: both for a keeper, as the options of ``shoal keep`` ask for them. Start here.
- ``shelf``: the folder of exports, which any static web server can serve.
- ``exporting``: what the process that makes an export does.
- ``run_page``: the page of a run as data, and its server, with ``page.html``, ``page.js`` and
  ``page.css``. ``keepers_page``: what a keeper knows of its run for that page.

An export is complete or absent, whatever happens meanwhile (``peer.extras.export.folder``).
"""
