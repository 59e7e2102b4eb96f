"""The built-in loop, beside an agent that is real but for the network."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from peer.bridge.messages import Fields
from peer.errors import DataUnavailable, MachineTooSmall
from peer.model.recipes import build_model, next_token_loss
from peer.model.weights import WeightsUnfit, save_weights
from peer.run_file.reading import parse
from peer.run_file.sections import (
    RunFile,
)
from peer.status import PeerStatus
from peer.storage.checkpoint import CheckpointFolder
from peer.trainer.computing.choices import OwnerChoices
from peer.trainer.computing.device_facts import facts_of
from peer.trainer.computing.engine import Engine
from peer.trainer.computing.fitting import Fit, Goal, begin
from peer.trainer.computing.tuning import Tuner
from peer.trainer.loop import Outcome, Stop, TrainerSettings, open_engine, train
from peer.trainer.session import Run
from peer.trainer.settings import JoinSettings
from tests.peer.agent.lone_agents import AGENT
from tests.peer.trainer.recipe_run import TEXT

pytestmark = pytest.mark.usefixtures("agent_threads")


@pytest.fixture
def run_file() -> RunFile:
    return parse(TEXT)


def own(directory: Path) -> JoinSettings:
    words = " ".join(f"word{number}" for number in range(40_000))
    (directory / "data").mkdir(parents=True, exist_ok=True)
    (directory / "data" / "corpus.txt").write_text(words, encoding="utf-8")
    return JoinSettings(
        directory=directory,
        agent_command=AGENT,
        drain_s=5.0,
    )


def trained(
    run_file: RunFile, directory: Path, *, steps: int, events: list[Fields] | None = None
) -> Outcome:
    heard: list[Fields] = [] if events is None else events
    settings = TrainerSettings(device="cpu", threads=1, steps_max=steps)
    return train(
        run_file, own=own(directory), settings=settings, stop=Stop(), on_event=heard.append
    )


@pytest.fixture(autouse=True)
def a_home_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))


def test_the_loop_stops_after_the_given_steps_and_reports_them(
    run_file: RunFile, tmp_path: Path
) -> None:
    events: list[Fields] = []
    outcome = trained(run_file, tmp_path / "peer", steps=7, events=events)
    assert (outcome.status.steps, outcome.status.tokens) == (7, 7 * 2 * 16)
    assert not outcome.finished
    assert not outcome.stopped
    assert outcome.status.loss is not None
    assert any(e["event"] == "phase" and e["name"] == "ready" for e in events)


def test_the_loop_tries_contributions_of_others_where_the_run_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer reads the batch that it is told of, here its own, and trains on as before."""
    monkeypatch.setenv("LONE_AGENT_TRIES", "1")
    run_file = parse(TEXT + "[policy]\nspot_checks = 1.0\n")
    told: list[dict[str, Any]] = []
    stop = Stop()

    def on_event(fields: Fields) -> None:
        if fields["event"] == "tried":
            told.append(dict(fields))
        if len(told) == 2:
            stop.ask()

    settings = TrainerSettings(device="cpu", threads=1, steps_max=20_000)
    outcome = train(run_file, own=own(tmp_path), settings=settings, stop=stop, on_event=on_event)
    same, poisoned = told
    assert same["before"] == same["after"]
    assert poisoned["after"] > 1.05 * poisoned["before"]
    assert all(each["seconds"] > 0.0 for each in told)
    assert outcome.status.loss is not None and outcome.status.loss < 6.0, "the poison is gone again"
    assert not list(tmp_path.glob("trial*"))


@pytest.mark.parametrize("fits", [True, False])
def test_a_held_out_measurement_that_runs_out_of_memory_does_not_end_training(
    fits: bool, run_file: RunFile, tmp_path: Path
) -> None:
    """It runs at a safe point, where its error went through the loop."""
    most, awaited = (1, "measured") if fits else (0, "recorded")
    events: list[Fields] = []
    stop, later = Stop(), Counter[str]()

    def loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        if len(tokens) > (2 if torch.is_grad_enabled() else most):
            raise torch.OutOfMemoryError("CUDA out of memory")
        if torch.is_grad_enabled() and any(event["event"] == awaited for event in events):
            later["passes"] += 1
        if later["passes"] == 20:
            stop.ask()
        return next_token_loss(model, tokens)

    settings = TrainerSettings(device="cpu", threads=1, steps_max=20_000)
    found = train(
        run_file,
        own=own(tmp_path / "peer"),
        settings=settings,
        stop=stop,
        on_event=events.append,
        engine=open_engine(run_file, settings, made=partial(Engine, loss=loss)),
    )
    assert found.stopped, "training goes on after the measurement"
    names = [event["event"] for event in events]
    assert ("measured" in names) == fits
    assert names.count("not_measured") == (0 if fits else 1)
    recorded = [event for event in events if event["event"] == "recorded"]
    assert recorded == ([] if fits else [{"event": "recorded", "name": "not_measured"}])


