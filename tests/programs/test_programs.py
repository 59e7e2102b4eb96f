"""Programs of several frameworks, two peers each: they end with one model, nobody stands still."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import log
from pathlib import Path

import pytest

from tests.processes import Processes
from tests.programs.pair import LAUNCH, TORCHRUN, Peer, Shape, meet, train_alone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHAPES = {
    "own loop": Shape("own_loop", 400_000),
    "Trainer": Shape("causal_lm", 250_000),
    "fine-tuning": Shape("fine_tuning", 200_000),
    "two networks": Shape("two_networks", 60_000, untrained=0.5, outer='buffers = "mean"\n'),
    "LSTM": Shape("language_model", 150_000),
    "Fabric": Shape("fabric", 200_000),
    "accelerate": Shape("accelerated", 15_000, untrained=log(2)),
    "accelerate launch": Shape("accelerated", 20_000, untrained=log(2), second=LAUNCH),
    "FSDP2 one rank": Shape("sharded", 200_000, second=(*TORCHRUN, "1")),
    "FSDP2 two ranks": Shape("sharded", 250_000, second=(*TORCHRUN, "2")),
    "ALBERT with Lamb": Shape("masked_lm", 500_000),
}

GAP_S = 3.0
"""Time that a fragment may be merged later than a cycle after its last merge."""

PROGRESS = 0.9
"""Of what one alone learns in as many steps as each of two makes. Two should learn more, but most
of these tasks are learned to their floor, and two runs of one program alone differ by up to 5%."""


@pytest.mark.parametrize("name", SHAPES)
def test_two_peers_of_a_program_end_with_one_model(
    processes: Processes, tmp_path: Path, name: str
) -> None:
    shape = SHAPES[name]
    met = meet(processes, tmp_path, shape)
    alone = train_alone(processes, tmp_path, shape)
    sys.stderr.write(f"\n{name}: {met}, alone {alone:.4f}\n")
    assert len(set(met.digests)) == 1
    assert met.together >= 4
    assert met.longest_gap_s < met.slowest_cycle_s + GAP_S
    assert met.pending < 0.05
    assert shape.untrained - max(met.losses) > PROGRESS * (shape.untrained - alone)
    # Of two networks no batch is seen: there the seeds are compared, and the data are its own.
    assert not [told for told in met.warnings if "the random seed is the same" not in told]


def test_two_programs_that_set_the_same_seed_are_told_that_they_train_on_the_same_batches(
    processes: Processes, tmp_path: Path
) -> None:
    shape = replace(SHAPES["own loop"], tokens=100_000_000, same_seed=True)
    run_file = tmp_path / "my.run.toml"
    run_file.write_text(shape.text(), encoding="utf-8")
    first = Peer(processes, tmp_path / "first", shape, run_file)
    link_file = tmp_path / "the.link"
    link_file.write_text(first.link(), encoding="utf-8")
    second = Peer(processes, tmp_path / "second", shape, link_file)
    for peer in (first, second):
        told = peer.warning(timeout_s=240)
        assert "this peer trains on the same batches as " in told
        assert "(the first batch is the same)" in told
