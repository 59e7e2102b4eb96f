"""A learner as a process, for tests: a training loop around ``peer.join`` that prints JSON.

The model fits a fixed linear map; every learner has different samples of it. Other modules have
other tasks. Settings come as one JSON object: the model's size and precision, whether it learns,
the command of its agent. Lines on
standard output are ``ready``, ``step``, ``event`` and ``end``, or ``error``, followed by an object.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import peer
from peer.errors import PeerError
from peer.run_file.reading import parse

TEXT = """
name = "{name}"
random_seed = 1
[model]
recipe = "custom"
[data]
recipe = "custom"
[inner]
optimizer = "custom"
learning_rate = 0.1
[schedule]
warmup_tokens = 100
decay_tokens = 1000000
[outer]
fragments = {fragments}
steps_per_cycle = {cycle}
overlap_steps = {overlap}
codec = "{codec}"
buffers = "{buffers}"
[rounds]
quorum = {quorum}
quorum_deadline_s = {quorum_deadline_s}
round_deadline_s = 60.0
alone_s = {alone_s}
[membership]
heartbeat_s = {heartbeat_s}
expiry_s = {expiry_s}
[end]
tokens = {tokens}
"""

DEFAULTS: dict[str, Any] = {
    "name": "linear",
    "fragments": 3,
    "cycle": 24,
    "overlap": 2,
    "codec": "int8",
    "buffers": "own",
    "quorum": '"majority"',
    "quorum_deadline_s": 10.0,
    "heartbeat_s": 1.0,
    "expiry_s": 4.0,
    "alone_s": 600.0,
    "tokens": 1_000_000,
}

INPUTS, OUTPUTS, BATCH = 24, 16, 16
OF_JOIN = ("agent_command", "allow_frozen_differences")
"""Settings that are those of ``peer.join``, and usually left out."""


def text(**changes: Any) -> str:
    return TEXT.format(**{**DEFAULTS, **changes})


def say(kind: str, fields: Any) -> None:
    sys.stdout.write(f"{kind} {json.dumps(fields, default=str)}\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class Task:
    """What a learner trains."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[], torch.Tensor]
    """The loss of the next batch."""
    tokens: int
    """Of a batch."""


def main(settings: dict[str, Any], make: Callable[[dict[str, Any]], Task]) -> int:
    try:
        learn(settings, make(settings))
    except PeerError as error:
        kind = type(error).__name__
        say("error", {"text": str(error), "exit_code": error.exit_code, "kind": kind})
        return error.exit_code
    return 0


def linear(settings: dict[str, Any]) -> Task:
    torch.manual_seed(7)
    size: int = settings.get("size", INPUTS)
    truth = torch.randn(OUTPUTS, size)
    dtype = getattr(torch, settings.get("dtype", "float32"))
    model = torch.nn.Linear(size, OUTPUTS).to(dtype)
    norm = torch.nn.BatchNorm1d(size) if settings.get("norm") else torch.nn.Identity()
    if settings.get("norm"):
        model.register_module("norm", norm)
    if "base" in settings:
        base = torch.nn.Parameter(torch.full((3,), settings["base"]), requires_grad=False)
        model.register_parameter("base", base)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.get("rate", 0.05))
    samples = torch.Generator().manual_seed(settings.get("sample_seed", 1))

    def loss() -> torch.Tensor:
        inputs = torch.randn(BATCH, size, generator=samples)
        return (model(norm(inputs.to(dtype))).float() - inputs @ truth.T).square().mean()

    return Task(model, optimizer, loss, BATCH)


def learn(settings: dict[str, Any], task: Task) -> None:
    torch.set_num_threads(1)
    model, optimizer = task.model, task.optimizer
    run = peer.join(
        parse(settings["run"]),
        model=model,
        optimizer=optimizer,
        directory=Path(settings["directory"]),
        name=settings.get("name"),
        seeds=tuple(settings.get("seeds", ())),
        listen=("/ip4/127.0.0.1/tcp/0",),
        found_after_s=settings.get("found_after_s", 0.0 if not settings.get("seeds") else 60.0),
        pace_s=settings.get("pace_s", 0.05),
        drain_s=settings.get("drain_s", 15.0),
        page=settings.get("page"),
        **{name: settings[name] for name in OF_JOIN if name in settings},
    )
    run.on("*", lambda fields: say("event", dict(fields)))
    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    step = 0
    with run:
        if settings.get("scheduled"):
            run.schedule(optimizer)
        while run.link is None or "seed=" not in run.link:
            time.sleep(0.02)
        ready = {"peer": run.peer_id, "link": run.link, "agent": run._parts.agent.pid}
        say("ready", {**ready, "versions": run.versions})
        while not (stopped or run.over or step == settings.get("steps")):
            loss = task.loss()
            torch.autograd.backward(loss)
            run.log(loss=loss, tokens=task.tokens)
            if settings.get("frozen"):
                optimizer.zero_grad(set_to_none=False)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            say(
                "step",
                {
                    "step": step,
                    "at": time.time(),
                    "loss": float(loss.detach()),
                    "versions": run.versions,
                    "peers": run.peers,
                    "global_tokens": run.global_tokens,
                    "rounds": run.status.rounds,
                    "bytes": min(run.status.bytes_sent, run.status.bytes_received),
                    "agent": run._parts.agent.pid,
                },
            )
    peer.save_weights(model, run.directory / "saved.safetensors")
    stats = run.status.figures()
    say("end", {**stats, "finished": run.finished, "global_tokens": run.global_tokens})


if __name__ == "__main__":
    raise SystemExit(main(json.loads(sys.argv[1]), linear))
