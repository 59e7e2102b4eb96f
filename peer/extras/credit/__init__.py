"""Credit on line: who contributed what to a run.

``accounting`` is the tally, ``service`` the exchange with other peers of the run, ``reading`` what
others read of it; ``commands`` has ``shoal credit``.
"""
