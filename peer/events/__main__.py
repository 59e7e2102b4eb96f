"""``python -m peer.events`` writes the documentation of events into its page."""

from pathlib import Path

from peer.events.document import document

(Path(__file__).parents[2] / "docs/reference/events.md").write_text(document(), encoding="utf-8")
