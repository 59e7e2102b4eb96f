"""``python -m peer.events`` writes the documentation of events into EVENTS.md."""

from pathlib import Path

from peer.events.document import document

(Path(__file__).parents[2] / "EVENTS.md").write_text(document(), encoding="utf-8")
