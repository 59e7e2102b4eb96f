"""A peer that withholds what a round waits for is named by those that waited, and no other is."""

from __future__ import annotations

import msgspec
import pytest

from averaging import messages as said
from averaging.round.interface.effects import (
    Apply,
    Effect,
    Enter,
    Strike,
    Upload,
)
from averaging.round.interface.inputs import (
    Applied,
    Due,
    LinkLost,
    MergedArrived,
    Offered,
    Received,
    SliceMerged,
    Tick,
    UploadArrived,
    UploadFailed,
)
from averaging.round.machine import FragmentRounds
from averaging.round.sealing.seals import ballot_of
from averaging.round.slices import UPLOAD_TRIES_MAX
from averaging.rules.peer_view import PeerView
from averaging.rules.usual_norms import UploadNorm
from dht.identity import PeerId
from tests.averaging.round.machines import (
    ME,
    POLICY,
    asks,
    certified,
    committed,
    coordinator_of,
    joined,
    leading,
    lost,
    machine,
    neighbourhood,
    of,
    offer,
    sent,
    sign,
    standing,
)

BEGAN = 2.0
ALL = (0, 1, 2)


def entered() -> tuple[FragmentRounds, Enter]:
    """A round of three that this peer leads; each reduces a slice."""
    rounds = leading()
    rounds.handle(Due(), 1.0)
    rounds.handle(Offered(offer(standing("start"))), 1.0)
    effects: list[Effect] = []
    for peer in sorted(rounds.peers.view):
        effects = rounds.handle(asks(peer, standing("start")), BEGAN)
    (enter,) = of(effects, Enter)
    assert isinstance(enter, Enter) and len(enter.commit.reducers) == 3
    return rounds, enter


def blamed(effects: list[Effect]) -> dict[PeerId, str]:
    return {effect.peer: effect.reason for effect in effects if isinstance(effect, Strike)}


def reports(
    rounds: FragmentRounds, enter: Enter, without: dict[PeerId, tuple[int, ...]]
) -> list[Effect]:
    """All have uploaded; reducers report that, except for the uploads of these members."""
    effects: list[Effect] = []
    commit = enter.commit
    everybody = range(len(commit.members))
    for index, reducer in enumerate(commit.reducers):
        if reducer == ME:
            for entry in commit.members:
                arrived = UploadArrived(enter.round, index, entry.peer, None, UploadNorm(1.0))
                effects += rounds.handle(arrived, BEGAN)
            continue
        missing = without.get(reducer, ())
        complete = tuple(i for i in everybody if i not in missing)
        refused = tuple((i, "I do not like it") for i in missing)
        report = said.Report(0, enter.round, index, complete, refused)
        effects += rounds.handle(Received(reducer, report), BEGAN)
    return effects


def test_a_leader_names_the_reducer_that_leaves_the_leaders_own_upload_out() -> None:
    rounds, enter = entered()
    liar = next(peer for peer in enter.commit.reducers if peer != ME)
    found = blamed(reports(rounds, enter, {liar: (enter.commit.index(ME) or 0,)}))
    assert list(found) == [liar] and "of my upload, which I sent" in found[liar]


def test_nobody_is_named_for_the_uploads_of_others_nor_for_one_that_was_not_sent() -> None:
    rounds, enter = entered()
    first, second = (peer for peer in enter.commit.reducers if peer != ME)
    assert not blamed(reports(rounds, enter, {first: (enter.commit.index(second) or 0,)}))
    rounds, enter = entered()
    first = next(peer for peer in enter.commit.reducers if peer != ME)
    failed = UploadFailed(enter.round, enter.commit.reducers.index(first), "the stream broke")
    rounds.handle(failed, BEGAN)
    assert not blamed(reports(rounds, enter, {first: (enter.commit.index(ME) or 0,)}))


@pytest.mark.parametrize("is_left_out", [False, True])
def test_a_member_that_the_seal_leaves_out_asks_for_slices_without_its_upload(
    is_left_out: bool,
) -> None:
    """The member's uploads may never get through, and without its signature the version lacks
    proof."""
    rounds, enter = entered()
    reducers = enter.commit.reducers
    index = next(index for index, peer in enumerate(reducers) if peer != ME)
    for _ in range(UPLOAD_TRIES_MAX):
        rounds.handle(UploadFailed(enter.round, index, "the stream broke"), BEGAN)
    me = enter.commit.index(ME) or 0
    seal = tuple(i for i in range(3) if i != me or not is_left_out)
    effects: list[Effect] = reports(rounds, enter, {reducers[index]: (me,)} if is_left_out else {})
    for peer in reducers:
        accepted = said.Accepted(0, enter.round, 0, sign(peer, said.vote(enter.round, 0, seal)))
        effects += rounds.handle(Received(peer, accepted), BEGAN)
    assert rounds.rounds[enter.round].seal == seal
    uploads = [(each.slice, each.gives) for each in effects if isinstance(each, Upload)]
    assert uploads == ([(index, False)] if is_left_out else [])


