"""Presentation of experiments' results: files, plots and statistics.

- ``page``: CSV tables, and one HTML page with tables and pictures. Start with ``Section``.
- ``plots``: matplotlib figures in one style, rendered to PNG.
- ``mean``: a mean over seeds with its standard error.

Used by all other rooms of ``peer.lab``; it knows none of their types.
"""
