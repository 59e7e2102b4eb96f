"""Messages of a peer about the peers of its run that can be dialled."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from dht.identity import PeerId
from dht.protocol import RELEASE
from peer.rules.others import (
    STUCK_AFTER_S,
    Founding,
    Reach,
    first_asked,
    founding_of,
    heaviest,
    may_found,
    nobody_reduces,
)
from peer.status import PeerStatus
from tests.peer.statuses import a_status


def test_peers_that_can_all_only_dial_out_are_told_what_to_do_once() -> None:
    reach = Reach()

    def look(now: float, *, learners: int = 1, reachable: int = 0) -> bool:
        return reach.look(False, learners=learners, reachable=reachable, now=now)

    assert not look(0.0)
    assert not look(STUCK_AFTER_S - 0.1), "the verdict about a newcomer may still come"
    assert look(STUCK_AFTER_S)
    assert not look(STUCK_AFTER_S + 100.0)
    assert not look(200.0, reachable=1)
    assert not look(201.0)
    assert look(201.0 + STUCK_AFTER_S, learners=2), "it became true again"
    assert "shoal keep" in nobody_reduces(2) and "2 peers" in nobody_reduces(2)


@pytest.mark.parametrize(("own", "learners"), [(True, 3), (None, 3), (False, 0)])
def test_a_peer_that_may_be_dialled_or_trains_alone_says_nothing(
    own: bool | None, learners: int
) -> None:
    reach = Reach()
    for now in range(0, 600, 10):
        assert not reach.look(own, learners=learners, reachable=0, now=now)


ROOT = Path(__file__).parents[3]


def test_the_release_is_that_of_the_package() -> None:
    assert f'version = "{RELEASE}"\n' in (ROOT / "pyproject.toml").read_text()


def test_of_two_foundings_exactly_one_gives_way() -> None:
    every = [Founding(tokens, name) for tokens in (0, 1, 500) for name in "abc"]
    for one, other in itertools.permutations(every, 2):
        ways = one.gives_way_to(other) + other.gives_way_to(one)
        assert ways == (one.name != other.name), (one, other)
    assert Founding(1, "a").gives_way_to(Founding(2, "b"))


@pytest.mark.parametrize("unknown", [Founding(9, ""), Founding(0, "")])
def test_a_founding_that_is_not_known_neither_wins_nor_loses(unknown: Founding) -> None:
    assert not unknown.gives_way_to(Founding(5, "a"))
    assert not Founding(5, "a").gives_way_to(unknown)


def test_a_newcomer_follows_the_heaviest_founding_that_somebody_has() -> None:
    light = a_status(founding="light", global_tokens=10)
    heavy = a_status(founding="heavy", global_tokens=20)
    empty = a_status(founding="empty", global_tokens=30, versions=())
    assert heaviest([light, heavy, empty]) == "heavy"
    assert heaviest([empty, a_status()]) == ""
    assert founding_of(heavy) == Founding(20, "heavy")


def test_a_newcomer_does_not_ask_those_alone_whose_keys_come_first() -> None:
    live = [PeerId(f"peer{number:03}") for number in range(100)]
    asked = {seed: first_asked(live, np.random.default_rng(seed)) for seed in range(4)}
    for each in asked.values():
        assert each[:8] == live[:8] and len(set(each)) == 16
    assert len({tuple(each) for each in asked.values()}) == 4
    assert first_asked(live[:9], np.random.default_rng(0)) == live[:9]


def test_one_peer_that_overstates_its_tokens_leads_no_newcomer_away_from_the_others() -> None:
    honest = [a_status(founding="true", global_tokens=tokens) for tokens in (10, 20)]
    liar = a_status(founding="invented", global_tokens=2**61)
    assert heaviest([liar, *honest]) == "true"


ANNA, BORIS, CLARA = PeerId("anna"), PeerId("boris"), PeerId("clara")


def newcomer(phase: str) -> PeerStatus:
    return a_status(phase=phase, versions=())


def test_the_first_of_several_newcomers_founds_the_run() -> None:
    for me, founds in ((ANNA, True), (BORIS, False), (CLARA, False)):
        others = {peer: newcomer("connecting") for peer in {ANNA, BORIS, CLARA} - {me}}
        assert may_found(me, others, waited=False) == founds
    assert may_found(BORIS, {ANNA: newcomer("waiting")}, waited=False), "it waits for others"
    assert may_found(BORIS, {}, waited=False)


@pytest.mark.parametrize("answer", [None, newcomer("founding")])
def test_nobody_founds_beside_one_that_may_have_founded_the_run(answer: PeerStatus | None) -> None:
    """Two that started within three seconds knew each other for four seconds, and both founded."""
    for me, other in ((ANNA, BORIS), (BORIS, ANNA)):
        assert not may_found(me, {other: answer}, waited=False)
    assert may_found(ANNA, {BORIS: answer}, waited=True), "it may be gone"
    assert may_found(BORIS, {ANNA: answer}, waited=True) == (answer is None)
