"""``python -m peer.agent``: how a trainer starts its agent."""

import sys

from peer.agent.agent import main

raise SystemExit(main(sys.argv[1:]))
