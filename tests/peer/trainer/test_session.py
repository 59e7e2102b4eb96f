"""``peer.join`` around real loops, with a real agent that has no network."""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from multiaddr import Multiaddr
from rich.console import Console
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import peer
from dht.identity import PeerId
from peer.bridge.agent_process import AgentProcess, LineSettings
from peer.bridge.messages import Phase
from peer.bridge.settings import default_name
from peer.data import feed
from peer.errors import Declined, DiskFull
from peer.joining.link import FoundRun
from peer.model.naming import local_part
from peer.run_file.reading import parse
from peer.run_file.sections import RunFile
from peer.status import FIGURES
from peer.storage.address import listen_briefly
from peer.storage.earlier import LastSeen, save_last_seen
from peer.storage.progress import ProgressFile
from peer.trainer.computing.device_facts import DeviceUse
from peer.trainer.parts import Patience, found_after_s
from peer.trainer.session import Run, first_merges, steps_to_merge
from peer.trainer.settings import JoinSettings
from peer.views import watch
from peer.views.watch import progress
from tests.peer.agent import lone_agent
from tests.peer.agent.lone_agents import AGENT, PROCESS, QUICK
from tests.peer.trainer.custom_run import toml
from tests.processes import descendants

pytestmark = pytest.mark.usefixtures("agent_threads")


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Run, Any, Any]]:
    def make(
        *,
        text: str | None = None,
        auto: bool = True,
        dtype: Any = torch.float32,
        model: Any = None,
        **own: Any,
    ) -> tuple[Run, Any, Any]:
        torch.manual_seed(0)
        model = model or torch.nn.Linear(4, 3).to(dtype)
        optimizer = own.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.01)
        run = own.pop("join", peer.join)(
            parse(text or toml()),
            model=model,
            optimizer=optimizer,
            auto=auto,
            directory=own.pop("directory", tmp_path / "peer"),
            agent_command=own.pop("agent_command", AGENT),
            line=own.pop("line", QUICK),
            drain_s=own.pop("drain_s", 10.0),
            **own,
        )
        return run, model, optimizer

    return make


def one_step(run: Run, model: Any, optimizer: Any, *, tokens: int = 8) -> None:
    loss = model(torch.ones(2, 4, dtype=model.weight.dtype)).float().square().mean()
    loss.backward()
    run.log(loss=loss, tokens=tokens)
    optimizer.step()
    optimizer.zero_grad()


def train_until(done: Callable[[], bool], step: Callable[[], None], limit_s: float = 90.0) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        step()
        time.sleep(0.001)
        assert time.monotonic() < deadline, "it never came to that"


Start = Callable[..., tuple[Run, Any, Any]]

DTYPES = (pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16)
"""In f32 a model holds what is merged; the other tests have it so."""


def test_five_lines_around_a_loop_exchange_every_fragment(start: Start) -> None:
    run, model, optimizer = start()
    adopted: list[int] = []
    with run:
        assert run.versions == (0, 0, 0)
        run.on("adopted", lambda fields: adopted.append(fields["fragment"]))  # type: ignore[arg-type]
        train_until(lambda: min(run.versions) >= 3, lambda: one_step(run, model, optimizer), 30)
        stats = run.status
        assert stats.tokens == 8 * stats.steps
        assert stats.rounds >= 2
        assert 0.0 < stats.blocked_p99_ms < 1000.0
        assert stats.blocked_fraction < 1.0
        assert run.global_tokens > 0
        assert run.peers == 1
        assert run.link == lone_agent.LINK
    assert set(adopted) == {0, 1, 2}
    assert run.over and not run.finished


def final_parameters(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.directory / "model.safetensors")


