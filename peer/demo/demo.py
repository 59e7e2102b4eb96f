"""``shoal demo``: a whole swarm of real processes on this machine, in two or three minutes.

A bootstrap peer and a few learners of different speeds train a small byte-level transformer on the
sources of Python's standard library. One learner is killed on the way, with its agent and daemon,
and comes back. In the end the swarm is compared with a single learner that has made as many steps
as each of them.

The demo runs the commands that users run, and reads their ``--json`` output.
"""

from __future__ import annotations

import secrets
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer.demo.processes import (
    Output,
    ProcessFailed,
    bootstrap_command,
    kill_tree,
    learner_command,
    spawn,
)
from peer.quantities import bytes_text, count_text
from peer.run_file.reading import parse, with_settings
from peer.run_file.writing import to_toml
from peer.status import PeerRow, PeerStatus
from peer.views.screen import View
from peer.views.watch import sentence

RUN_TEXT = """\
schema = 1
name = "{name}"
description = "A byte-level transformer on the sources of the Python standard library."
seeds = ["{seed}"]

[model]
recipe = "gpt"
layers = 2
width = 96
heads = 4
context = 64

[data]
recipe = "python_stdlib"
sequence_length = 64

[inner]
optimizer = "muon"
learning_rate = 0.02
batch_size = 16

[schedule]
warmup_tokens = {warmup_tokens}

[outer]
fragments = 4
steps_per_cycle = 8
overlap_steps = 2
codec = "int4"

[rounds]
quorum_deadline_s = 10.0
round_deadline_s = 20.0

[membership]
heartbeat_s = 2.0
expiry_s = 8.0

[evaluation]
sequences = 64
every_versions = 2

[end]
tokens = {tokens}
"""

STEP_TOKENS = 16 * 64
SLOWEST = 1.5
"""Step time of the slowest learner, relative to the fastest."""

LOOK_EVERY_S = 0.25
START_WITHIN_S = 90.0
HELD_OUT = "held-out loss of the swarm: "
DOWN_S = 6.0
"""Time after which the killed learner is started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Size and length of the demo."""

    peers: int = 4
    steps: int = 240
    """Mean number of steps of a learner."""
    pace_s: float = 0.25
    """Least time per step of the fastest learner."""
    directory: Path
    """Folder for all files of the demo."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the run file that are others, by names such as ``outer.momentum``."""
    kills: bool = True
    """True: one learner is killed, and comes back."""

    @property
    def tokens(self) -> int:
        return self.peers * self.steps * STEP_TOKENS

    def run_text(self, seed: str) -> str:
        """The run file of one demo.

        Its name is its own: beside another demo on the same machine ``shoal start`` would join the
        run of that one.
        """
        text = RUN_TEXT.format(
            name=f"demo-{secrets.token_hex(4)}",
            seed=seed,
            tokens=self.tokens,
            warmup_tokens=self.tokens // 20,
        )
        return to_toml(with_settings(parse(text), self.changes)) if self.changes else text

    @property
    def deadline_s(self) -> float:
        """Generous time limit: start, end, and three times the steps of the slowest learner."""
        return 180.0 + 3.0 * SLOWEST * self.pace_s * self.steps


@dataclass(frozen=True, slots=True)
class Point:
    """A learner's loss at a moment."""

    at_s: float
    loss: float


