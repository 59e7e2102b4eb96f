"""A Lightning Trainer in a run, with a real agent process that has no network."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

pytest.importorskip("lightning", reason="the extra 'lightning' is not installed")

import lightning
from safetensors.torch import load_file

from peer.bridge.agent_process import LineSettings
from peer.lightning import ShoalCallback, tokens_of
from peer.model.muon import Muon
from peer.run_file.reading import parse
from tests.peer.island_rank import ALONE
from tests.processes import Processes

pytestmark = [
    # Theirs: about their own age, and about what could be faster.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
]

TOML = """
name = "lightning"
[model]
recipe = "custom"
[data]
recipe = "custom"
[inner]
optimizer = "custom"
learning_rate = 0.002
[schedule]
warmup_tokens = 200
[outer]
fragments = 2
steps_per_cycle = 5
overlap_steps = 1
"""

AGENT = (sys.executable, "-m", "tests.peer.agent.lone_agent")
QUICK = LineSettings(beat_s=0.05, silence_max_s=20.0, restart_first_s=0.05, restart_max_s=0.1)


class Fit(lightning.LightningModule):  # type: ignore[misc]
    """Fits a plane. Its scheduler is one that must have no effect."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1)
        self.seen: list[int] = []
        self.rates: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        self.seen += [int(first) for first in batch[:, 0]]
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return self.layer(batch / 64).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        halve = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return [optimizer], [{"scheduler": halve, "interval": "step"}]


def train(
    directory: Path, module: Any, own: dict[str, Any] | None = None, **settings: Any
) -> tuple[ShoalCallback, list[Any], Any]:
    events: list[Any] = []
    shoal = ShoalCallback(
        parse(TOML),
        directory=directory / "peer",
        agent_command=AGENT,
        line=QUICK,
        **({"on_event": events.append} | (own or {})),
    )
    trainer = lightning.Trainer(
        default_root_dir=directory,
        callbacks=[shoal, *settings.pop("callbacks", [])],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=settings.pop("enable_checkpointing", False),
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    points = torch.arange(64).repeat(3, 1).T.float()
    loader: torch.utils.data.DataLoader[torch.Tensor] = torch.utils.data.DataLoader(
        cast(torch.utils.data.Dataset[torch.Tensor], list(points)), batch_size=4, shuffle=True
    )
    trainer.fit(module, loader)
    return shoal, events, trainer


class Until(lightning.Callback):  # type: ignore[misc]
    def __init__(self, happened: Callable[[], bool]) -> None:
        self.happened = happened

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        trainer.should_stop |= self.happened()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Several threads would wait for each other on a machine that runs other tests as well."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_lightning_trainer_exchanges_and_follows_the_runs_schedule(tmp_path: Path) -> None:
    module = Fit()
    warm = Until(lambda: module.rates[-1] == pytest.approx(0.002))
    shoal, events, trainer = train(
        tmp_path, module, {"pace_s": 0.005}, callbacks=[warm], max_epochs=200
    )
    assert warm.happened()
    assert max(module.rates) <= 0.002
    assert "adopted" in {event["event"] for event in events}
    stats = shoal.run.stats  # type: ignore[union-attr]
    assert stats.steps == trainer.global_step
    assert stats.tokens == 4 * stats.steps


def test_a_lightning_trainer_steps_with_muon(tmp_path: Path) -> None:
    class ByMuon(Fit):
        def configure_optimizers(self) -> Any:
            matrix = {"params": [self.layer.weight], "orthogonal": True}
            return Muon([matrix, {"params": [self.layer.bias]}], lr=0.5)

    module = ByMuon()
    before = module.layer.weight.detach().clone()
    shoal, _, trainer = train(tmp_path, module, max_epochs=1)
    assert shoal.run.stats.steps == trainer.global_step == 16  # type: ignore[union-attr]
    assert max(module.rates) <= 0.002
    assert 0 < (module.layer.weight - before).abs().max() < 16 * 0.002


def test_the_held_out_loss_is_measured_when_it_is_this_peers_turn(tmp_path: Path) -> None:
    module = Fit()
    heard: list[float] = []

    def measure(found: Fit) -> tuple[float, int]:
        assert found is module
        assert not found.training
        return 0.75, 4

    def note(fields: Any) -> None:
        if fields["event"] == "measured":
            heard.append(fields["loss"])

    until = Until(lambda: bool(heard))
    own = {
        "pace_s": 0.005,
        "held_out": measure,
        "on_event": note,
    }
    train(tmp_path, module, own, callbacks=[until], max_epochs=200)
    assert heard[0] == 0.75


def test_accumulated_batches_are_one_step(tmp_path: Path) -> None:
    shoal, _, _ = train(tmp_path, Fit(), max_steps=2, accumulate_grad_batches=3)
    stats = shoal.run.stats  # type: ignore[union-attr]
    assert (stats.steps, stats.tokens) == (2, 2 * 3 * 4)


def test_it_stops_when_the_run_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONE_AGENT_ROUNDS", "2")
    _, events, trainer = train(tmp_path, Fit(), {"pace_s": 0.005}, max_epochs=200)
    assert any(event["event"] == "over" and event["finished"] for event in events)
    assert trainer.global_step < 200 * 16


@pytest.mark.filterwarnings("ignore:.*checkpoint:UserWarning")
def test_the_last_checkpoint_has_the_runs_final_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONE_AGENT_ROUNDS", "2")
    module = Fit()
    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "out", save_last=True, every_n_epochs=1
    )
    shoal, _, _ = train(
        *(tmp_path, module, {"pace_s": 0.005}),
        callbacks=[checkpoints],
        max_epochs=200,
        enable_checkpointing=True,
    )
    final = load_file(shoal.run.directory / "model.safetensors")
    saved = torch.load(tmp_path / "out" / "last.ckpt", weights_only=True)["state_dict"]
    for name, value in final.items():
        assert torch.equal(saved[name], value), name
        assert torch.equal(module.get_parameter(name), value), name


