"""Who has other bits than the rest is told by their digests, and gives way to a majority."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from averaging.history.audit import LINEAGES_MAX, VOTES_MAX, Agreed, Audit, Minority, Others
from averaging.live.settings import AveragerSettings
from dht.identity import PeerId
from dht.memory.host import MemoryNetwork, run
from tests.averaging.live.quadratic import POLICY, swarm

ME, ANNA, BORIS, CLARA = (PeerId(name) for name in ("me", "anna", "boris", "clara"))
ALL = (ME, ANNA, BORIS, CLARA)
HERE, RIGHT, WRONG = b"h" * 32, b"r" * 32, b"w" * 32


def test_equal_digests_agree_whoever_came_first() -> None:
    audit = Audit()

    assert audit.heard(ANNA, HERE, RIGHT) == Agreed()
    assert audit.took(HERE, RIGHT, ALL) == Agreed()
    assert audit.heard(BORIS, HERE, RIGHT) == Agreed()


def test_one_against_many_gives_way_and_many_against_one_do_not() -> None:
    wrong, right = Audit(), Audit()
    wrong.took(HERE, WRONG, ALL)
    right.took(HERE, RIGHT, ALL)

    assert wrong.heard(ANNA, HERE, RIGHT) == Others((ANNA,)), "of two nobody knows who is right"
    assert wrong.heard(BORIS, HERE, RIGHT) == Minority(RIGHT, (ANNA, BORIS), with_me=1)
    assert right.heard(ANNA, HERE, RIGHT) == Agreed()
    assert right.heard(CLARA, HERE, WRONG) == Others((CLARA,))


def test_two_against_two_stay_as_they_are() -> None:
    audit = Audit()
    audit.took(HERE, WRONG, ALL)
    audit.heard(ANNA, HERE, WRONG)
    audit.heard(BORIS, HERE, RIGHT)

    assert audit.heard(CLARA, HERE, RIGHT) == Others((BORIS, CLARA))


def test_only_those_who_made_the_state_have_a_say_and_each_has_one() -> None:
    audit = Audit()
    audit.took(HERE, WRONG, (ME, ANNA))

    assert audit.heard(BORIS, HERE, RIGHT) == Agreed()
    assert audit.heard(ANNA, HERE, RIGHT) == Others((ANNA,))
    assert audit.heard(ANNA, HERE, RIGHT) == Others((ANNA,))


def test_what_is_kept_has_a_maximum() -> None:
    audit = Audit()
    for number in range(3 * VOTES_MAX):
        audit.heard(PeerId(f"p{number}"), HERE, RIGHT)
        audit.took(number.to_bytes(32, "little"), RIGHT, ALL)

    assert len(audit._votes) <= LINEAGES_MAX
    for number in range(3 * VOTES_MAX):
        audit.heard(PeerId(f"p{number}"), RIGHT, RIGHT)
    assert max(len(votes) for votes in audit._votes.values()) == VOTES_MAX


def test_a_peer_whose_memory_flipped_a_bit_logs_it_and_takes_the_majoritys_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        async with swarm(MemoryNetwork()) as made:
            settings = AveragerSettings(progress_s=0.1, audit_versions=2)
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
