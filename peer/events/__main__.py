"""``python -m peer.events > EVENTS.md`` writes the documentation of events."""

import sys

from peer.events.document import document

sys.stdout.write(document())
