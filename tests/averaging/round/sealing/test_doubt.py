"""Contributions in doubt, and work that is offered again though a round may have had it."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from averaging import messages
from averaging.history.merged_map import MergedMap
from averaging.messages import Commit
from averaging.round.interface.effects import GiveUp, Presume
from averaging.round.interface.inputs import CaughtUp, Progressed, Received, Tick
from averaging.round.machine import FragmentRounds
from averaging.rules.peer_view import PeerView
from dht.identity import PeerId
from tests.averaging.round.machines import (
    ME,
    POLICY,
    committed,
    joined,
    machine,
    of,
    sign,
    standing,
)

OTHERS = tuple(PeerId(f"other-{number}") for number in range(5))


def entered(group_size: int = 5) -> tuple[FragmentRounds, Commit, bytes]:
    """A machine that is in a round of one group of two, as it saw nobody else."""
    policy = replace(POLICY, group_size=group_size)
    rounds = machine(others=OTHERS[:1], policy=policy, reachable=False)
    message = committed(rounds, joined(rounds))
    rounds.handle(Received(OTHERS[0], message), 1.0)
    assert rounds.own_round is not None
    return rounds, messages.decode_commit(message.commit), messages.digest(message.commit)


def sees_several_groups(rounds: FragmentRounds, now: float) -> None:
    for peer in OTHERS:
        cast(dict[PeerId, PeerView], rounds.peers.view)[peer] = PeerView(
            first_seen=-1e3, heard_at=now, step_time_s=1.0
        )
    assert rounds.peers.has_several_groups(now)


@pytest.mark.parametrize("is_covered", [False, True])
def test_work_of_a_doubt_that_nobody_answered_counts_as_merged_among_several_groups(
    is_covered: bool,
) -> None:
    """Others may have finished the round before this peer was alone with its doubt."""
    rounds, commit, round_id = entered()
    (entry,) = [each for each in commit.members if each.peer == ME]
    vote = sign(commit.leader, messages.vote(round_id, 0, (0, 1)))
    rounds.handle(Received(commit.leader, messages.Propose(0, round_id, 0, (0, 1), vote)), 1.5)
    over = 1.0 + commit.round_s
    (given_up,) = of(rounds.handle(Tick(), over), GiveUp)
    late = over + POLICY.doubt_s
    assert given_up.in_doubt and of(rounds.handle(Tick(), late), GiveUp)
    if is_covered:
        after = standing("start", "one")
        merged = MergedMap().with_work(ME, rounds.identity.incarnation, entry.mark, 100)
        rounds.handle(CaughtUp(replace(after, merged=merged)), late)
    sees_several_groups(rounds, late)

    presumed = of(rounds.handle(Progressed(1, 1.0), late), Presume)

    assert [each.mark for each in presumed] == ([] if is_covered else [entry.mark])
    assert not of(rounds.handle(Progressed(2, 1.0), late), Presume), "once"


def test_work_of_a_fork_that_a_peer_has_left_counts_as_merged_among_several_groups() -> None:
    """The peer saw one group when it rebased. The other member of its side did not, and met it in
    one of several groups soon after: a meld had the work twice."""
    merged = MergedMap().with_work(ME, 7, 24, 100)
    mine = replace(standing("start", "mine"), merged=merged)
    rounds = machine(mine, OTHERS[:1], replace(POLICY, group_size=5))
    rounds.handle(CaughtUp(standing("start", "theirs"), since=0), 1.0)
    assert not of(rounds.handle(Progressed(1, 1.0), 1.0), Presume), "it is offered again"
    sees_several_groups(rounds, 2.0)

    presumed = of(rounds.handle(Progressed(2, 1.0), 2.0), Presume)

    assert [each.mark for each in presumed] == [24]


@pytest.mark.parametrize("has_open_work", [False, True])
def test_a_peer_that_has_left_a_fork_with_its_work_is_in_no_meld_with_that_fork(
    has_open_work: bool,
) -> None:
    """Others of that side made one more version, so the sides were melded and not rebased: the work
    was merged in one parent, and beside it (storm 20380)."""
    merged = MergedMap().with_work(ME, 7, 24, 100) if has_open_work else MergedMap()
    mine = replace(standing("start", "mine"), merged=merged)
    rounds = machine(mine, OTHERS[:1])
    rounds.handle(CaughtUp(standing("start", "theirs"), since=0), 1.0)

    for meld in (1, 2):
        assert (rounds.doubting.objection_to_meld() is not None) is has_open_work
        presumed = of(rounds.handle(Progressed(meld, 1.0), 2.0), Presume)
        # The version that the others make by the first meld may tell.
        assert [each.mark for each in presumed] == ([24] if has_open_work and meld == 2 else [])

    assert rounds.doubting.objection_to_meld() is None


@pytest.mark.parametrize(("several", "in_doubt"), [(True, True), (False, False)])
def test_a_leaders_word_alone_voids_no_round_of_several_groups(
    several: bool, in_doubt: bool
) -> None:
    """A leader may tell one member so, and have the others seal the round."""
    rounds, commit, round_id = entered()
    if several:
        sees_several_groups(rounds, 1.0)
        rounds.certificates.among_groups_at = commit.version
    void = messages.Void(0, round_id, "because", False, 0, ())

    (given_up,) = of(rounds.handle(Received(commit.leader, void), 1.5), GiveUp)

    assert given_up.in_doubt == in_doubt
    if several:
        assert not of(rounds.handle(Tick(), 1.6), GiveUp)
        assert of(rounds.handle(Tick(), 1.5 + POLICY.margin_s), Presume)


def test_a_void_round_with_the_votes_of_most_is_void_among_several_groups() -> None:
    rounds, commit, round_id = entered()
    sees_several_groups(rounds, 1.0)
    rounds.certificates.among_groups_at = commit.version
    vote = messages.vote(round_id, 0, ())
    votes = tuple((index, sign(commit.members[index].peer, vote)) for index in commit.voters)
    void = messages.Void(0, round_id, "because", False, 0, votes)

    (given_up,) = of(rounds.handle(Received(commit.leader, void), 1.5), GiveUp)

    assert not given_up.in_doubt
