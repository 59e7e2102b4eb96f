"""Saves of a trainer's inner state at intervals, and when it leaves."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.storage.inner_saves import InnerSaves
from peer.storage.inner_state import save


def test_the_save_of_a_trainer_that_leaves_is_made_although_another_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training went on from the earlier one, and read the sequences since then again."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    may_write = threading.Event()

    def slow(*args: Any) -> Path:
        assert may_write.wait(60.0)
        return save(*args)

    monkeypatch.setattr("peer.storage.inner_saves.save", slow)

    def opened() -> InnerSaves:
        return InnerSaves(
            tmp_path, model, optimizer, run_id="run", every_s=60.0, tell=lambda *told: None
        )

    saves = opened()
    saves.save(step=1, position={"position": 4})
    saves.save(step=2, position={"position": 8})
    may_write.set()
    saves.finish()
    restored = opened().restore()
    assert restored is not None
    assert (restored.step, restored.data) == (2, {"position": 8})
