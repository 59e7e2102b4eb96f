"""The ranks of an island whose units are read and written by hand, for tests.

Rank 0 offers and adopts every unit; every rank does the same to a whole copy of the
model, and compares. Settings come as one JSON object. Each fails, or says ``right``.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from averaging.numbers.layout import Layout
from dht.identity import PeerId
from peer.bridge.shared_memory import Adoption, AdoptionOrder
from peer.island.follower import Follower
from peer.run_file.reading import parse
from peer.trainer.channel import Agreed, Channel
from peer.trainer.device_copies import adopt_values
from peer.trainer.lead import Lead
from peer.trainer.parameters import is_coarse, model_layout
from peer.trainer.parameters import trained_parameters as trained
from peer.trainer.rank import Plan
from peer.trainer.settings import JoinSettings
from tests.peer.island_rank import Net, spread


def whole(parameter: Any) -> torch.Tensor:
    """A copy of the whole parameter, gathered by a collective operation."""
    gathered = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    values: torch.Tensor = gathered.detach().clone().reshape(-1)
    return values


def slots_of(layout: Layout, seed: int) -> list[torch.Tensor]:
    """Made-up contents, the same in every rank."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(fragment.size, generator=source) for fragment in layout.fragments]


def check(way: str, dtype: torch.dtype, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = Net().to(dtype)
    copies = {name: p.detach().clone().reshape(-1) for name, p in trained(net).items()}
    model = spread(net, way)
    parameters = trained(model)
    run = parse(settings["run"])
    layout = model_layout(model, run.outer.fragments)
    coarse = is_coarse(parameters)
    lead = Lead(60.0) if dist.get_rank() == 0 else None
    channel = lead or Channel(60.0)
    pieces, follower = [], None
    if lead is not None:
        pieces = [
            list(units)
            for units in lead.begin(run, PeerId("anna"), layout, parameters, data_dir=Path())
        ]
        offer(layout, pieces, copies)
        if way == "ddp":  # nobody sends what rank 0 has itself
            assert all(piece.owners == (0,) for units in pieces for piece in units)
        lead.go(Agreed())
    else:
        follower = Follower(
            channel,
            Plan(
                where=run,
                model=model,
                optimizers=(torch.optim.SGD(model.parameters(), lr=0.1),),
                auto=False,
                settings=JoinSettings(directory=Path(settings["directory"])),
            ),
        )
        follower.__enter__()
    for operation in Adoption:
        order = AdoptionOrder(operation, 1, b"", None, 0)
        slots = slots_of(layout, seed=operation)
        for n, fragment in enumerate(layout.fragments):
            for k, unit in enumerate(fragment.units):
                part = slots[n][unit.values]
                answer = adopt_values(
                    copies[unit.tensor][unit.start : unit.end], part, order, coarse=coarse
                )
                if lead is not None:
                    pieces[n][k].adopt(part, order, coarse=coarse)
                    assert answer is None or torch.equal(part, answer), (operation, unit)
        if lead is not None:
            lead.go(Agreed())
        else:
            assert follower is not None
            follower._follow()
        for name, parameter in parameters.items():
            assert torch.equal(whole(parameter), copies[name]), (way, dtype, operation, name)
    if lead is not None:
        lead.end(None)
    else:
        assert follower is not None
        follower.__exit__(None, None, None)


def offer(layout: Layout, pieces: list[list[Any]], copies: dict[str, torch.Tensor]) -> None:
    for n, fragment in enumerate(layout.fragments):
        slot = torch.full((fragment.size,), torch.nan)
        for k, unit in enumerate(fragment.units):
            pieces[n][k].offer(slot[unit.values])
            values = copies[unit.tensor][unit.start : unit.end].float()
            assert torch.equal(slot[unit.values], values), unit


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{settings['directory']}/meeting",
        rank=settings["rank"],
        world_size=settings["size"],
    )
    for way in ("ddp", "fsdp2"):
        for dtype in (torch.float32, torch.bfloat16):
            check(way, dtype, settings)
    dist.destroy_process_group()
    sys.stdout.write("right\n")
    sys.stdout.flush()  # a forked process ends without it


def fork(settings: dict[str, Any]) -> None:
    """Run all ranks in processes forked from this one, so that torch is imported once.

    When one fails, the others wait for it: they are ended.
    """
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=main, args=(settings | {"rank": rank},))
        for rank in range(settings["size"])
    ]
    for rank in ranks:
        rank.start()
    while running := [rank for rank in ranks if rank.is_alive()]:
        wait([rank.sentinel for rank in running])
        if any(rank.exitcode for rank in ranks):
            for rank in running:
                rank.terminate()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    fork(json.loads(sys.argv[1]))
