"""The public side of a run: its exports for web servers, and its page.

``publishing`` writes exports while the run goes on; ``run_page`` is the page of a run as data, and
its server; ``keepers_page`` is what a keeper knows of its run for that page. ``keeping`` has both
for a keeper, as the options of ``shoal keep`` ask for them.
"""
