"""Credit on line: who contributed what to a run.

``accounting`` is the tally, ``kept`` its file, ``service`` the exchange with other peers of the
run, ``asking`` the questions of a visitor; ``commands`` has ``shoal credit``.
"""