def sealed(rounds: FragmentRounds, enter: Enter) -> tuple[int, int, int]:
    """Seal the round. Returns the slices of this peer, of one that sends its own, and of another
    whose merged slice is missing."""
    reports(rounds, enter, {})
    mine, first, second = sorted(
        range(3), key=lambda index: (enter.commit.reducers[index] != ME, index)
    )
    for peer in enter.commit.reducers:
        vote = said.vote(enter.round, 0, ALL)
        accepted = said.Accepted(0, enter.round, 0, sign(peer, vote))
        rounds.handle(Received(peer, accepted), BEGAN)
    part = rounds.rounds[enter.round]
    assert part.seal == ALL
    part.slices.digests[first] = bytes(32)
    return mine, first, second


@pytest.mark.parametrize("others_have_it", [False, True])
@pytest.mark.parametrize("is_gone", [False, True])
def test_a_reducer_that_sends_no_merged_slice_is_named_unless_it_is_gone(
    is_gone: bool, others_have_it: bool
) -> None:
    """Those that left a round which others had finished named nobody: a reducer that answered half
    of the members lost no standing by it."""
    rounds, enter = entered()
    mine, first, second = sealed(rounds, enter)
    keeps = enter.commit.reducers[second]
    rounds.handle(SliceMerged(enter.round, mine, bytes(32)), BEGAN)
    if others_have_it:
        have = enter.commit.reducers[first], enter.commit.reducers[second]
        finished = said.Finished(0, enter.round, certified(standing("start", "next"), by=have))
        for peer in have:
            rounds.handle(Received(peer, finished), BEGAN)
    late = BEGAN + enter.commit.upload_s + POLICY.margin_s
    if is_gone:
        rounds.handle(LinkLost(keeps), BEGAN)
    assert not blamed(rounds.handle(Tick(), late - 0.1))
    found = blamed(rounds.handle(Tick(), late + 0.1))
    assert set(found) == (set() if is_gone else {keeps})
    assert rounds.rounds[enter.round].is_open != others_have_it


def test_a_round_is_left_to_those_that_finished_it_only_where_their_version_can_be_taken() -> None:
    """A reducer of six that answered half of the members of a round had the others leave it, in
    doubt, and no quorum stood on one version for minutes."""
    rounds, enter = entered()
    mine, first, second = sealed(rounds, enter)
    rounds.handle(SliceMerged(enter.round, mine, bytes(32)), BEGAN)
    have = enter.commit.reducers[first], enter.commit.reducers[second]
    made = standing("start", "next")
    late = BEGAN + enter.commit.upload_s + POLICY.margin_s + 0.1
    for peer in have:
        finished = said.Finished(0, enter.round, certified(made, by=have[:1]))
        rounds.handle(Received(peer, finished), BEGAN)
    rounds.handle(Tick(), late)
    part = rounds.rounds[enter.round]
    assert part.is_open and part.coordinator is not None
    assert part.coordinator.stuck == {second}, "it asks for the slice"

    finished = said.Finished(0, enter.round, certified(made, by=have))
    rounds.handle(Received(have[0], finished), late)
    rounds.handle(Tick(), late + POLICY.resend_s + POLICY.margin_s)
    assert not part.is_open


@pytest.mark.parametrize("are_enough", [False, True])
def test_a_coordinator_that_has_finished_replaces_a_reducer_until_others_can_follow_it(
    are_enough: bool,
) -> None:
    rounds, enter = entered()
    mine, first, second = sealed(rounds, enter)
    rounds.handle(SliceMerged(enter.round, mine, bytes(32)), BEGAN)
    (apply,) = of(rounds.handle(MergedArrived(enter.round, second, bytes(32), ALL), BEGAN), Apply)
    assert isinstance(apply, Apply)
    head = certified(apply.standing, by=(ME,))
    rounds.handle(Applied(enter.round), BEGAN)
    for peer in (ME, enter.commit.reducers[second])[: 1 + are_enough]:
        rounds.handle(Received(peer, said.Finished(0, enter.round, head)), BEGAN)

    other = enter.commit.reducers[first]
    late = BEGAN + enter.commit.upload_s + POLICY.margin_s + 0.1
    missing = Received(other, said.Missing(0, enter.round, second))
    effects = [*rounds.handle(missing, late), *rounds.handle(missing, late + POLICY.resend_s)]
    replaced = [m.slice for m in sent(effects, other) if isinstance(m, said.Reassign)]
    assert replaced == ([] if are_enough else [second])


