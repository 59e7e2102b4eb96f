"""Entry point of ``python -m peer.agent``, which a trainer starts."""

import sys

from peer.agent.agent import main

raise SystemExit(main(sys.argv[1:]))