@pytest.mark.parametrize("dtype", DTYPES)
def test_after_the_end_the_model_holds_the_runs_final_parameters(
    start: Start, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setenv("LONE_AGENT_ROUNDS", "3")
    run, model, optimizer = start(dtype=dtype)
    with run:
        with pytest.raises(RuntimeError, match="the run is not over"):
            run.adopt_final()
        train_until(lambda: run.over, lambda: one_step(run, model, optimizer))
        one_step(run, model, optimizer)  # own work that is in no version
    assert run.finished
    for name, value in final_parameters(run).items():
        assert torch.equal(model.get_parameter(name), value.to(dtype)), name


def test_after_the_end_frozen_parameters_and_buffers_are_this_peers_own(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONE_AGENT_ROUNDS", "2")
    layers = torch.nn.Linear(4, 4), torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)
    layers[0].requires_grad_(False)
    run, model, optimizer = start(model=torch.nn.Sequential(*layers))
    frozen = layers[0].weight.clone()

    def step() -> None:
        model(torch.randn(8, 4)).square().mean().backward()
        run.log(tokens=8)
        optimizer.step()
        optimizer.zero_grad()

    with run:
        train_until(lambda: run.over, step)
        statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    final = final_parameters(run)
    assert set(final) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(torch.equal(model.get_parameter(name), value) for name, value in final.items())
    assert torch.equal(layers[0].weight, frozen)
    assert all(torch.equal(model.get_buffer(name), value) for name, value in statistics.items())


def test_buffers_that_the_run_merges_are_the_final_ones_too(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONE_AGENT_ROUNDS", "2")
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    text = toml() + 'buffers = "mean"\n'
    run, model, optimizer = start(model=model, text=text)

    def step() -> None:
        model(torch.randn(8, 4)).square().mean().backward()
        run.log(tokens=8)
        optimizer.step()
        optimizer.zero_grad()

    with run:
        train_until(lambda: run.over, step)
        model(torch.randn(8, 4))  # moves its own statistics once more
    final, held = final_parameters(run), model.state_dict()
    assert set(final) == set(held)
    for name, value in final.items():
        whole = not held[name].is_floating_point()
        assert torch.equal(held[name].float(), value.round() if whole else value), name
    assert int(held["1.num_batches_tracked"]) > 0


def test_the_own_parameters_stay_on_request_until_the_final_ones_are_adopted(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONE_AGENT_ROUNDS", "3")
    run, model, optimizer = start(final="own")
    with run:
        train_until(lambda: run.over, lambda: one_step(run, model, optimizer))
        one_step(run, model, optimizer)
    final = final_parameters(run)
    assert not torch.equal(model.weight, final["weight"])
    run.adopt_final()
    assert torch.equal(model.weight, final["weight"])


def test_a_peer_that_leaves_a_run_under_way_keeps_its_own_parameters(start: Start) -> None:
    run, model, optimizer = start()
    with run:
        train_until(lambda: min(run.versions) >= 1, lambda: one_step(run, model, optimizer))
        one_step(run, model, optimizer)
    assert not run.finished
    assert not (run.directory / "model.safetensors").exists()


def test_final_parameters_that_cannot_be_had_are_missed_aloud(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONE_AGENT_ROUNDS", "3")
    run, model, optimizer = start()
    with pytest.warns(UserWarning, match="own parameters and not the run's final ones"), run:
        train_until(lambda: run.over, lambda: one_step(run, model, optimizer))
        (run.directory / "model.safetensors").unlink()


def test_parameters_that_are_not_finite_are_not_offered_and_can_be_restored(start: Start) -> None:
    run, model, optimizer = start()
    optimizer.param_groups[0]["momentum"] = 0.9
    told: list[Any] = []

    def step() -> None:
        one_step(run, model, optimizer)

    def heard(mistake: str) -> bool:
        return any(fields["kind"] == mistake for fields in told)

    with run:
        run.on("loop_mistake", told.append)
        train_until(lambda: min(run.versions) >= 1, step)
        with torch.no_grad():
            model.weight[0, 0] = float("nan")
        with pytest.warns(peer.LoopWarning, match=r"run\.restore\(\)"):
            train_until(lambda: heard("not_finite"), step)
        assert not any(parameter.isfinite().all() for parameter in model.parameters())
        run.restore()
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        assert not optimizer.state
        versions = max(run.versions)
        train_until(lambda: min(run.versions) > versions, step)
        assert all(parameter.isfinite().all() for parameter in model.parameters())


class Operations(TorchDispatchMode):
    """Counts what is asked of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counted[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_the_checks_of_a_loop_read_nothing_from_the_device(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONE_AGENT_EVERY", "1000000")
    run, model, _ = start(auto=False)
    with run, Operations() as operations:
        for _ in range(64):  # more than twelve cycles, and no exchange
            run.log(loss=0.5, tokens=8)
            run.step()
        assert not operations.counted
        run.log(loss=model.weight.sum(), tokens=8)
        operations.counted.clear()
        run.step()
        assert operations.counted == {"aten._local_scalar_dense.default": 1}, "the logged loss"


def test_a_founder_is_told_so_in_words(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """The screen of the command has no sentence for it, and programs printed "None"."""
    run, _, _ = start()
    run._news.add("founded", {"fragments": 2})
    run._news.deliver()
    assert capsys.readouterr().out == "founded the run\n"


@pytest.mark.parametrize("quiet", [False, True])
def test_a_loop_prints_its_link_once_when_it_has_joined(
    start: Start, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    run, model, optimizer = start(quiet=quiet)
    with run:
        assert capsys.readouterr().out == (
            ""
            if quiet
            else f"others join with: the same program and the link '{lone_agent.LINK}'\n"
        )
        train_until(lambda: min(run.versions) >= 1, lambda: one_step(run, model, optimizer), 30)
    assert capsys.readouterr().out == ""


def test_the_agent_is_told_the_state_of_the_device_for_its_page(start: Start) -> None:
    run, model, optimizer = start()
    heard: list[Any] = []
    run.on("device", lambda fields: heard.append(fields["bytes"]))
    run.watch_device(
        lambda: DeviceUse(flops_per_token=1.0, peak_flops=1e6, memory_bytes=2e9, temperature_c=61.0)
    )
    with run:
        train_until(lambda: bool(heard), lambda: one_step(run, model, optimizer), 30)
        assert run.status.temperature_c == 61.0
        assert run.status.share_of_peak is not None
    assert heard[0] == 2e9


def test_a_run_that_was_not_entered_says_so(start: Start) -> None:
    run, _, _ = start()
    assert "not entered" in repr(run)
    assert (run.over, run.peers, run.link, run.rest) == (False, 1, None, None)
    with pytest.raises(RuntimeError, match="enter it first"):
        run.status  # noqa: B018


def test_in_a_rented_container_a_program_takes_its_public_ports_and_says_so(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = listen_briefly(Multiaddr("/ip4/0.0.0.0/tcp/0"))
    monkeypatch.setenv("RUNPOD_PUBLIC_IP", "203.0.113.7")
    monkeypatch.setenv(f"RUNPOD_TCP_PORT_{port}", "40001")
    run, _, _ = start()
    assert run._plan.settings.listen == (f"/ip4/0.0.0.0/tcp/{port}",)
    assert run._plan.settings.announce == ("/ip4/203.0.113.7/tcp/40001",)
    assert capsys.readouterr().out.startswith("RunPod leads 203.0.113.7:40001 to port")


def test_sigterm_hands_over_like_the_end_of_the_block_and_ends_the_program(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[tuple[float, float]] = []

    def leave(agent: AgentProcess, timeout_s: float, *, patience_s: float) -> None:
        times.append((timeout_s, patience_s))
        ask_to_leave(agent, timeout_s, patience_s=patience_s)

    ask_to_leave = AgentProcess.leave
    monkeypatch.setattr(AgentProcess, "leave", leave)
    run, model, optimizer = start(drain_s=15.0, patience_s=60.0)
    with pytest.raises(SystemExit) as ended, run:
        train_until(lambda: min(run.versions) >= 1, lambda: one_step(run, model, optimizer))
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("it goes on")
    assert ended.value.code == 128 + signal.SIGTERM
    assert run.over, "the agent was not asked to finish"
    assert times == [(15.0, 35.0)]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_run_without_a_block_is_opened_and_closed(start: Start) -> None:
    run, model, optimizer = start(join=peer.open)
    train_until(lambda: min(run.versions) >= 1, lambda: one_step(run, model, optimizer))
    with run:  # entered already
        one_step(run, model, optimizer)
    assert run.over
    run.close()  # left already


FORGETFUL = """
import sys
from pathlib import Path
import torch
import peer
from peer.run_file.reading import parse
from tests.peer.trainer.custom_run import toml

model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
agent = (sys.executable, "-m", "tests.peer.agent.lone_agent")
where = {"directory": Path(sys.argv[1]), "agent_command": agent}
run = peer.open(parse(toml()), model=model, optimizer=optimizer, **where)
for _ in range(5):
    model(torch.ones(2, 4)).square().mean().backward()
    run.log(tokens=8)
    optimizer.step()
"""


def test_a_run_that_is_not_closed_is_closed_by_what_the_interpreter_calls(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Callable[[], object]] = []
    theirs = SimpleNamespace(register=at_exit.append, unregister=at_exit.remove)
    monkeypatch.setattr("peer.trainer.rank.atexit", theirs)
    run, model, optimizer = start(join=peer.open)
    one_step(run, model, optimizer)
    (close,) = at_exit
    with pytest.warns(peer.LoopWarning, match="the program ends without run.close()"):
        close()
    assert run.over and not at_exit


@pytest.mark.slow
def test_a_run_that_is_not_closed_is_closed_at_the_end_of_the_program(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORGETFUL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "the program ends without run.close()" in done.stderr
    assert "Traceback" not in done.stderr
    with ProgressFile(tmp_path / "progress", wall_time_s=time.time()) as progress:
        assert progress.previous is not None and progress.previous.clean
    assert list((tmp_path / "inner").glob("*"))


def test_a_step_counts_once_however_many_batches_it_has(start: Start) -> None:
    run, model, optimizer = start()
    with run:
        for _ in range(3):
            for _ in range(4):  # gradient accumulation
                model(torch.ones(2, 4)).sum().backward()
                run.log(tokens=5)
            optimizer.step()
            optimizer.zero_grad()
        assert (run.status.steps, run.status.tokens) == (3, 60)


def test_a_step_that_the_scaler_skips_does_not_count(start: Start) -> None:
    run, model, optimizer = start()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with run:
        for value in (1.0, float("inf"), 1.0):
            loss = model(torch.full((2, 4), value)).sum()
            scaler.scale(loss).backward()
            run.log(tokens=5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        # This optimizer is not called in a step that is skipped.
        assert (run.status.steps, run.status.tokens) == (2, 15)


def test_without_auto_only_run_step_is_a_safe_point(start: Start) -> None:
    run, model, optimizer = start(auto=False)
    with run:
        one_step(run, model, optimizer)
        assert run.status.steps == 0
        run.step(tokens=2)
        assert (run.status.steps, run.status.tokens) == (1, 10)


def test_the_hook_goes_with_the_block(start: Start) -> None:
    run, model, optimizer = start()
    with run:
        one_step(run, model, optimizer)
    one_step(run, model, optimizer)
    assert run._parts.learner.steps == 1


def test_training_goes_on_without_the_agent_and_a_new_one_takes_over(start: Start) -> None:
    run, model, optimizer = start(agent_command=PROCESS)
    died: list[Any] = []
    with run:
        run.on("agent_died", died.append)
        train_until(lambda: min(run.versions) >= 1, lambda: one_step(run, model, optimizer))
        first = run._parts.agent.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        steps = run.status.steps
        for _ in range(20):
            one_step(run, model, optimizer)
        assert run.status.steps == steps + 20
        train_until(
            lambda: run.status.agent_restarts == 1 and run._parts.agent.pid not in (None, first),
            lambda: one_step(run, model, optimizer),
        )
        # The new one knows nothing but what is in the memory, and goes on from there.
        train_until(lambda: min(run.versions) >= 2, lambda: one_step(run, model, optimizer))
        assert died[0]["exit_code"] == -signal.SIGKILL


def test_an_agent_that_hangs_is_replaced(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = LineSettings(beat_s=0.3, silence_max_s=1.0, restart_first_s=0.05)
    monkeypatch.setenv("LONE_AGENT_HANGS", "1")
    run, _, _ = start(line=quick, agent_command=PROCESS)

    def next_one_works(code: int, restart_in_s: float) -> None:
        monkeypatch.delenv("LONE_AGENT_HANGS", raising=False)
        run._parts.agent._settings = QUICK  # which has time to start on a busy machine

    monkeypatch.setattr(run._news, "agent_died", next_one_works)
    with run:
        assert run.status.agent_restarts >= 1


def test_a_peer_that_is_asked_to_leave_while_it_joins_leaves_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONE_AGENT_HANGS", "1")
    run, _, _ = start(line=LineSettings(end_patience_s=0.1), agent_command=PROCESS)
    run.leave_when(lambda: True)
    with pytest.raises(peer.LeftEarly, match="starting the agent") as caught, run:
        pass
    assert caught.value.exit_code == 130
    assert not descendants(os.getpid())


def test_a_refusal_is_an_error_with_its_exit_code(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONE_AGENT_ENDS_WITH", "4")
    run, _, _ = start()
    told: list[Any] = []
    run.on("over", told.append)
    with pytest.raises(peer.RunUnreachable, match="it does not like you") as caught, run:
        pass
    assert caught.value.exit_code == 4
    assert told == [], "not twice"
    assert not descendants(os.getpid())


def test_a_peer_whose_owner_wants_it_to_leave_while_it_joins_has_not_failed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONE_AGENT_ENDS_WITH", "0")
    run, _, _ = start()
    with pytest.raises(peer.LeftEarly, match="its owner asked it to leave") as caught, run:
        pass
    assert caught.value.exit_code == 0


def test_a_peer_that_is_asked_to_leave_while_it_reads_the_data_leaves_at_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = Event()
    monkeypatch.setattr(feed, "open_data", lambda *args, **named: never.wait())
    run, _, _ = start()
    leaving = False
    run.leave_when(lambda: leaving)
    with pytest.raises(peer.LeftEarly, match="reading the data") as caught, run:
        leaving = True
        run.recipe_data  # noqa: B018
    assert caught.value.exit_code == 130
    never.set()


def test_the_screen_stays_while_training_rests_and_says_why(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line took its place: no peers, no loss, until training went on."""
    monkeypatch.setenv("LONE_AGENT_RESTS_S", "60")
    run, model, optimizer = start()
    screens: list[str] = []

    def screen() -> str:
        out = io.StringIO()
        Console(file=out, width=80).print(reporter._live.renderable)
        return out.getvalue()

    def tell() -> None:
        reporter.on_step(run)
        reporter.on_event({"event": "paused", "reason": "its owner wants it"})
        if "\nresting: its owner wants it" in screen():
            screens.append(screen())

    def step() -> None:
        one_step(run, model, optimizer)
        reporter.on_step(run)

    with watch.ScreenReporter() as reporter:
        run.on("*", reporter.on_event)
        run.while_resting(tell)
        run.leave_when(lambda: bool(screens))
        with run:
            train_until(lambda: bool(screens), step)
    for expected in ("training loss", f"you ({run.peer_id[-6:]})", "tokens merged"):
        assert expected in screens[0], expected


def test_a_run_of_another_layout_is_refused_before_anything_starts(start: Start) -> None:
    text = toml().replace(
        'recipe = "custom"\n[data]', f'recipe = "custom"\nlayout_hash = "{"0" * 64}"\n[data]'
    )
    run, _, _ = start(text=text)
    with pytest.raises(peer.PeerError, match="0000"), run:
        pass


def test_a_program_whose_model_is_not_that_of_the_file_is_refused_with_the_differences(
    start: Start,
) -> None:
    """A program joined a run of the built-in model, and export and say fell over its state."""
    text = toml().replace('recipe = "custom"\n[data]', 'recipe = "gpt"\nlayers = 1\n[data]')
    run, _, _ = start(text=text)
    with (
        pytest.raises(Declined, match=r"bias: \(3,\) here, absent there; blocks\.0\.") as caught,
        run,
    ):
        pass
    assert "`shoal run new --custom`" in str(caught.value)


def test_two_trainers_cannot_share_a_folder(start: Start) -> None:
    first, _, _ = start()
    second, _, _ = start()
    with first, pytest.raises(peer.PeerError, match="in use by another peer"), second:
        pass


def test_pace_is_the_least_time_of_a_step(start: Start) -> None:
    run, model, optimizer = start(pace_s=0.1)
    with run:
        began = time.monotonic()
        for _ in range(6):
            one_step(run, model, optimizer)
        took_s = time.monotonic() - began
        assert took_s >= 5 * 0.1
        assert 0.09 <= run.status.step_time_s <= took_s
        assert run.status.blocked_s <= took_s - 5 * 0.09  # pacing is no blocking


def test_the_schedule_follows_global_tokens_and_keeps_proportions(start: Start) -> None:
    torch.manual_seed(0)
    run, model, optimizer = start()
    optimizer.param_groups[0]["lr"] = 0.4
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.1})
    with run:
        run.schedule(optimizer)
        warm = optimizer.param_groups[0]["lr"]
        assert warm < 0.1
        train_until(lambda: run.global_tokens >= 100, lambda: one_step(run, model, optimizer))
        one_step(run, model, optimizer)
        high, low = (group["lr"] for group in optimizer.param_groups)
        assert high == pytest.approx(0.1, rel=1e-3)
        assert low == pytest.approx(high / 4)


def test_a_peer_that_joins_knows_the_runs_tokens_before_its_first_step(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A returner trained its first second at the rate of token 0, which is next to nothing; what it
    # offered was so small that it took everybody else's work for poison.
    monkeypatch.setenv("LONE_AGENT_TOKENS", "5000")
    run, _, _ = start()
    with run:
        assert run.global_tokens == 5000
        # A run that had ended was shown with 267 k of 200 k tokens.
        assert progress(run.status)["global_tokens"] == 5000 - lone_agent.OWN_PENDING
        assert run.status.global_tokens == 5000 - lone_agent.OWN_PENDING
        assert progress(run.status).keys() - {"event", "peer"} == FIGURES.keys()


def test_the_budget_that_people_see_is_the_one_that_the_owner_has_amended(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONE_AGENT_BUDGET", str(10**9))
    run, model, optimizer = start()
    with run:
        step = partial(one_step, run, model, optimizer)
        train_until(lambda: run.run_now != run.run_file, step)
        assert run.status.tokens_goal == 10**9


def test_the_peer_whose_turn_it_is_measures_and_publishes(start: Start) -> None:
    run, model, optimizer = start()
    heard: list[float] = []
    with run:
        run.measure_with(lambda: (2.5, 7))
        run.on("measured", lambda fields: heard.append(fields["loss"]))  # type: ignore[arg-type]
        train_until(lambda: bool(heard), lambda: one_step(run, model, optimizer))
    assert heard[0] == 2.5


def test_a_trainer_goes_back_from_states_of_others_that_raise_its_own_loss(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONE_AGENT_POISONED", "1")
    run, model, optimizer = start()
    told: list[Any] = []
    largest = 0.0

    def measure() -> tuple[float, int]:
        with torch.no_grad():
            return float(model(torch.ones(2, 4)).square().mean()), 2

    def step() -> None:
        nonlocal largest
        one_step(run, model, optimizer)
        largest = max(largest, float(model.weight.detach().abs().max()))

    with run:
        run.measure_with(measure)
        run.on("jump_refused", told.append)
        train_until(lambda: bool(told), step)
        assert told[0]["after"] > 1e3 * told[0]["before"]
        assert largest > 0.5 * float(lone_agent.POISON)
        train_until(lambda: float(model.weight.detach().abs().max()) < 2.0, step)
        versions = max(run.versions)
        train_until(lambda: min(run.versions) > versions, step)  # the run goes on
        assert float(model.weight.detach().abs().max()) < 2.0
    assert len(told) == 1


def test_a_trainer_without_a_measure_has_no_gate_and_waits_for_none(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONE_AGENT_POISONED", "1")
    run, model, optimizer = start()
    began = time.monotonic()

    def poisoned() -> bool:
        return float(model.weight.detach().abs().max()) > 0.5 * float(lone_agent.POISON)

    with run:
        train_until(poisoned, lambda: one_step(run, model, optimizer))
    assert time.monotonic() - began < lone_agent.MEASURE_S


def test_a_dataset_is_walked_in_an_order_of_this_peers_own(start: Start) -> None:
    run, _, _ = start()
    with run:
        seen = [item for item, _ in zip(run.data(list(range(10))), range(20), strict=False)]
        assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
        assert seen[:10] != list(range(10))
        endless = [x for x, _ in zip(run.data(iter_twice()), range(5), strict=False)]
        assert endless == [1, 2, 1, 2, 1]


class iter_twice:  # noqa: N801
    def __iter__(self) -> Any:
        yield from (1, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_synchronous_learner_waits_for_every_round_of_its_own(
    start: Start, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setenv("LONE_AGENT_SYNCHRONOUS", "1")
    monkeypatch.setenv("LONE_AGENT_EVERY", "1")
    run, model, optimizer = start(text=toml(overlap=0, cycle=4), dtype=dtype)
    with run:
        train_until(lambda: bool(run._news.report.status.versions), lambda: time.sleep(0.01))
        for _ in range(4):
            one_step(run, model, optimizer)
        assert min(run.versions) >= 1


def test_names_are_for_people() -> None:
    name = default_name(PeerId("12D3KooWExample"))
    assert name == default_name(PeerId("12D3KooWExample"))
    assert name.isprintable() and 5 <= len(name) <= 32


def test_importing_peer_costs_neither_torch_nor_a_compiler() -> None:
    code = "import sys, peer, peer.agent.agent; print({'torch', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_returning_trainer_has_its_optimizer_and_its_place_in_the_data(start: Start) -> None:
    run, model, optimizer = start()
    optimizer.param_groups[0]["momentum"] = 0.9
    with run:
        seen = [item for _, item in zip(range(7), run.data(list(range(50))), strict=False)]
        for _ in range(3):
            one_step(run, model, optimizer)
        momentum = [s["momentum_buffer"].clone() for s in optimizer.state.values()]
    again, model, optimizer = start()
    optimizer.param_groups[0]["momentum"] = 0.9
    with again:
        restored = [s["momentum_buffer"] for s in optimizer.state.values()]
        assert all(torch.equal(a, b) for a, b in zip(momentum, restored, strict=True))
        more = [item for _, item in zip(range(43), again.data(list(range(50))), strict=False)]
    assert sorted({*seen, *more}) == list(range(50))


def test_a_full_disk_is_reported_and_training_continues(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Any, inner: Any) -> Path:
        raise DiskFull("/somewhere", 100, 10)

    monkeypatch.setattr("peer.storage.inner_saves.save", full)
    told: list[Any] = []
    run, model, optimizer = start(save_every_s=0.0)
    with run:
        run.on("disk_full", told.append)
        train_until(lambda: bool(told), lambda: one_step(run, model, optimizer))
    assert "100" in told[0]["text"] or "MB" in told[0]["text"]


def test_the_last_words_of_an_agent_that_has_ended_meanwhile_are_told(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, model, optimizer = start()
    told: list[Any] = []
    run.on("over", told.append)
    with run:
        one_step(run, model, optimizer)
        agent = run._parts.agent
        monkeypatch.setattr(run._parts.inner, "save", lambda **_: agent.join(30))
    assert len(told) == 1


def test_an_agent_that_cannot_start_is_reported_with_its_last_line(start: Start) -> None:
    run, _, _ = start(agent_command=(sys.executable, "-c", "raise SystemExit('no luck')"))
    with pytest.raises(peer.RunUnreachable, match="no luck"), run:
        pass


def test_the_proportions_are_those_before_another_scheduler_warmed_up(start: Start) -> None:
    run, _, optimizer = start()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.005})
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    with run:
        run.schedule(optimizer)
        high, low = (group["lr"] for group in optimizer.param_groups)
        assert high > 0
        assert low == pytest.approx(high / 2)


def test_with_several_optimizers_a_step_is_one_of_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> tuple[Run, list[torch.optim.Optimizer], Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD([model.weight], lr=0.01, momentum=0.9),
            torch.optim.AdamW([model.bias], lr=0.01),
        ]
        run = peer.join(
            parse(toml()),
            model=model,
            optimizer=optimizers,
            directory=tmp_path / "peer",
            agent_command=AGENT,
            line=QUICK,
        )
        return run, optimizers, model

    run, optimizers, model = made()
    with run:
        for _ in range(3):
            model(torch.ones(2, 4)).square().mean().backward()
            run.log(tokens=8)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert (run.status.steps, run.status.tokens) == (3, 24)
        momentum = optimizers[0].state[model.weight]["momentum_buffer"].clone()
        average = optimizers[1].state[model.bias]["exp_avg"].clone()
    again, optimizers, model = made()
    with again:
        assert torch.equal(optimizers[0].state[model.weight]["momentum_buffer"], momentum)
        assert torch.equal(optimizers[1].state[model.bias]["exp_avg"], average)


@pytest.mark.parametrize("steps_per_batch", [1, 2], ids=["plain", "accumulating"])
def test_a_program_of_accelerate_joins_with_the_optimizer_that_it_has(
    start: Start, tmp_path: Path, steps_per_batch: int
) -> None:
    accelerate = pytest.importorskip("accelerate", reason="the extra 'hf' is not installed")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps_per_batch)
    torch.manual_seed(0)
    inner = torch.nn.Linear(4, 3)
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.01))
    run, _, _ = start(model=model, optimizer=optimizer)
    with run:
        run.schedule(optimizer)
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, 4)).square().mean())
                run.log(tokens=8)
                optimizer.step()
                optimizer.zero_grad()
        assert (run.status.steps, run.status.tokens) == (4 // steps_per_batch, 32)


@pytest.fixture
def _one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, as torchrun makes it for one process."""
    meeting = f"file://{tmp_path}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("join", [peer.join, peer.island.join], ids=["plain", "island"])
def test_a_model_of_fsdp2_in_one_process_is_like_any_other(
    start: Start, monkeypatch: pytest.MonkeyPatch, join: Any
) -> None:
    monkeypatch.setenv("LONE_AGENT_ROUNDS", "4")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run, _, _ = start(model=model, optimizer=optimizer, join=join)

    def step() -> None:
        model(torch.ones(2, 4)).square().mean().backward()
        run.log(tokens=8)
        optimizer.step()
        optimizer.zero_grad()

    told: list[Any] = []
    with run:
        run.on("loop_mistake", told.append)
        train_until(lambda: min(run.versions) >= 1, step)
        with torch.no_grad():
            model.get_parameter("0.weight").fill_(float("nan"))
        with pytest.warns(peer.LoopWarning, match="are not finite"):
            train_until(lambda: bool(told), step)
        run.restore()
        assert all(bool(local_part(p).isfinite().all()) for p in model.parameters())
        train_until(lambda: run.over, step)
    for name, value in final_parameters(run).items():
        assert torch.equal(local_part(model.get_parameter(name)), value), name


def test_a_synchronous_learner_that_is_asked_to_leave_waits_no_longer(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its round may never come: two that were asked to leave at once waited for each other.
    monkeypatch.setenv("LONE_AGENT_SYNCHRONOUS", "1")
    monkeypatch.setenv("LONE_AGENT_EVERY", "100000")
    run, model, optimizer = start(text=toml(overlap=0, cycle=4))
    with run:
        train_until(lambda: bool(run._news.report.status.versions), lambda: time.sleep(0.01))
        asked_at = time.monotonic() + 0.5
        run.leave_when(lambda: time.monotonic() >= asked_at)
        for _ in range(4):
            one_step(run, model, optimizer)
        assert 0.4 < time.monotonic() - (asked_at - 0.5) < 60.0
        assert max(run.versions) == 0


@pytest.mark.parametrize("site", ["", "a name that is too long", "bell\a"])
def test_a_site_is_a_short_name_that_can_be_printed(site: str) -> None:
    assert JoinSettings(site="rack 7").site == "rack 7"
    with pytest.raises(ValueError, match="1 to 16 printable characters"):
        JoinSettings(site=site)


@pytest.mark.parametrize("name", ["", "x" * 33, "bad\n", "\x1b[2J"])
def test_a_name_that_others_would_refuse_is_refused_here(name: str) -> None:
    """Otherwise every record of this peer would be malformed, and no other peer would see it."""
    with pytest.raises(ValueError, match="1 to 32 printable characters"):
        JoinSettings(name=name)
    assert JoinSettings(name="x" * 32).name


def test_a_slow_download_has_no_time_limit_while_it_makes_progress() -> None:
    patience = Patience(limit_s=10.0, since=0.0)
    for now in range(0, 100, 9):
        phase = Phase(name="fetching", text="downloading", done=now / 100)
        assert not patience.is_over(phase, now=float(now))
    assert not patience.is_over(phase, now=109.0)
    assert patience.is_over(phase, now=109.1)


def test_waiting_for_the_peers_of_a_run_has_no_time_limit() -> None:
    patience = Patience(limit_s=10.0, since=0.0)
    waiting = Phase(name="waiting", text="nobody of this run is here", done=0.0)
    assert not patience.is_over(waiting, now=100_000.0)
    assert not patience.is_over(Phase(name="fetching", text="", done=0.0), now=100_009.0)
    assert patience.is_over(Phase(name="fetching", text="", done=0.0), now=100_011.0)


RUN = RunFile(name="found")
FILE, LINK = FoundRun(RUN, ()), FoundRun(RUN, (), by_link=True)


def test_a_link_founds_no_run_and_a_run_file_only_one_that_was_never_seen(tmp_path: Path) -> None:
    def after(
        where: FoundRun, *, has_seeds: bool = False, is_here: bool = False, **own: Any
    ) -> float | None:
        settings = JoinSettings(**own)
        return found_after_s(settings, where, tmp_path, has_seeds=has_seeds, is_here=is_here)

    assert after(FILE) == 0.0
    assert after(FILE, has_seeds=True) == after(FILE, is_here=True) == 30.0
    assert after(FILE, is_here=True, found_after_s=0.0) == 5.0
    assert after(LINK) is None
    assert after(LINK, found=True) == 0.0
    assert after(FILE, found=False, found_after_s=5.0) is None
    save_last_seen(tmp_path, LastSeen(run=RUN.canonical().decode(), at=0.0))
    assert after(FILE, has_seeds=True) is None
    assert after(FILE, found=True) == 0.0
    assert after(FILE, found_after_s=5.0) == 5.0


def test_an_agent_that_begins_again_and_again_makes_no_progress() -> None:
    patience = Patience(limit_s=10.0, since=0.0)
    for now in range(11):
        for name, done in (("connecting", 0.5), ("fetching", 0.0)):
            phase = Phase(name=name, text=f"{now}", done=done)
            assert not patience.is_over(phase, now=float(now))
    assert patience.is_over(phase, now=10.1)


def digest_told(run: Run, step: Callable[[], None]) -> str:
    told: list[str] = []
    run.on("batches", lambda fields: told.append(fields["digest"]))  # type: ignore[arg-type]
    train_until(lambda: bool(told), step)
    return told[0]


def test_a_program_that_trains_on_the_same_batches_as_another_peers_is_told(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nanoGPT, litgpt and the examples of accelerate drew the same batches at every peer."""
    monkeypatch.setenv("LONE_AGENT_HAS_A_TWIN", "1")
    digests: list[str] = []
    for name, program_seed in (("a", 1337), ("b", 1337), ("c", 1)):
        run, model, optimizer = start(directory=tmp_path / name)
        with run, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.manual_seed(program_seed)

            def step(run: Run = run, model: Any = model, optimizer: Any = optimizer) -> None:
                loss = model(torch.rand(2, 4, dtype=model.weight.dtype)).square().mean()
                loss.backward()
                run.log(loss=loss, tokens=8)
                optimizer.step()

            digests.append(digest_told(run, step))
            train_until(
                lambda: any("the same batches as boris" in str(w.message) for w in caught), step
            )
    assert digests[0] == digests[1] != digests[2]


def test_run_seed_gives_each_peer_numbers_of_its_own_and_the_same_again(
    start: Start, tmp_path: Path
) -> None:
    drawn = []
    for name in ("a", "b", "a"):
        run, _, _ = start(directory=tmp_path / name)
        with run:
            assert run.seed(1337) == torch.initial_seed()
            drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
    assert drawn[0] == drawn[2]
    assert all(one != other for one, other in zip(drawn[0], drawn[1], strict=True))


def test_batches_are_of_no_concern_where_the_run_draws_the_order(start: Start) -> None:
    run, model, optimizer = start()
    with run:
        batches = run.data([torch.ones(2, 4)] * 8)

        def step() -> None:
            next(batches)
            one_step(run, model, optimizer)

        assert digest_told(run, step) == ""


def test_merges_are_spread_over_a_cycle_and_each_fragment_has_one_per_cycle() -> None:
    merged_at = first_merges(4, 24)
    assert steps_to_merge(merged_at, cycle=24, steps=0) == 6
    assert steps_to_merge(merged_at, cycle=24, steps=5) == 1
    assert steps_to_merge(merged_at, cycle=24, steps=9) == 0, "it is late"
    merged_at[3] = 9
    assert steps_to_merge(merged_at, cycle=24, steps=9) == 3
    assert steps_to_merge([7], cycle=24, steps=9) == 22
