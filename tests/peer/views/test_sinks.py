"""Curves for other tools: off by default, few points, and no failure that stops training."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from peer.errors import ExtraMissing
from peer.views.sinks import Curves, SinkFailed, TensorBoard, Wandb, open_curves

HOUR_S = 3600.0


class Noted:
    """A sink that keeps its points and fails after some of them."""

    def __init__(self, fails_after: int = 1_000_000) -> None:
        self.points: list[int] = []
        self.closed = False
        self._fails_after = fails_after

    def write(self, figures: Mapping[str, float], *, tokens: int) -> None:
        if len(self.points) == self._fails_after:
            raise OSError(28, "No space left on device")
        self.points.append(tokens)

    def close(self) -> None:
        self.closed = True


def points_in(hours: float, *, step_s: float = 1.0) -> int:
    now = 0.0
    curves = Curves([], clock=lambda: now)
    count = 0
    while now < hours * HOUR_S:
        count += curves.is_due()
        now += step_s
    return count


def test_points_come_at_growing_intervals() -> None:
    assert points_in(0.1) == 72
    assert 3500 < points_in(24.0) < 4100
    assert points_in(30 * 24.0, step_s=10.0) < 8000


def test_a_sink_that_fails_gets_no_more_points_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, sound = Noted(fails_after=1), Noted()
    curves = Curves([broken, sound])
    with caplog.at_level(logging.WARNING):
        for tokens in range(4):
            curves.write({"loss": 1.0}, tokens=tokens)
    assert (broken.points, sound.points) == ([0], [0, 1, 2, 3])
    assert len(caplog.records) == 1 and "No space left" in caplog.text


def test_there_are_no_sinks_by_default(tmp_path: Path) -> None:
    where = tmp_path / "peer"
    with open_curves(tensorboard=None, wandb_project=None, name="x", directory=where) as curves:
        curves.write({"loss": 1.0}, tokens=1)
    assert not where.exists()


@pytest.mark.parametrize("module", ["wandb", "torch.utils.tensorboard"])
def test_a_missing_package_is_named_with_its_extra(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    extra = module.rpartition(".")[2]
    with pytest.raises(ExtraMissing, match=rf"pip install 'shoal\[{extra}\]'") as caught:
        if extra == "wandb":
            Wandb("project", name="anna", directory=tmp_path)
        else:
            TensorBoard(tmp_path)
    assert caught.value.exit_code == 2


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="shoal[tensorboard]"
    )
    folder = tmp_path / "curves"
    with open_curves(
        tensorboard=folder, wandb_project=None, name="anna", directory=tmp_path
    ) as curves:
        for step in range(3):
            curves.write({"loss": 3.0 - step, "peers": 4.0}, tokens=1000 * step)
    read = accumulator.EventAccumulator(str(folder))
    read.Reload()
    losses = [(point.step, point.value) for point in read.Scalars("shoal/loss")]
    assert losses == [(0, 3.0), (1000, 2.0), (2000, 1.0)]
    assert read.Tags()["scalars"] == ["shoal/loss", "shoal/peers"]


def test_a_folder_that_is_not_writable_is_an_error_of_one_line(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="shoal[tensorboard]")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SinkFailed, match="omit the option"):
        TensorBoard(tmp_path / "file" / "curves")


@pytest.mark.slow
def test_weights_and_biases_keeps_a_run_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="shoal[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with open_curves(
        tensorboard=None, wandb_project="shoal-test", name="anna", directory=tmp_path
    ) as curves:
        curves.write({"loss": 2.0}, tokens=1000)
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
