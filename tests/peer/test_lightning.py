"""A Lightning Trainer in a run, with a real agent that has no network."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peer.model.muon import Muon
from tests.processes import RANKS_ALONE, Processes

pytestmark = [
    pytest.mark.usefixtures("agent_threads"),
    pytest.mark.skipif(
        find_spec("lightning") is None, reason="the extra 'lightning' is not installed"
    ),
    # Theirs: about their own age, and about what could be faster.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Several threads would wait for each other on a machine that runs other tests as well."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_lightning_trainer_exchanges_and_follows_the_runs_schedule(tmp_path: Path) -> None:
    from tests.peer.lightning_fit import Fit, Until, train

    module = Fit()
    warm = Until(lambda: module.rates[-1] == pytest.approx(0.002))
    shoal, events, trainer = train(
        tmp_path, module, {"pace_s": 0.005}, callbacks=[warm], max_epochs=200
    )
    assert warm.happened()
    assert max(module.rates) <= 0.002
    assert "adopted" in {event["event"] for event in events}
    stats = shoal.run.status  # type: ignore[union-attr]
    assert stats.steps == trainer.global_step
    assert stats.tokens == 4 * stats.steps


def test_a_lightning_trainer_steps_with_muon(tmp_path: Path) -> None:
    from tests.peer.lightning_fit import Fit, train

    class ByMuon(Fit):
        def configure_optimizers(self) -> Any:
            matrix = {"params": [self.layer.weight], "orthogonal": True}
            return Muon([matrix, {"params": [self.layer.bias]}], lr=0.5)

    module = ByMuon()
    before = module.layer.weight.detach().clone()
    shoal, _, trainer = train(tmp_path, module, max_epochs=1)
    assert shoal.run.status.steps == trainer.global_step == 16  # type: ignore[union-attr]
    assert max(module.rates) <= 0.002
    assert 0 < (module.layer.weight - before).abs().max() < 16 * 0.002


def test_the_held_out_loss_is_measured_when_it_is_this_peers_turn(tmp_path: Path) -> None:
    from tests.peer.lightning_fit import Fit, Until, train

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
    from tests.peer.lightning_fit import Fit, train

    shoal, _, _ = train(tmp_path, Fit(), max_steps=2, accumulate_grad_batches=3)
    stats = shoal.run.status  # type: ignore[union-attr]
    assert (stats.steps, stats.tokens) == (2, 2 * 3 * 4)


@pytest.mark.filterwarnings("ignore:.*checkpoint:UserWarning")
def test_it_stops_with_the_run_and_the_last_checkpoint_has_its_final_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lightning

    from tests.peer.lightning_fit import Fit, train

    monkeypatch.setenv("LONE_AGENT_ROUNDS", "2")
    module = Fit()
    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=tmp_path / "out", save_last=True, every_n_epochs=1
    )
    shoal, events, trainer = train(
        *(tmp_path, module, {"pace_s": 0.005}),
        callbacks=[checkpoints],
        max_epochs=200,
        enable_checkpointing=True,
    )
    assert any(event["event"] == "over" and event["finished"] for event in events)
    assert trainer.global_step < 200 * 16
    final = load_file(shoal.run.directory / "model.safetensors")
    saved = torch.load(tmp_path / "out" / "last.ckpt", weights_only=True)["state_dict"]
    for name, value in final.items():
        assert torch.equal(saved[name], value), name
        assert torch.equal(module.get_parameter(name), value), name


def test_an_error_in_training_ends_the_exchange(tmp_path: Path) -> None:
    import lightning

    from peer.lightning import ShoalCallback
    from tests.peer.lightning_fit import Fit, train

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
    from tests.peer.lightning_fit import Fit, train

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
    from peer.lightning import tokens_of

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
        "-W", "ignore", "-m", "tests.peer.test_lightning", str(tmp_path), environment=RANKS_ALONE
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
    from tests.peer.lightning_fit import Fit, train

    module = Fit()
    shoal, _, _ = train(Path(directory), module, strategy="ddp", devices=2, max_epochs=1)
    rank = torch.distributed.get_rank()
    said = {
        "rank": rank,
        "peer": shoal.run.peer_id,
        "weight": module.layer.weight.tolist(),
        "steps": module.trainer.global_step,
        "seen": module.seen,
        "tokens": None if rank else shoal.run.status.tokens,  # type: ignore[union-attr]
    }
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
