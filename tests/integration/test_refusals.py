"""A peer with another run file, layout or protocol is refused with both values."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dht.presence.this_peer import PresenceSettings
from peer.run_file.reading import parse
from tests.dht.presence import presence_swarm
from tests.processes import Processes
from tests.swarms.commands import Swarm, run_text
from tests.swarms.learners import Learner, seed_of

pytestmark = pytest.mark.timeout(240)

REFUSED = 4


@pytest.fixture
def swarm(processes: Processes, tmp_path: Path) -> Swarm:
    return Swarm(processes, tmp_path)


@pytest.mark.slow
def test_a_peer_with_another_run_file_is_refused_with_both_ids(swarm: Swarm) -> None:
    anna = swarm.start("anna", run_text())
    seed = anna.link().partition("seed=")[2].split("&")[0]
    theirs, ours = parse(run_text()).run_id, parse(run_text(seed, learning_rate=1e-3)).run_id
    path = swarm.directory / "other.toml"
    path.write_text(run_text(seed, learning_rate=1e-3), encoding="utf-8")
    boris = swarm.join("boris", str(path))
    assert boris.wait(timeout_s=120) == REFUSED, boris.output
    assert ours in boris.output and theirs in boris.output, boris.output
    assert anna.process.poll() is None


@pytest.mark.slow
def test_a_folder_of_another_run_is_refused_with_both_ids(swarm: Swarm) -> None:
    anna = swarm.start("anna", run_text(), options=["--steps", "8"])
    assert anna.wait(timeout_s=120) == 0, anna.output
    path = swarm.directory / "other.toml"
    path.write_text(run_text(cycle=12), encoding="utf-8")
    anna.again("start", str(path), *anna.options)
    assert anna.wait(timeout_s=120) == REFUSED, anna.output
    assert parse(run_text()).run_id[:16] in anna.output, anna.output
    assert parse(run_text(cycle=12)).run_id[:16] in anna.output, anna.output


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_refused_with_the_names_that_differ(swarm: Swarm) -> None:
    def learner(name: str, **settings: Any) -> Learner:
        return Learner(swarm.processes, swarm.directory / name, **settings)

    anna = learner("anna", base=1.0)
    seeds = [seed_of(anna)]
    boris = learner("boris", size=32, base=1.0, seeds=seeds)
    clara = learner("clara", base=2.0, seeds=seeds)
    for refused, name in ((boris, "weight: (16, 32) here, (16, 24) there"), (clara, "base: (3,)")):
        assert refused.wait(timeout_s=120) == REFUSED, refused.output
        (error,) = refused.said("error")
        assert error["kind"] == "ModelMismatch" and name in error["text"], error
    learner("dora", base=2.0, seeds=seeds, allow_frozen_differences=True).ready()
    assert anna.process.poll() is None


def test_a_peer_without_a_common_protocol_is_no_member_and_both_learn_why() -> None:
    async def story(swarm: presence_swarm.Swarm) -> None:
        anna = await swarm.start("anna")
        boris = await swarm.start(
            "boris",
            seeds=await swarm.seed_addresses("anna"),
            settings=PresenceSettings(protocol_versions=(3, 4)),
        )
        await asyncio.sleep(60)
        assert anna.sees() == boris.sees() == set()
        for peer, ours, theirs in ((anna, "1", "3 to 4"), (boris, "3 to 4", "1")):
            (event,) = peer.told("hello_refused")
            assert event.fields["ours"] == ours and event.fields["theirs"] == theirs
            assert ours in event.text and theirs in event.text
            side = "this side" if peer is anna else "the other side"
            assert f"{side} is too old" in event.text, event.text

    presence_swarm.simulate(story)
