"""Digests show which peers have other bits than the rest, and a minority takes the others'
state.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from averaging.history.audit import LINEAGES_MAX, VOTES_MAX, Agreed, Audit, Minority, Others
from averaging.live.settings import AveragerSettings
from dht.identity import PeerId
from dht.memory.host import MemoryNetwork
from dht.memory.virtual_loop import run
from tests.averaging.live.quadratic import POLICY, swarm

ME, ANNA, BORIS, CLARA = (PeerId(name) for name in ("me", "anna", "boris", "clara"))
ALL = (ME, ANNA, BORIS, CLARA)
HERE, RIGHT, WRONG = b"h" * 32, b"r" * 32, b"w" * 32


def test_equal_digests_agree_in_any_order_of_arrival() -> None:
    audit = Audit()

    assert audit.heard(ANNA, HERE, RIGHT) == Agreed()
    assert audit.took(HERE, RIGHT, ALL) == Agreed()
    assert audit.heard(BORIS, HERE, RIGHT) == Agreed()


def test_a_minority_gives_way_and_a_majority_does_not() -> None:
    wrong, right = Audit(), Audit()
    wrong.took(HERE, WRONG, ALL)
    right.took(HERE, RIGHT, ALL)

    assert wrong.heard(ANNA, HERE, RIGHT) == Others((ANNA,)), "of two nobody knows who is right"
    assert wrong.heard(BORIS, HERE, RIGHT) == Minority(RIGHT, (ANNA, BORIS), with_me=1)
    assert right.heard(ANNA, HERE, RIGHT) == Agreed()
    assert right.heard(CLARA, HERE, WRONG) == Others((CLARA,))


def test_without_a_majority_nobody_gives_way() -> None:
    audit = Audit()
    audit.took(HERE, WRONG, ALL)
    audit.heard(ANNA, HERE, WRONG)
    audit.heard(BORIS, HERE, RIGHT)

    assert audit.heard(CLARA, HERE, RIGHT) == Others((BORIS, CLARA))


def test_only_peers_that_made_the_state_vote_and_each_has_one_vote() -> None:
    audit = Audit()
    audit.took(HERE, WRONG, (ME, ANNA))

    assert audit.heard(BORIS, HERE, RIGHT) == Agreed()
    assert audit.heard(ANNA, HERE, RIGHT) == Others((ANNA,))
    assert audit.heard(ANNA, HERE, RIGHT) == Others((ANNA,))


def test_votes_and_lineages_are_bounded() -> None:
    audit = Audit()
    for number in range(3 * VOTES_MAX):
        audit.heard(PeerId(f"p{number}"), HERE, RIGHT)
        audit.took(number.to_bytes(32, "little"), RIGHT, ALL)
        audit.heard(ANNA, number.to_bytes(32, "big"), RIGHT)

    assert len(audit._mine) == LINEAGES_MAX
    assert len(audit._votes) <= LINEAGES_MAX * VOTES_MAX


def test_peers_that_never_worked_take_no_vote_from_those_that_did() -> None:
    audit = Audit(lambda peer: float(peer in ALL))
    audit.heard(ANNA, HERE, RIGHT)
    for number in range(10 * VOTES_MAX):
        stranger = PeerId(f"stranger{number}")
        audit.heard(stranger, HERE, WRONG)
        audit.heard(stranger, number.to_bytes(32, "little"), WRONG)
    audit.heard(BORIS, HERE, RIGHT)

    assert audit.took(HERE, WRONG, ALL) == Minority(RIGHT, (ANNA, BORIS), with_me=1)


def test_a_peer_whose_memory_flipped_a_bit_logs_it_and_takes_the_majoritys_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with swarm(MemoryNetwork()) as made:
            settings = AveragerSettings(progress_s=1.0, audit_versions=2)
            policy = replace(POLICY, codec="f32")
            peers = [
                await made.add(name, settings=settings, policy=policy)
                for name in ("anna", "boris", "clara")
            ]
            await made.live(30.0)
            assert not any(peer.told("diverged") for peer in peers)
            state = peers[0].averager.states[0]
            assert state is not None
            state.theta.view(np.uint32)[3] ^= 1 << 22
            await made.live(60.0)
            (told,) = [told for told in peers[0].told("diverged") if told["fragment"] == 0]
            assert sorted(told["majority"]) == sorted(peer.id for peer in peers[1:])
            assert peers[0].told("gave_way") and not peers[1].told("diverged")
            assert peers[1].told("bits_differ"), "the others notice too"
            made.check()  # equal lineages have equal bits again

    with caplog.at_level(logging.WARNING):
        run(main())
    assert "diverged fragment=0 majority=2 with_me=1" in caplog.text