@pytest.mark.parametrize("whose", ["leader", "member"])
def test_only_a_leader_whose_own_claim_is_beyond_belief_is_named_for_its_commit(whose: str) -> None:
    """The leader may have seen more of another member."""
    rounds = machine()
    leader = joined(rounds)
    message = committed(rounds, leader)
    commit = said.decode_commit(message.commit)
    members = list(commit.members)
    number = next(
        i for i, each in enumerate(members) if (each.peer == leader) == (whose == "leader")
    )
    members[number] = msgspec.structs.replace(members[number], steps=10**12)
    effects = rounds.handle(
        Received(leader, committed(rounds, leader, members=tuple(members))), 2.0
    )
    assert not of(effects, Enter)
    named = [effect.peer for effect in effects if isinstance(effect, Strike)]
    assert named == ([leader] if whose == "leader" else [])


def test_a_peer_that_took_over_the_slice_of_a_withholding_reducer_is_not_named_for_it() -> None:
    """The upload of that reducer itself is in the seal, and only it has that: nobody can merge."""
    rounds, enter = entered()
    mine, first, second = sealed(rounds, enter)
    keeps = enter.commit.reducers[second]
    rounds.handle(SliceMerged(enter.round, mine, bytes(32)), BEGAN)
    taken = said.Reassign(0, enter.round, 0, second, enter.commit.reducers[first])
    rounds.rounds[enter.round].handle(Received(ME, taken), BEGAN)
    late = BEGAN + enter.commit.upload_s + POLICY.margin_s
    assert set(blamed(rounds.handle(Tick(), late + 0.1))) == {keeps}


def test_a_coordinator_that_has_given_up_a_sealed_round_replaces_its_reducers_still() -> None:
    """Earlier, such a coordinator answered with its vow alone, and nobody took the place of the
    reducer until the end."""
    rounds, enter = entered()
    mine, first, second = sealed(rounds, enter)
    other = enter.commit.reducers[first]
    rounds.handle(SliceMerged(enter.round, mine, bytes(32)), BEGAN)
    rounds.rounds[enter.round].handle(Received(ME, said.Forswear(0, enter.round, 0)), BEGAN)
    late = BEGAN + enter.commit.upload_s + POLICY.margin_s + 0.1
    assert not rounds.rounds[enter.round].is_open

    missing = Received(other, said.Missing(0, enter.round, second))
    effects = [*rounds.handle(missing, late), *rounds.handle(missing, late + POLICY.resend_s)]
    assert [m.slice for m in sent(effects, other) if isinstance(m, said.Reassign)] == [second]


def test_a_sealed_round_is_not_void_because_the_owner_of_another_ballot_says_so() -> None:
    """Earlier, its word undid the round at a member whose work the others then merged."""
    rounds, enter = entered()
    sealed(rounds, enter)
    for place, index in enumerate(enter.commit.voters):
        ballot = ballot_of(place, voters=len(enter.commit.voters), above=0)
        void = said.Void(0, enter.round, "because", forsworn=False, ballot=ballot)
        rounds.handle(Received(enter.commit.members[index].peer, void), BEGAN)
    assert rounds.rounds[enter.round].is_open


def test_a_reducer_that_took_a_slice_says_whose_uploads_it_has_and_leaves_without_the_dead() -> (
    None
):
    """Two that were left of seven were in a sealed round until its deadline."""
    rounds, enter = entered()
    mine, _, second = sealed(rounds, enter)
    rounds.handle(SliceMerged(enter.round, mine, bytes(32)), BEGAN)
    dead, other = enter.commit.reducers[second], enter.commit.reducers[3 - mine - second]
    rounds.handle(LinkLost(dead), BEGAN)
    part = rounds.rounds[enter.round]
    taken = said.Reassign(0, enter.round, 0, second, ME)
    part.handle(Received(ME, taken), BEGAN)

    rounds.own_messages.clear()
    part.handle(UploadArrived(enter.round, second, other, None, UploadNorm(1.0)), BEGAN)
    (report,) = rounds.own_messages
    assert isinstance(report, said.Report)
    assert report.complete == (enter.commit.index(other),)

    view = rounds.peers.view
    assert isinstance(view, dict)
    view.clear()
    view[PeerId("dora")] = PeerView(first_seen=-1e3, heard_at=BEGAN, step_time_s=1.0)
    rounds.handle(Tick(), BEGAN + 0.1)
    rounds.handle(Tick(), BEGAN + 0.2 + POLICY.margin_s)
    assert not part.is_open