def test_an_optimizer_s_state_that_does_not_fit_is_refused_before_anything_is_trained(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step it was too late: it may have changed some parameters already."""
    settings = TrainerSettings(device="cpu", threads=1, steps_max=3)
    engine = open_engine(run_file, settings)
    passes: list[int] = []
    monkeypatch.setattr(engine, "gradients", lambda batch: passes.append(len(batch)))

    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine.optimizer, "step", full)
    with pytest.raises(MachineTooSmall, match="state of its optimizer"):
        train(run_file, own=own(tmp_path), settings=settings, stop=Stop(), engine=engine)
    assert not passes


def test_the_loop_knows_its_speed(run_file: RunFile, tmp_path: Path) -> None:
    speeds: list[PeerStatus] = []
    train(
        run_file,
        own=own(tmp_path / "peer"),
        settings=TrainerSettings(device="cpu", threads=1, steps_max=3),
        stop=Stop(),
        on_step=lambda run: speeds.append(run.status),
    )
    assert speeds[0].tokens_per_s is None, "one step has no duration yet"
    last = speeds[-1]
    assert last.tokens_per_s is not None
    assert last.tokens_per_s > 0
    assert last.next_merge_s is None, "nobody else trains"
    assert last.share_of_peak is None, "the peak of a processor is not known"


def test_the_loop_trains_while_it_compiles_and_says_so(run_file: RunFile, tmp_path: Path) -> None:
    """The compiler fails here, and training goes on."""
    events: list[Fields] = []
    stop = Stop()
    speeds: list[PeerStatus] = []

    def on_event(fields: Fields) -> None:
        events.append(fields)
        if fields["event"] == "compile_failed":
            stop.ask()

    settings = TrainerSettings(device="cpu", threads=1, steps_max=10_000)
    trained = threading.Event()

    def broken(graph: object, inputs: object) -> None:
        assert trained.wait(60.0)
        raise KeyError("no such instruction")

    def on_step(run: Run) -> None:
        speeds.append(run.status)
        if len(speeds) == 3:
            trained.set()

    engine = open_engine(run_file, settings, made=partial(Engine, backend=broken))
    wishes = OwnerChoices(compile="on", precision="fp32")
    engine.choose(replace(engine.choices, compile=True, precision="fp32"))
    goal, _ = begin(engine, facts_of(engine.device), wishes, room=1e9, known=None)
    engine.tuning = Tuner(engine, goal)
    found = train(
        run_file,
        own=own(tmp_path / "peer"),
        settings=settings,
        stop=stop,
        on_event=on_event,
        on_step=on_step,
        engine=engine,
    )
    assert 0 < found.status.steps < 10_000
    names = [event["event"] for event in events]
    assert (names.count("compiling"), names.count("compile_failed")) == (1, 1)
    # There was no bar before the time was known.
    assert any(str(speed.preparing).startswith("compiling [") for speed in speeds)


def test_leaving_says_that_it_waits_for_a_compiler(run_file: RunFile, tmp_path: Path) -> None:
    """It waited in silence."""
    told = threading.Event()
    events: list[Fields] = []

    def on_event(fields: Fields) -> None:
        events.append(fields)
        if fields["event"] == "compiler_awaited":
            told.set()

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        assert told.wait(60.0)
        return graph.forward

    torch._dynamo.reset()
    settings = TrainerSettings(device="cpu", threads=1, steps_max=3)
    engine = open_engine(run_file, settings, made=partial(Engine, backend=backend))
    choices = replace(engine.choices, compile=True)
    known = Fit(choices, 1.0, 1.0)
    goal = Goal(first=engine.choices, choices=choices, room_bytes=1e9, known=known)
    engine.tuning = Tuner(engine, goal)
    train(
        run_file,
        own=own(tmp_path / "peer"),
        settings=settings,
        stop=Stop(),
        on_event=on_event,
        engine=engine,
    )
    (awaited,) = [each for each in events if each["event"] == "compiler_awaited"]
    assert str(awaited["text"]).startswith("compiling [")


def test_a_step_that_the_scaler_skips_counts_no_tokens(run_file: RunFile, tmp_path: Path) -> None:
    """The second of the batches has an infinite gradient."""
    calls = 0

    def loss(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return next_token_loss(model, tokens) * (float("inf") if calls == 2 else 1.0)

    settings = TrainerSettings(
        device="cpu", threads=1, steps_max=3, wishes=OwnerChoices(precision="fp16")
    )
    found = train(
        run_file,
        own=own(tmp_path / "peer"),
        settings=settings,
        stop=Stop(),
        engine=open_engine(run_file, settings, made=partial(Engine, loss=loss)),
    )
    assert calls == 4
    assert (found.status.steps, found.status.tokens) == (3, 3 * 2 * 16)


def test_a_restart_goes_on_with_the_next_sequence_and_the_same_moments(
    run_file: RunFile, tmp_path: Path
) -> None:
    trained(run_file, tmp_path / "peer", steps=3)
    events: list[Fields] = []
    trained(run_file, tmp_path / "peer", steps=1, events=events)
    restored = [e["step"] for e in events if e["event"] == "optimizer_restored"]
    assert restored == [3]


def test_a_restart_in_half_precision_goes_on_with_the_same_scale(
    run_file: RunFile, tmp_path: Path
) -> None:
    """It began at 65536 again, and skipped steps until it had found its scale."""
    settings = TrainerSettings(
        device="cpu", threads=1, steps_max=2, wishes=OwnerChoices(precision="fp16")
    )

    def scale_after(engine: Engine) -> float:
        train(run_file, own=own(tmp_path / "peer"), settings=settings, stop=Stop(), engine=engine)
        assert engine.scaler is not None
        return engine.scaler.get_scale()

    first, second = (open_engine(run_file, settings) for _ in range(2))
    assert first.scaler is not None
    first.scaler.load_state_dict({**first.scaler.state_dict(), "scale": 16.0})
    assert (scale_after(first), scale_after(second)) == (16.0, 16.0)


def test_only_one_writer_saves_the_optimizer(run_file: RunFile, tmp_path: Path) -> None:
    """Two writers would take each other's unfinished checkpoints for those of a dead process."""
    trained(run_file, tmp_path / "peer", steps=3)
    assert CheckpointFolder(tmp_path / "peer" / "inner").numbers() == [1]


def test_a_wish_to_leave_ends_the_loop_after_the_step_under_way(
    run_file: RunFile, tmp_path: Path
) -> None:
    stop = Stop()

    def hear(fields: Fields) -> None:
        if fields["event"] == "adopted" and fields["version"]:  # 0: on the way in
            stop.ask()

    settings = TrainerSettings(device="cpu", threads=1, steps_max=10_000)
    outcome = train(
        run_file, own=own(tmp_path / "peer"), settings=settings, stop=stop, on_event=hear
    )
    assert outcome.stopped
    assert outcome.status.steps < 10_000


def test_a_peer_refused_in_the_middle_of_a_run_reports_the_reason(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service manager must see it by the exit code."""
    monkeypatch.setenv("LONE_AGENT_ROUNDS", "1")
    monkeypatch.setenv("LONE_AGENT_ENDS_WITH", "4")
    lost = trained(run_file, tmp_path / "peer", steps=10_000).lost
    assert lost is not None
    assert (lost.exit_code, lost.reason) == (4, "it does not like you")
    monkeypatch.setenv("LONE_AGENT_ENDS_WITH", "0")
    assert trained(run_file, tmp_path / "peer", steps=10_000).lost is None


def test_the_first_signal_is_a_wish_and_a_thread_counts_them() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stop().on_signals() as stop:
        assert not stop
        assert "signals" in {each.name for each in threading.enumerate()}
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_closed_terminal_is_a_wish_however_often_it_comes() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with Stop().on_signals() as stop:
            for _ in range(2):  # once from the shell, once from the kernel
                os.kill(os.getpid(), signal.SIGHUP)
            assert stop
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Stop().on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop, "nohup"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_text_is_looked_for_where_the_peer_says_and_not_in_its_own_folder(
    run_file: RunFile, tmp_path: Path
) -> None:
    (tmp_path / "texts").mkdir()
    settings = own(tmp_path / "peer")
    (tmp_path / "peer" / "data" / "corpus.txt").rename(tmp_path / "texts" / "corpus.txt")
    settings = replace(settings, data_directory=tmp_path / "texts")
    steps = TrainerSettings(device="cpu", threads=1, steps_max=1)
    assert train(run_file, own=settings, settings=steps, stop=Stop()).status.steps == 1


def test_a_founder_begins_with_the_weights_that_it_is_given(
    run_file: RunFile, tmp_path: Path
) -> None:
    model = build_model(run_file)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)  # then every byte is as likely as any other
    save_weights(model, tmp_path / "zeros.safetensors")

    def loss_with(weights: Path) -> float | None:
        settings = TrainerSettings(device="cpu", threads=1, steps_max=1, weights=weights)
        outcome = train(run_file, own=own(tmp_path / "peer"), settings=settings, stop=Stop())
        return outcome.status.loss

    assert loss_with(tmp_path / "zeros.safetensors") == pytest.approx(math.log(256), abs=1e-5)
    with pytest.raises(WeightsUnfit):
        loss_with(tmp_path / "peer" / "corpus.txt")


def test_files_beside_the_key_are_not_trained_on(tmp_path: Path) -> None:
    """The author of a run file that came over the network chooses the names."""
    settings = own(tmp_path / "peer")
    wish = parse(TEXT.replace("*.txt", "identity.key"))
    with pytest.raises(DataUnavailable, match=r"data matches 'identity\.key'"):
        train(wish, own=settings, settings=TrainerSettings(device="cpu", threads=1), stop=Stop())
    assert (tmp_path / "peer" / "identity.key").exists()
