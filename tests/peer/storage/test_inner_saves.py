"""Saves of a trainer's inner state at intervals, and when it leaves."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.storage.inner_saves import InnerSaves
from peer.storage.inner_state import save


def test_an_optimizer_that_cannot_be_saved_costs_its_state_and_not_the_place_in_the_data(
    tmp_path: Path,
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight]["factors"] = [torch.zeros(2)]  # as Shampoo keeps them
    told: list[tuple[str, ...]] = []

    def opened() -> InnerSaves:
        return InnerSaves(
            tmp_path,
            model,
            optimizer,
            run_id="run",
            every_s=0.0,
            tell=lambda event, fields: told.append((event, *map(str, fields.values()))),
        )

    saves = opened()
    for step in (1, 2):
        saves.save(step=step, position={"position": 4 * step})
    saves.finish()
    assert [event for event, *_ in told] == ["checkpoint_failed"], "once"
    expected = torch.rand(3)
    torch.manual_seed(9)
    restored = opened().restore()
    assert restored is not None
    assert restored.data == {"position": 8}
    assert told[1:] == [
        ("optimizer_not_restored", "it was saved without the state of the optimizer")
    ]
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("before", [True, False], ids=["with a scale", "of an older release"])
def test_the_scale_of_half_precision_is_saved(tmp_path: Path, before: bool) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def opened(scaler: torch.amp.GradScaler | None) -> InnerSaves:
        saves = InnerSaves(
            tmp_path, model, optimizer, run_id="run", every_s=60.0, tell=lambda *told: None
        )
        saves.scaler = scaler
        return saves

    saves = opened(torch.amp.GradScaler("cpu", init_scale=16.0) if before else None)
    saves.save(step=1, position={})
    saves.finish()
    fresh = torch.amp.GradScaler("cpu")
    assert opened(fresh).restore() is not None
    assert fresh.get_scale() == (16.0 if before else 65536.0)
    assert opened(None).restore() is not None, "it trains in another precision now"


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
