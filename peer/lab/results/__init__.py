"""Presentation of experiments' results: files, plots and statistics.

- ``page``: CSV tables, and one HTML page with tables and pictures. Start with ``Section``.
  ``Mean`` is a mean over seeds with its standard error.
- ``plots``: matplotlib figures in one style, rendered to PNG.

Used by all other rooms of ``peer.lab``; it knows none of their types.
"""