def test_a_reducer_that_merges_itself_does_not_take_the_slice_that_it_is_handed() -> None:
    """The reducer before it had merged falsely: its digest went into the lineage, and the bits of
    the own merge into the state."""
    rounds, enter = entered()
    mine, *_ = sealed(rounds, enter)
    part, made, false = rounds.rounds[enter.round], bytes(32), bytes([1]) * 32
    for index in range(3):
        if index != mine:
            rounds.handle(MergedArrived(enter.round, index, made, ALL), BEGAN)
    assert part.reducer.slices[mine].merging

    assert not rounds.handle(MergedArrived(enter.round, mine, false, ALL), BEGAN)
    effects = rounds.handle(SliceMerged(enter.round, mine, made), BEGAN)
    (apply,) = of(effects, Apply)
    assert isinstance(apply, Apply) and set(apply.digests) == {made}


def test_a_later_coordinator_whose_voters_were_never_in_the_round_leaves_it_at_once() -> None:
    """Earlier, its word that the round is void counted as one member's, at itself too: it was in
    the round until the deadline."""
    rounds, enter = entered()
    part, voters = rounds.rounds[enter.round], enter.commit.voters
    others = [i for i in voters if enter.commit.members[i].peer != ME]
    ballot = ballot_of(voters.index(others[0]), voters=len(voters), above=0)
    first = enter.commit.members[others[0]].peer
    late = BEGAN + enter.commit.upload_s + 2 * POLICY.margin_s
    rounds.handle(Received(first, said.Prepare(0, enter.round, ballot)), late)
    assert not part.coordinates
    now = part.takeover.at
    rounds.handle(Tick(), now)
    assert part.coordinator is not None and part.coordinates
    mine = part.coordinator.ballot
    assert mine > ballot

    echo = said.Void(0, enter.round, "because", forsworn=False, ballot=mine)
    rounds.handle(Received(ME, echo), now)
    assert part.is_open, "it has not said so"
    for index in others:
        declined = said.Declined(0, enter.round, "not in my rounds", absent=True)
        rounds.handle(Received(enter.commit.members[index].peer, declined), now)
    assert not part.is_open


def test_a_coordinator_that_was_restarted_is_replaced_however_often_it_answers() -> None:
    """Each answer of its next life put the takeover off, and all were in the round until its
    deadline; the successor of restarted voters waited as long."""
    rounds = machine()
    leader = joined(rounds)
    effects = rounds.handle(Received(leader, committed(rounds, leader)), BEGAN)
    (enter,) = of(effects, Enter)
    assert isinstance(enter, Enter)
    vow = said.Forsworn(0, enter.round, None, sign(leader, said.vow(enter.round)))

    prepared: list[float] = []
    for second in range(10):
        now = BEGAN + second
        effects = [*rounds.handle(Received(leader, vow), now), *rounds.handle(Tick(), now)]
        prepared += [now for message in sent(effects, leader) if isinstance(message, said.Prepare)]
        if prepared:
            break
    assert prepared, "by then a member that only waits had not taken over"

    declined = said.Declined(0, enter.round, "not in my rounds", absent=False)
    rounds.handle(Received(leader, declined), now)
    rounds.handle(Tick(), now + POLICY.resend_s)
    rounds.handle(Tick(), now + POLICY.resend_s + POLICY.margin_s)
    assert not rounds.rounds[enter.round].is_open


def test_voters_that_let_a_ballot_end_without_a_majority_are_named() -> None:
    _, enter = entered()
    commit = enter.commit
    effects: list[Effect] = []
    ballot, peers = ballot_of(1, voters=3, above=0), neighbourhood()
    coordinator = coordinator_of(commit, ballot, effects, peers=peers)
    coordinator.note_silent_voters(1.0)
    silent = {entry.peer for entry in commit.members} - {commit.members[1].peer}
    assert set(blamed(effects)) == silent
    effects.clear()
    down = commit.members[0].peer
    lost(down, peers)
    coordinator = coordinator_of(commit, ballot, effects, peers=peers)
    coordinator.note_silent_voters(1.0)
    assert set(blamed(effects)) == silent - {down}
