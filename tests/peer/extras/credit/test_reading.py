"""The tally in a peer's folder, and what an export says of it."""

from __future__ import annotations

from pathlib import Path

from peer.extras.credit.accounting import wire
from peer.extras.credit.reading import save_tally
from peer.extras.export.card import RunFacts, card, facts_in_folder
from tests.peer.extras.credit.accounting.books import a_tally
from tests.peer.extras.export.exported_run import RUN, save_run


def test_the_card_lists_contributors_by_the_names_that_they_signed(tmp_path: Path) -> None:
    outer = save_run(tmp_path)
    save_tally(tmp_path, wire.encode(a_tally(run=RUN.run_id)))
    facts = facts_in_folder(tmp_path, outer)
    text = card(outer, facts, tokenizer="bytes", dtype="fp32", kind="Gpt")
    assert "## Contributors\n" not in card(
        outer, RunFacts(), tokenizer=None, dtype="fp32", kind="Gpt"
    )
    assert "| anna | " in text and "| boris | 5 | " in text
    assert "cla" not in text, "a name that its peer has not signed for this list"
    assert "| peers | 2 peers, listed below |" in text
