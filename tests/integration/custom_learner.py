"""A learner with its own model as a process. Settings come as one JSON object.

Settings are the model's size, its precision, whether it learns, and the command of its agent. The
process prints ``ready`` and ``end``, leaves on SIGTERM, and saves its parameters at the end.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import peer
from peer.errors import PeerError
from peer.run_file.reading import parse
from tests.swarms.learner_process import say


def main(settings: dict[str, Any]) -> int:
    torch.set_num_threads(1)
    torch.manual_seed(settings.get("seed", 1))
    size: int = settings.get("size", 24)
    model = torch.nn.Linear(size, 16).to(getattr(torch, settings.get("dtype", "float32")))
    if settings.get("norm"):
        model.register_module("norm", torch.nn.BatchNorm1d(size))
    if "base" in settings:  # a frozen parameter
        base = torch.full((3,), settings["base"])
        model.register_parameter("base", torch.nn.Parameter(base, requires_grad=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.get("rate", 0.05))
    truth = torch.randn(16, size, generator=torch.Generator().manual_seed(7))
    samples = torch.Generator().manual_seed(settings.get("samples", 1))
    directory = Path(settings["directory"])
    run = peer.join(
        parse(settings["run"]),
        model=model,
        optimizer=optimizer,
        directory=directory,
        name=directory.name,
        seeds=tuple(settings.get("seeds", ())),
        listen=("/ip4/127.0.0.1/tcp/0",),
        found_after_s=settings.get("found_after_s", 60.0 if settings.get("seeds") else 0.0),
        agent_command=settings.get("agent_command") and tuple(settings["agent_command"]),
        pace_s=settings.get("pace_s", 0.05),
        drain_s=20.0,
        allow_frozen_differences=settings.get("allow_frozen_differences", False),
    )
    run.on("*", lambda fields: say("event", dict(fields)))
    stopped = False

    def stop(number: int, frame: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    try:
        with run:
            while run.link is None or "seed=" not in run.link:
                time.sleep(0.02)
            say("ready", {"peer": run.peer_id, "link": run.link})
            while not (stopped or run.over):
                inputs = torch.randn(16, size, generator=samples)
                norm = getattr(model, "norm", torch.nn.Identity())
                outputs = model(norm(inputs.to(model.weight.dtype))).float()
                loss = (outputs - inputs @ truth.T).square().mean()
                loss.backward()
                run.log(loss=loss, tokens=len(inputs))
                if settings.get("frozen"):
                    optimizer.zero_grad(set_to_none=False)
                optimizer.step()
                optimizer.zero_grad()
    except PeerError as error:
        kind = type(error).__name__
        say("error", {"text": str(error), "exit_code": error.exit_code, "kind": kind})
        return error.exit_code
    parameters = {name: p.detach().float() for name, p in model.named_parameters()}
    torch.save(parameters, directory / "held.pt")
    peer.save_weights(model, directory / "saved.safetensors")
    say("end", {**run.status.figures(), "versions": run.versions, "loss": float(loss.detach())})
    return 0


if __name__ == "__main__":
    raise SystemExit(main(json.loads(sys.argv[1])))