def test_an_error_in_training_ends_the_exchange(tmp_path: Path) -> None:
    class Broken(Fit):
        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            raise ZeroDivisionError

    shoals: list[ShoalCallback] = []

    class Catch(lightning.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            shoals.extend(c for c in trainer.callbacks if isinstance(c, ShoalCallback))

    with pytest.raises(ZeroDivisionError):
        train(tmp_path, Broken(), callbacks=[Catch()], max_steps=3)
    assert shoals[0].run._parts.agent.join(0.0)  # type: ignore[union-attr]


def test_a_peer_walks_the_data_in_its_own_order_the_same_each_time(tmp_path: Path) -> None:
    def order(directory: Path, **own: Any) -> list[int]:
        torch.manual_seed(5)
        module = Fit()
        train(directory, module, own, max_epochs=1)
        return module.seen

    anna = order(tmp_path / "anna")
    assert sorted(anna) == list(range(64))
    assert anna == order(tmp_path / "anna")
    assert anna != order(tmp_path / "boris")


def test_a_batch_counts_its_tokens_or_samples() -> None:
    assert tokens_of(torch.zeros(3, 5)) == 3
    assert tokens_of((torch.zeros(3, 5), torch.zeros(3))) == 3
    assert tokens_of({"input_ids": torch.zeros(3, 5), "labels": torch.zeros(3)}) == 15
    assert tokens_of({"image": torch.zeros(2, 8, 8)}) == 2
    with pytest.raises(ValueError, match="tokens=lambda batch"):
        tokens_of("text")


@pytest.mark.slow
def test_the_processes_of_a_ddp_trainer_are_one_peer(processes: Processes, tmp_path: Path) -> None:
    """Lightning starts the second process itself."""
    trainer = processes.python(
        "-W", "ignore", "-m", "tests.peer.test_lightning", str(tmp_path), environment=ALONE
    )
    assert trainer.wait(timeout=250) == 0, processes.output_of(trainer)[-3000:]
    lines = processes.output_of(trainer).splitlines()
    said = [json.loads(line) for line in lines if line.startswith('{"rank')]
    assert sorted(each["rank"] for each in said) == [0, 1]
    assert said[0]["peer"] == said[1]["peer"]
    assert said[0]["weight"] == said[1]["weight"]
    assert {each["steps"] for each in said} == {8}
    assert not set(said[0]["seen"]) & set(said[1]["seen"])
    (lead,) = (each for each in said if each["rank"] == 0)
    assert lead["tokens"] == 8 * 2 * 4


def main(directory: str) -> None:
    """One of two processes of a Trainer; for the test above."""
    module = Fit()
    shoal, _, _ = train(Path(directory), module, strategy="ddp", devices=2, max_epochs=1)
    rank = torch.distributed.get_rank()
    said = {
        "rank": rank,
        "peer": shoal.run.peer_id,
        "weight": module.layer.weight.tolist(),
        "steps": module.trainer.global_step,
        "seen": module.seen,
        "tokens": None if rank else shoal.run.stats.tokens,  # type: ignore[union-attr]
    }
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
