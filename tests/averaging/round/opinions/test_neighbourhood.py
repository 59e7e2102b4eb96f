"""Opinions of a peer about others: which of them count, have a part, and are gone."""

from __future__ import annotations

import msgspec

from averaging import messages as said
from averaging.guard.rules.probation import Probation
from averaging.round.interface.identity import Circumstances
from averaging.round.opinions.neighbourhood import Neighbourhood
from averaging.rules.peer_view import PeerView
from averaging.rules.policy import ProbationPolicy
from averaging.rules.reputation import LIMIT, Deed
from dht.identity import PeerId
from tests.averaging.message_examples import EXAMPLES
from tests.averaging.round.machines import identity

PEERS = tuple(PeerId(name) for name in ("anna", "boris", "clara", "dora"))
JOIN = next(message for message in EXAMPLES if isinstance(message, said.Join))
COMMIT = next(
    said.decode_commit(message.commit)
    for message in EXAMPLES
    if isinstance(message, said.Committed)
)
ENTRY = COMMIT.members[0]


def neighbourhood(me: PeerId, *, began: float) -> Neighbourhood:
    """The view of a peer that has seen the others since 0 s and takes part since ``began``."""
    return Neighbourhood(
        identity(me),
        Circumstances(),
        {peer: PeerView(first_seen=0.0, heard_at=40.0) for peer in PEERS if peer != me},
        now=began,
    )


def test_a_peer_with_too_many_strikes_leads_none_and_counts_in_no_round() -> None:
    anna, boris, clara, dora = PEERS
    view = {peer: PeerView(first_seen=0.0, heard_at=40.0) for peer in (boris, clara, dora)}
    electors = Probation(ProbationPolicy())
    peers = Neighbourhood(identity(anna), Circumstances(), view, now=0.0, electors=electors)
    for _ in range(int(LIMIT)):
        peers.reputation.saw(dora, Deed.LIES, 40.0)

    assert not peers.may_lead(dora, 40.0)
    assert peers.may_lead(boris, 40.0)
    assert peers.trainers(40.0) == (anna, boris, clara)
    assert dora not in peers.electorate(40.0)
    joins = dict.fromkeys(PEERS, JOIN)
    assert peers.on_probation(joins, 40.0) == {dora}


def test_a_restarted_peer_has_no_part_that_others_need_until_its_work_is_merged() -> None:
    anna, _, clara, dora = PEERS
    peers = neighbourhood(anna, began=0.0)
    joins = dict.fromkeys(PEERS, JOIN)
    again = msgspec.structs.replace(JOIN, incarnation=JOIN.incarnation + 1)

    def lives(join: said.Join, *names: PeerId) -> list[said.Entry]:
        change = msgspec.structs.replace
        return [change(ENTRY, peer=name, incarnation=join.incarnation) for name in names]

    peers.met(lives(JOIN, *PEERS))
    assert not peers.on_probation(joins, 40.0)
    joins[dora] = again
    assert peers.on_probation(joins, 40.0) == {dora}
    peers.met(lives(again, dora))
    assert peers.on_probation(joins, 40.0) == {dora}, "its round was void"
    elsewhere = msgspec.structs.replace(JOIN.head, lineage=bytes(32))
    apart = {**joins, dora: msgspec.structs.replace(again, head=elsewhere)}
    assert not peers.on_probation(apart, 40.0), "it alone carries its lineage"
    joins[clara] = again
    assert not peers.on_probation(joins, 40.0), "half would not vote"
    peers.finished_with(lives(again, dora))
    assert peers.on_probation(joins, 40.0) == {clara}


def test_a_peer_that_comes_back_again_and_again_waits_longer_for_a_part_each_time() -> None:
    """One restart before each audit of what it had merged falsely kept a peer from being convicted,
    and it reduced in every second round."""
    anna, _, _, dora = PEERS
    peers = neighbourhood(anna, began=0.0)
    peers.met([msgspec.structs.replace(ENTRY, peer=peer, incarnation=1) for peer in PEERS])

    def rounds_without_part(incarnation: int, *, stays: int = 0) -> int:
        """Merged rounds until the peer has a part; after that it is in ``stays`` more."""
        entry = msgspec.structs.replace(ENTRY, peer=dora, incarnation=incarnation)
        joins = dict.fromkeys(PEERS, msgspec.structs.replace(JOIN, incarnation=1))
        joins[dora] = msgspec.structs.replace(JOIN, incarnation=incarnation)
        count = 0
        while peers.on_probation(joins, 40.0) == {dora}:
            peers.finished_with([entry])
            count += 1
        for _ in range(stays):
            peers.finished_with([entry])
        return count

    assert [rounds_without_part(life) for life in range(2, 9)] == [1, 2, 4, 8, 16, 16, 16]
    assert rounds_without_part(9, stays=16 * 16 - 16 - 1) == 16
    assert rounds_without_part(10, stays=16 * 16 - 16) == 16
    assert rounds_without_part(11, stays=14) == 1, "the life before lasted"
    assert rounds_without_part(12, stays=30) == 2
    assert rounds_without_part(13) == 1


def test_a_round_is_deserted_when_its_majority_is_gone_and_others_are_left_to_merge_with() -> None:
    me, boris, clara, dora = PEERS
    left = PeerId("emil")
    members = tuple(msgspec.structs.replace(ENTRY, peer=peer) for peer in PEERS)
    commit = msgspec.structs.replace(COMMIT, members=members, on_probation=())
    view = {peer: PeerView(first_seen=0.0, heard_at=40.0) for peer in (*PEERS[1:], left)}
    peers = Neighbourhood(identity(me), Circumstances(), view, now=0.0)
    assert not peers.is_deserted(commit, 40.0)
    peers.mark_failed(boris, 41.0)  # a broken link alone may come back
    peers.mark_failed(clara, 41.0)
    assert not peers.is_deserted(commit, 41.0)

    del view[boris]
    assert not peers.is_deserted(commit, 41.0), "three of four are a majority"
    assert peers.is_deserted(commit, 41.0, frozenset({3})), "who has declined never votes"
    del view[clara]
    assert peers.is_deserted(commit, 41.0)
    view[dora] = view[left] = PeerView(first_seen=0.0, heard_at=0.0)
    assert not peers.is_deserted(commit, 41.0), "alone, it has nobody to merge with instead"