@dataclass(slots=True)
class Learner:
    """One learner over all its lives, as far as its output shows."""

    name: str
    directory: Path
    pace_s: float
    output: Output
    process: subprocess.Popen[bytes] | None = None
    progress: dict[str, Any] = field(default_factory=dict)
    losses: list[Point] = field(default_factory=list)
    held_out: list[Point] = field(default_factory=list)
    last: str = ""
    rounds: set[tuple[int, int]] = field(default_factory=set)
    blocked_s: list[float] = field(default_factory=list)
    """One entry per life; likewise in the next three."""
    alive_s: list[float] = field(default_factory=list)
    bytes_sent: list[int] = field(default_factory=list)
    steps_made: list[int] = field(default_factory=list)
    ready_lives: int = 0
    came_back: bool = False
    """``True`` once it has been started again after the kill."""
    merged_after_return: bool = False

    @property
    def steps(self) -> int:
        return sum(self.steps_made)

    @property
    def training(self) -> bool:
        return self.process is not None and self.process.poll() is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Measurements of the swarm, without the comparison to a single learner."""

    seconds: float
    learners: Sequence[Learner]
    rounds: int
    tokens: Mapping[str, float]
    blocked_fraction: float
    bytes_per_token: float
    kills: int
    rejoins: int
    run_text: str


class Demo:
    """Starts the processes, watches them, kills one, and ends them all. A context manager."""

    def __init__(self, settings: DemoSettings) -> None:
        self.settings = settings
        self._began = time.monotonic()
        self._bootstrap: subprocess.Popen[bytes] | None = None
        self._link: str | None = None
        self.news: list[str] = []
        self.learners = [self._learner(index) for index in range(settings.peers)]
        self.run_text = ""
        self.kills = 0
        self._back_at: float | None = None
        self._measured: set[int] = set()

    def _learner(self, index: int) -> Learner:
        share = index / max(1, self.settings.peers - 1)
        directory = self.settings.directory / f"learner-{index}"
        directory.mkdir(parents=True, exist_ok=True)
        pace_s = self.settings.pace_s * (1.0 + (SLOWEST - 1.0) * share)
        return Learner(f"learner-{index}", directory, pace_s, Output(directory.with_suffix(".out")))

    def __enter__(self) -> Demo:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*(learner.process for learner in self.learners), self._bootstrap):
            if process is not None:
                kill_tree(process)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def run(self, look: Callable[[], None]) -> Result:
        """Run the demo to its end; calls ``look`` regularly. Raises ``ProcessFailed``."""
        self._start(look)
        while any(learner.training for learner in self.learners) or self._back_at is not None:
            self._read()
            self._kill_and_restart()
            look()
            if self.elapsed_s > self.settings.deadline_s:
                late = next(learner for learner in self.learners if learner.training)
                raise ProcessFailed(
                    f"{late.name} is not done after {self.settings.deadline_s:.0f} s",
                    str(late.output.log),
                )
            time.sleep(LOOK_EVERY_S)
        self._read()
        look()
        for learner in self.learners:
            assert learner.process is not None
            if (code := learner.process.wait()) != 0:
                what = f"{learner.name} ended with exit code {code}"
                raise ProcessFailed(what, str(learner.output.log))
        return self._result()

    # --- processes ------------------------------------------------------------------------------

    def _start(self, look: Callable[[], None]) -> None:
        self.news.append("starting the bootstrap peer")
        look()
        seed = self._start_bootstrap()
        self.news.append("starting the learner that founds the run")
        look()
        self.run_text = self.settings.run_text(seed)
        run_path = self.settings.directory / "run.toml"
        run_path.write_text(self.run_text, encoding="utf-8")
        founder = self.learners[0]
        self._launch(founder, ["start", str(run_path)])
        assert founder.process is not None
        self._link = Output(founder.output.log).first(
            "link", founder.process, name=founder.name, within_s=START_WITHIN_S
        )
        self.news.append(f"the run has begun: shoal join {self._link[:40]}...")
        for learner in self.learners[1:]:
            self._launch(learner, ["join", self._link])

    def _start_bootstrap(self) -> str:
        directory = self.settings.directory / "bootstrap"
        directory.mkdir(parents=True, exist_ok=True)
        log = directory / "out"
        self._bootstrap = spawn(bootstrap_command(directory), log)
        return Output(log).first(
            "address", self._bootstrap, name="the bootstrap peer", within_s=START_WITHIN_S
        )

    def _launch(self, learner: Learner, command: Sequence[str]) -> None:
        arguments = learner_command(command, learner.directory, pace_s=learner.pace_s)
        learner.process = spawn(arguments, learner.output.log)
        learner.blocked_s.append(0.0)
        learner.alive_s.append(0.0)
        learner.bytes_sent.append(0)
        learner.steps_made.append(0)

    def _kill_and_restart(self) -> None:
        """Kill one learner after a third of the tokens, and start it again after ``DOWN_S``."""
        victim = self.learners[-1]
        merged = max(learner.progress.get("global_tokens", 0) for learner in self.learners)
        due = self.settings.kills and not self.kills and merged >= self.settings.tokens / 3
        if due and victim.ready_lives:
            assert victim.process is not None
            kill_tree(victim.process)
            self.kills += 1
            self._back_at = self.elapsed_s + DOWN_S
            self.news.append(f"kill -9 {victim.name}: trainer, agent and daemon")
        elif self._back_at is not None and self.elapsed_s >= self._back_at:
            assert self._link is not None
            self._back_at = None
            victim.came_back = True
            self._launch(victim, ["join", self._link])
            self.news.append(f"{victim.name} is started again")

    def _read(self) -> None:
        for learner in self.learners:
            for record in learner.output.news():
                self._note(learner, record)

    def _note(self, learner: Learner, record: dict[str, Any]) -> None:
        event = record.get("event")
        if event in ("progress", "done"):
            learner.progress.update(record)
            learner.blocked_s[-1] = record["blocked_s"]
            learner.alive_s[-1] = record["trained_s"]
            learner.bytes_sent[-1] = record["bytes_sent"]
            learner.steps_made[-1] = record["steps"]
            if record.get("loss") is not None:
                learner.losses.append(Point(self.elapsed_s, record["loss"]))
        elif event == "round":
            learner.rounds.add((record["fragment"], record["version"]))
            learner.last = sentence(record) or ""
            if record.get("contributed") and learner.came_back:
                learner.merged_after_return = True
        elif event == "measured":
            if record["version"] not in self._measured:  # every learner reports each measurement
                self._measured.add(record["version"])
                learner.held_out.append(Point(self.elapsed_s, record["loss"]))
                self.news.append(f"{HELD_OUT}{record['loss']:.3f}")
        elif event == "phase" and record.get("name") == "ready":
            learner.ready_lives += 1
            self.news.append(f"{learner.name} is training")
        elif event == "over":
            self.news.append(f"{learner.name}: {record['reason']}")

    def _result(self) -> Result:
        lives = self.learners
        processed = sum(learner.progress["fates"].get("processed", 0.0) for learner in lives)
        alive_s = sum(sum(learner.alive_s) for learner in lives)
        fates = [learner.progress["fates"] for learner in lives]
        totals = {
            name: sum(fate.get(name, 0.0) for fate in fates)
            for name in ("processed", "merged", "pending")
        }
        totals["discarded"] = sum(
            value for fate in fates for name, value in fate.items() if name.startswith("discarded")
        )
        return Result(
            seconds=self.elapsed_s,
            learners=tuple(lives),
            rounds=len(set().union(*(learner.rounds for learner in lives))),
            tokens=totals,
            blocked_fraction=sum(sum(x.blocked_s) for x in lives) / alive_s if alive_s else 0.0,
            bytes_per_token=sum(sum(x.bytes_sent) for x in lives) / max(1.0, processed),
            kills=self.kills,
            rejoins=sum(learner.merged_after_return for learner in lives),
            run_text=self.run_text,
        )

    # --- screen -----------------------------------------------------------------------------------

    def view(self) -> View:
        rows = []
        for learner in self.learners:
            p = learner.progress
            state = "training" if learner.training and p else "starting"
            if learner.process is not None and learner.process.poll() is not None:
                state = "done" if learner.process.returncode == 0 else "killed"
            merged = p.get("fates", {}).get("merged", 0.0)
            everything = p.get("global_tokens", 0)
            rows.append(
                PeerRow(
                    name=learner.name,
                    state=state,
                    steps=learner.steps,
                    step_time_s=p.get("step_time_s"),
                    loss=p.get("loss"),
                    version=min(p.get("versions", ()), default=None),
                    last=learner.last,
                    share=merged / everything if everything else None,
                )
            )
        points = sorted((p for x in self.learners for p in x.losses), key=lambda point: point.at_s)
        measured = [line for line in self.news if line.startswith(HELD_OUT)]
        others = [line for line in self.news if not line.startswith(HELD_OUT)]
        return View(
            title="shoal demo",
            elapsed_s=self.elapsed_s,
            losses=[point.loss for point in points],
            status=PeerStatus(
                global_tokens=max(x.progress.get("global_tokens", 0) for x in self.learners),
                tokens_goal=self.settings.tokens,
                rounds=len(set().union(*(x.rounds for x in self.learners))),
                bytes_sent=sum(sum(x.bytes_sent) for x in self.learners),
                bytes_received=sum(x.progress.get("bytes_received", 0) for x in self.learners),
                blocked_s=sum(sum(x.blocked_s) for x in self.learners),
                trained_s=sum(sum(x.alive_s) for x in self.learners),
            ),
            peers=rows,
            news=[*others, *measured[-1:]],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Held-out losses on the same sequences, computed by the same code."""

    loss_start: float
    loss_end: float
    solo_loss_end: float


def summary(settings: DemoSettings, result: Result, compared: Comparison) -> dict[str, Any]:
    """The last line of ``shoal demo --json``."""
    kept = result.rejoins == result.kills
    return {
        "ok": compared.loss_end < compared.loss_start and result.rounds > 0 and kept,
        "peers": settings.peers,
        "rounds": result.rounds,
        "loss_start": compared.loss_start,
        "loss_end": compared.loss_end,
        "solo_loss_end": compared.solo_loss_end,
        "tokens": {name: round(value) for name, value in result.tokens.items()},
        "blocked_fraction": result.blocked_fraction,
        "bytes_per_token": result.bytes_per_token,
        "kills": result.kills,
        "rejoins": result.rejoins,
        "seconds": round(result.seconds, 1),
        "directory": str(settings.directory),
    }


def summary_text(record: Mapping[str, Any]) -> str:
    tokens = record["tokens"]
    learner = shlex.quote(str(Path(record["directory"]) / "learner-0"))
    fates = ", ".join(f"{count_text(tokens[n])} {n}" for n in ("merged", "pending", "discarded"))
    return "\n".join(
        [
            f"{record['peers']} learners, {record['rounds']} rounds, {record['seconds']:.0f} s",
            f"held-out loss {record['loss_start']:.3f} -> {record['loss_end']:.3f}; one learner "
            f"alone with as many steps as each of them: {record['solo_loss_end']:.3f}",
            f"tokens: {count_text(tokens['processed'])} processed = {fates}",
            f"traffic: {bytes_text(record['bytes_per_token'])} sent per token; "
            f"trainers blocked {record['blocked_fraction']:.2%} of the time",
            f"killed {record['kills']}, came back and merged again {record['rejoins']}",
            f"plots and logs: {record['directory']}",
            f"its model continues a text: shoal say {learner} 'def main('",
        ]
    )
