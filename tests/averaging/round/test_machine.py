"""Single machines: their answers to each kind of peer, and their refusals."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import blake3
import msgspec
import pytest

from averaging import messages as said
from averaging.history.chain import Chain
from averaging.history.merged_map import MergedMap
from averaging.history.standing import (
    LINKS_BRIEF,
    Apart,
    IAmBehind,
    Same,
    Standing,
    TheyAreBehind,
    Unclear,
    brief,
    relate,
)
from averaging.messages import Head, Join, Link, Message, Opening
from averaging.round.gathering.catching_up import ATTEMPTS_IN_VAIN
from averaging.round.gathering.roster import Leader, compose, recomposed
from averaging.round.interface.effects import (
    Apply,
    CatchUp,
    Discard,
    Effect,
    Enter,
    Fold,
    GiveUp,
    Merge,
    Note,
    Rebase,
    TakeSnapshot,
    Upload,
    refusal,
)
from averaging.round.interface.inputs import (
    Applied,
    CaughtUp,
    Due,
    EndIsNear,
    Folded,
    Leave,
    LineMeasured,
    LinkLost,
    MergeBeforeLeaving,
    MergedArrived,
    Offered,
    Progressed,
    Received,
    SliceMerged,
    StreamOpened,
    Tick,
    UploadArrived,
)
from averaging.round.interface.phase import Phase
from averaging.round.machine import FragmentRounds
from averaging.round.sealing.seals import owner_of
from averaging.rules.line_levels import Level
from averaging.rules.mixing import MELD_LAG, meets
from averaging.rules.policy import RoundPolicy
from dht.identity import PeerId
from tests.averaging.message_examples import EXAMPLES
from tests.averaging.round.machines import (
    ANNA,
    BORIS,
    ME,
    POLICY,
    TOPIC,
    asks,
    behind,
    certified,
    committed,
    identity,
    join,
    joined,
    leading,
    machine,
    of,
    offer,
    phase,
    ranked,
    seen_again,
    sent,
    sign,
    signed,
    standing,
)

# Comparing standings


def test_behind_same_and_apart_are_told_by_lineage() -> None:
    old, new, other = standing("s", "a"), standing("s", "a", "b"), standing("s", "x", "y")

    assert relate(new.head(), new.chain, new.head()) == Same()
    assert relate(new.head(), new.chain, old.head()) == TheyAreBehind()
    assert relate(old.head(), old.chain, new.head()) == IAmBehind()
    apart = relate(new.head(), new.chain, other.head())
    assert apart == Apart(ancestor=0, mine=200, theirs=200)
    assert isinstance(apart, Apart) and not (apart.i_am_light or apart.they_are_light)


def test_a_side_is_light_unless_the_two_have_merged_about_as_much_since_they_parted() -> None:
    assert Apart(0, mine=24, theirs=76).i_am_light
    assert not Apart(0, mine=25, theirs=75).i_am_light
    assert Apart(0, mine=76, theirs=24).they_are_light


@pytest.mark.parametrize(("young_versions", "is_light"), [(1, False), (2, True)])
def test_while_its_work_can_be_offered_again_the_lighter_side_of_a_young_fork_gives_way(
    young_versions: int, is_light: bool
) -> None:
    heavy, light = standing("s", "a", "b"), standing("s", "x")
    relation = relate(light.head(), light.chain, heavy.head(), young_versions=young_versions)
    assert isinstance(relation, Apart)
    assert relation.i_am_light == is_light


def test_a_long_chain_shown_in_part_still_tells_behind_and_apart() -> None:
    names = [f"v{i}" for i in range(3000)]
    old, new = standing(*names[:900]), standing(*names)
    fork = standing(*names[:2500], *(f"w{i}" for i in range(600)))

    assert relate(new.head(), new.chain, old.head()) == TheyAreBehind()
    apart = relate(new.head(), new.chain, fork.head())
    assert isinstance(apart, Apart) and apart.ancestor is not None
    assert 1500 < apart.ancestor < 2500
    assert not (apart.i_am_light or apart.they_are_light)


# Joining


def test_a_due_fragment_asks_the_learner_and_then_a_leader() -> None:
    rounds = machine()
    assert [type(e) for e in of(rounds.handle(Due(), 1.0), TakeSnapshot)] == [TakeSnapshot]
    assert phase(rounds) is Phase.WANTED

    effects = rounds.handle(Offered(offer(standing("start"))), 2.0)

    assert phase(rounds) is Phase.JOINING
    assert any(isinstance(message, (Join, said.Call)) for message in sent(effects))


def test_nothing_new_is_not_offered() -> None:
    rounds = machine()
    rounds.handle(Due(), 1.0)

    effects = rounds.handle(Offered(offer(standing("start"), steps=0)), 2.0)

    assert of(effects, GiveUp) and not sent(effects)
    assert phase(rounds) is Phase.IDLE


def test_a_silent_leader_is_asked_twice_and_then_the_next_in_rank() -> None:
    rounds = machine(reachable=False)
    first = joined(rounds)
    assert rounds.deadline == 1.0 + POLICY.answer_s

    again = rounds.handle(Tick(), 1.0 + POLICY.answer_s)
    assert [type(m) for m in sent(again, first)] == [Join]
    then = rounds.handle(Tick(), 1.0 + 2 * POLICY.answer_s)

    assert [type(m) for m in sent(then, first)] == [said.Withdraw]
    (other,) = {ANNA, BORIS} - {first}
    assert [type(m) for m in sent(then, other)] == [Join]


def test_redirects_are_followed_but_not_without_end() -> None:
    rounds = machine(reachable=False)
    leader = joined(rounds)
    for _ in range(20):
        attempt = rounds.joining.attempt
        if attempt is None:
            break
        other = BORIS if attempt.leader == ANNA else ANNA
        message = said.Redirect(0, attempt.join.join, other)
        rounds.handle(Received(attempt.leader, message), 2.0)

    assert phase(rounds) is Phase.IDLE, f"still following redirects from {leader}"


def useless(kind: str, rounds: FragmentRounds, leader: PeerId) -> Message:
    """An answer of a leader whose rounds never begin."""
    attempt = rounds.joining.attempt
    assert attempt is not None
    number = attempt.join.join
    answers: dict[str, Message] = {
        "refused": said.Refused(0, number, "I do not like you"),
        "no quorum": said.Refused(0, number, "nobody here"),
        "too late": said.Closed(0, 1, bytes(32)),
        "redirect": said.Redirect(0, number, leader),
        "noted": said.Noted(0, number),
    }
    return answers[kind]


@pytest.mark.parametrize("kind", ["refused", "no quorum", "too late", "redirect", "noted"])
def test_a_leader_that_wastes_a_join_is_not_asked_next(kind: str) -> None:
    rounds = machine(reachable=False)
    first, now = joined(rounds), 1.0
    attempt = rounds.joining.attempt
    while attempt is not None and attempt.leader == first:
        now += 1.0
        rounds.handle(Received(first, useless(kind, rounds, first)), now)
        rounds.handle(Tick(), now)
        attempt = rounds.joining.attempt
        if now > 20.0:  # heartbeats go on
            for peer in (ANNA, BORIS):
                seen_again(rounds, peer, at=now)

    if attempt is None:
        joined(rounds, now)
        attempt = rounds.joining.attempt
    assert attempt is not None and attempt.leader != first and attempt.join.attempt >= 1


def test_a_leader_whose_round_is_void_is_not_asked_next() -> None:
    """Each commit counted as its success, so a fragment stood still at the version for which a
    leader ranked first that had its rounds sealed as void."""
    rounds = machine(reachable=False)
    first = joined(rounds)
    message = committed(rounds, first)
    rounds.handle(Received(first, message), 2.0)
    assert phase(rounds) is Phase.ENTERED
    void = said.Void(0, said.digest(message.commit), "because", forsworn=False)
    rounds.handle(Received(first, void), 2.0)
    assert phase(rounds) is Phase.IDLE

    assert joined(rounds, 9.0) != first


def test_an_unexpected_closing_moves_no_due_time() -> None:
    rounds = machine()
    rounds.handle(Progressed(20, 1.0), 1.0)

    for number in range(5):
        rounds.handle(Received(ANNA, said.Closed(0, number, bytes(32))), 2.0)

    assert rounds.pace.due_time.due_step == 24 and rounds.counters["stale_answer"] == 5


def test_an_answer_to_an_older_join_is_ignored_and_counted() -> None:
    rounds = machine(reachable=False)
    leader = joined(rounds)

    rounds.handle(Received(leader, said.Refused(0, 99, "no")), 2.0)

    assert phase(rounds) is Phase.JOINING
    assert rounds.counters["stale_answer"] == 1


def test_a_called_peer_with_too_few_steps_passes() -> None:
    rounds = machine()
    rounds.handle(Progressed(2, 1.0), 1.0)

    effects = rounds.handle(Received(ANNA, said.Call(0, standing("start").head(), 10.0)), 2.0)

    assert sent(effects, ANNA) == [said.Pass(0, "not enough steps")]


def test_a_called_peer_whose_line_carries_no_more_passes_until_its_turn() -> None:
    """24 fragments of 1 MiB take 50 s of a cycle of 24 s: it is in one version of 3."""
    rounds = machine(reachable=False)
    rounds.handle(Progressed(1, 1.0), 0.0)
    first, _ = ranked((ANNA, BORIS), standing("start").head())
    call = Received(first, said.Call(0, standing("start").head(), 10.0))

    noted = of(rounds.handle(LineMeasured(0.5e6), 0.0), Note)
    rounds.pace.due_time.took_part(0, 1)
    rounds.handle(Progressed(60, 1.0, waits=True), 60.0)

    assert [note.fields["every"] for note in noted if isinstance(note, Note)] == [3]
    assert sent(rounds.handle(call, 60.0), first) == [
        said.Pass(0, "my line carries one version of 3")
    ]
    assert not rounds.handle(Due(), 60.0)
    rounds.handle(Progressed(73, 1.0, waits=True), 73.0)
    assert of(rounds.handle(call, 73.0), TakeSnapshot), "nobody closed a roster without it"


def test_a_line_that_is_fast_again_comes_when_called() -> None:
    rounds = machine(reachable=False)
    rounds.handle(Progressed(1, 1.0), 0.0)
    first, _ = ranked((ANNA, BORIS), standing("start").head())
    rounds.handle(LineMeasured(0.5e6), 0.0)
    rounds.pace.due_time.took_part(0, 1)
    rounds.handle(Progressed(30, 1.0, waits=True), 30.0)
    rounds.handle(LineMeasured(5e6), 30.0)

    effects = rounds.handle(Received(first, said.Call(0, standing("start").head(), 10.0)), 30.0)
    assert of(effects, TakeSnapshot)


def test_a_line_that_carries_the_rounds_of_a_smaller_level_takes_part_in_all_of_them() -> None:
    """24 fragments of 1 MiB take 26 s: too much for a cycle of 24 s, not for one of 48 s."""
    smaller = Level(codec="int2", codec_down="int4", cycle_steps=48)
    rounds = machine(policy=replace(POLICY, smaller_levels=(smaller,)))
    rounds.handle(Progressed(1, 1.0), 0.0)
    rounds.handle(LineMeasured(0.95e6), 0.0)
    assert rounds.pace.every.versions == 2

    rounds.pace.take_level(1)
    rounds.handle(LineMeasured(0.96e6), 1.0)
    assert rounds.pace.every.versions == 1
    rounds.handle(LineMeasured(0.70e6), 2.0)
    assert rounds.pace.every.versions == 2
    rounds.handle(LineMeasured(0.80e6), 3.0)
    assert rounds.pace.every.versions == 2, "measurements vary: it falls with a margin"


def test_a_called_peer_with_enough_steps_comes() -> None:
    rounds = machine(reachable=False)
    rounds.handle(Progressed(12, 1.0), 1.0)
    first, second = ranked((ANNA, BORIS), standing("start").head())

    effects = rounds.handle(Received(first, said.Call(0, standing("start").head(), 10.0)), 2.0)
    assert of(effects, TakeSnapshot)
    effects = rounds.handle(Offered(offer(standing("start"), mark=12, steps=12)), 3.0)

    assert [type(m) for m in sent(effects, first)] == [Join]
    assert not sent(effects, second)


def test_a_called_peer_joins_the_leader_that_calls_whoever_ranks_first() -> None:
    """After a partition a member of one side led for the other one. Those of its own side ranked
    another peer first, passed, and waited there for a cycle."""
    rounds = machine(reachable=False)
    rounds.handle(Progressed(12, 1.0), 1.0)
    _, second = ranked((ANNA, BORIS), standing("start").head())

    effects = rounds.handle(Received(second, said.Call(0, standing("start").head(), 10.0)), 2.0)
    assert of(effects, TakeSnapshot)
    effects = rounds.handle(Offered(offer(standing("start"), mark=12, steps=12)), 3.0)

    assert [type(m) for m in sent(effects, second)] == [Join]


def test_who_led_a_round_without_work_of_its_own_follows_it_with_those_that_came_too_late() -> None:
    """They stayed a version behind until they were due, and led the others apart then."""
    start, made = standing("start"), standing("start", "next")
    rounds = leading(peers=4)
    *members, late = sorted(rounds.peers.view)
    for member in members:
        rounds.handle(asks(member, start), 1.0)
    rounds.handle(Received(late, said.Pass(0, "not enough steps")), 1.0)
    (round_id,) = rounds.rounds
    assert rounds.own_round is None, "it has no work"

    heard = said.Finished(0, round_id, certified(made, by=tuple(members)))
    effects = [e for member in members for e in rounds.handle(Received(member, heard), 2.0)]

    (told,) = sent(effects, late)
    assert isinstance(told, said.Finished) and told.head.lineage == made.lineage
    assert [each.lineage for each in of(effects, CatchUp)] == [made.lineage]


def test_a_head_of_few_links_tells_who_is_behind_or_is_asked_for_the_rest() -> None:
    names = [f"v{number}" for number in range(12)]
    whole, fork = standing(*names), standing(*names[:8], "x8", "x9", "x10", "x11")

    for version, relation in ((11, Same()), (10, TheyAreBehind()), (2, TheyAreBehind())):
        short = brief(standing(*names[: version + 1]).head())
        assert len(short.links) <= LINKS_BRIEF
        assert relate(whole.head(), whole.chain, short) == relation
    for version, seen in ((8, IAmBehind()), (7, Unclear())):
        mine = standing(*names[: version + 1])
        assert relate(mine.head(), mine.chain, brief(whole.head())) == seen
    assert relate(whole.head(), whole.chain, brief(fork.head())) == Unclear()
    assert isinstance(relate(whole.head(), whole.chain, fork.head()), Apart)


def test_who_is_shown_too_little_by_a_join_asks_and_is_told_that_it_is_behind() -> None:
    names = [f"v{number}" for number in range(12)]
    whole = standing(*names)
    leader = leading(standing(*names[:5]))
    joiner, other = sorted(leader.peers.view)
    plain = msgspec.structs.replace(join(whole), head=brief(certified(whole, (joiner, other))))

    asked, refused = sent(
        leader.handle(Received(joiner, signed(joiner, plain, leader=ME)), 1.0), joiner
    )
    assert isinstance(asked, said.Compare) and asked.head.links[-1].version == 0
    assert isinstance(refused, said.Refused) and refused.another_leads

    (answer,) = sent(machine(whole).handle(Received(ANNA, asked), 1.1), ANNA)
    assert isinstance(answer, said.Behind) and answer.head.links[-1].version == 0


@pytest.mark.parametrize("was_away", [False, True])
def test_joins_show_few_links_unless_others_may_stand_elsewhere(was_away: bool) -> None:
    rounds = machine(standing(*(f"v{number}" for number in range(12))), reachable=False)
    if was_away:
        rounds.peers.mark_failed(ANNA, -60.0)
        seen_again(rounds, ANNA, at=0.5)
        rounds.handle(Progressed(1, 1.0), 0.5)
    assert rounds.standing is not None
    rounds.handle(Due(), 1.0)
    effects = rounds.handle(Offered(offer(rounds.standing)), 1.0)
    (message,) = [m for m in sent(effects) if isinstance(m, Join)]
    assert len(message.head.links) == (12 if was_away else LINKS_BRIEF)


def test_nothing_that_a_stranger_says_counts() -> None:
    eve, ahead = PeerId("eve"), standing("start", "one")
    rounds = machine()
    claims: list[Message] = [
        said.Call(0, ahead.head(), 10.0),
        said.Compare(0, ahead.head()),
        behind(ahead),
        said.Finished(0, bytes(32), ahead.head()),
        said.Ask(0, bytes(32)),
        said.Prepare(0, bytes(32), 1),
    ]

    for claim in claims:
        assert not rounds.handle(Received(eve, claim), 1.0)

    assert rounds.counters["stranger"] == len(claims)
    assert phase(rounds) is Phase.IDLE
    effects = rounds.handle(asks(eve, standing("start")), 1.0)
    assert [type(answer) for answer in sent(effects, eve)] == [said.Refused]
    assert rounds.open_roster is None


def test_no_identity_ranks_first_on_every_lineage() -> None:
    """An identity is made before the lineages of a run are known."""
    names = tuple(PeerId(f"peer {number}") for number in range(5))
    lineages = [standing("start", str(number)).head() for number in range(200)]

    led = Counter(ranked(names, head)[0] for head in lineages)

    assert max(led.values()) < 80 and min(led.values()) > 10


def test_a_peer_that_leaves_begins_nothing_new() -> None:
    rounds = machine()
    joined(rounds)

    effects = rounds.handle(Leave(), 2.0)

    assert of(effects, GiveUp)
    assert not rounds.handle(Due(), 3.0)
    assert phase(rounds) is Phase.IDLE


def test_work_of_many_versions_is_offered_while_it_is_not_old_in_time() -> None:
    """A peer at 1 Mbit/s lost all of its work while the others made eight versions."""
    where = standing(*(f"v{i}" for i in range(12)))
    rounds = machine(where, reachable=False)
    rounds.fresh_version = 0
    rounds.fresh_at = 1.0 - POLICY.stale_s
    rounds.handle(Due(), 1.0)

    (join,) = sent(rounds.handle(Offered(offer(where)), 1.0))

    assert isinstance(join, Join) and join.staleness == where.version > POLICY.stale_max


def test_old_work_is_discarded_with_its_age() -> None:
    where = standing(*(f"v{i}" for i in range(12)))
    rounds = machine(where)
    rounds.fresh_version = where.version - POLICY.stale_max
    rounds.fresh_at = 0.9 - POLICY.stale_s
    rounds.handle(Due(), 1.0)
    assert not of(rounds.handle(Offered(offer(where)), 1.0), Discard), (
        "eight versions are not too old"
    )

    rounds = machine(where)
    rounds.fresh_version = where.version - POLICY.stale_max - 1
    rounds.fresh_at = 0.9 - POLICY.stale_s
    rounds.handle(Due(), 1.0)
    (discard,) = of(rounds.handle(Offered(offer(where)), 1.0), Discard)
    assert discard == Discard("stale: began 9 versions ago")


def test_a_founder_alone_folds() -> None:
    rounds = machine(others=(), founder=True)
    rounds.handle(Due(), 1.0)

    (fold,) = of(rounds.handle(Offered(offer(standing("start"))), 2.0), Fold)
    assert isinstance(fold, Fold)
    assert fold.standing.version == 1 and fold.standing.merged.tokens == 2400
    rounds.handle(Folded(), 3.0)

    assert rounds.standing == fold.standing


def test_a_peer_that_is_about_to_leave_folds_at_once_but_only_alone() -> None:
    rounds = machine(others=())
    assert not of(rounds.handle(Due(), 1.0), TakeSnapshot), "others may be back soon"
    rounds.handle(MergeBeforeLeaving(), 2.0)
    assert of(rounds.handle(Due(), 2.0), TakeSnapshot)
    assert of(rounds.handle(Offered(offer(standing("start"))), 2.0), Fold)

    rounds = machine()
    rounds.handle(MergeBeforeLeaving(), 1.0)
    rounds.handle(Due(), 1.0)
    assert not of(rounds.handle(Offered(offer(standing("start"))), 1.0), Fold)


def test_a_peer_that_leaves_last_does_not_wait_for_a_quorum_of_those_that_have_left() -> None:
    rounds = leading()
    rounds.handle(MergeBeforeLeaving(), 1.0)
    rounds.handle(Due(), 1.0)
    rounds.handle(Offered(offer(standing("start"))), 1.0)
    assert "no_quorum" not in noted(rounds.handle(Tick(), 1.0 + POLICY.resend_s))
    rounds.peers.view = {}
    assert "no_quorum" in noted(rounds.handle(Tick(), 1.0 + 2 * POLICY.resend_s))
    rounds.handle(Due(), 5.0)
    assert of(rounds.handle(Offered(offer(standing("start"))), 5.0), Fold)


def test_a_leader_that_leaves_and_has_no_work_sends_who_joins_it_elsewhere() -> None:
    """Who left beside it waited for its roster until it was gone, and left with pending work."""
    rounds = leading()
    joiner = min(rounds.peers.view)
    rounds.handle(MergeBeforeLeaving(), 1.0)
    rounds.handle(asks(joiner, standing("start")), 1.0)
    assert rounds.open_roster is not None

    answers = sent(rounds.handle(Tick(), 1.0 + POLICY.resend_s), joiner)

    assert said.Refused(0, 1, "leaving", another_leads=True) in answers
    assert rounds.open_roster is None


def noted(effects: list[Any]) -> list[str]:
    return [effect.event for effect in effects if isinstance(effect, Note)]


def reasons_of(effects: list[Any], event: str) -> list[Any]:
    notes = (effect for effect in effects if isinstance(effect, Note) and effect.event == event)
    return [note.fields["reason"] for note in notes]


@pytest.mark.parametrize("told", ["behind", "closed"])
def test_a_peer_that_is_about_to_leave_does_not_fold_where_it_lacks_a_version(told: str) -> None:
    """The others made it and left before it came here: a version of its own would be a fork."""
    rounds = machine(reachable=False)
    if told == "behind":
        rounds.handle(Received(ANNA, behind(standing("start", "next"))), 1.0)
        rounds.handle(CaughtUp(None), 2.0)
    else:
        rounds.handle(Received(joined(rounds), said.Closed(0, 1, bytes(32))), 2.0)
    rounds.peers.view = {}
    rounds.handle(MergeBeforeLeaving(), 3.0)
    effects = rounds.handle(Due(), 3.0)
    assert not of(effects, TakeSnapshot)
    assert noted(effects) == ["lacks_version"]


def test_a_peer_that_stays_after_all_still_answers_every_call_of_an_ending_run() -> None:
    rounds = machine()
    for given in (MergeBeforeLeaving(), MergeBeforeLeaving(leaves=False)):
        rounds.handle(given, 1.0)
        assert rounds.pace.due_time.eager is given.leaves
    rounds.handle(EndIsNear(), 2.0)
    for given in (MergeBeforeLeaving(), MergeBeforeLeaving(leaves=False)):
        rounds.handle(given, 3.0)
        assert rounds.pace.due_time.eager


def founded_by(name: str, tokens: int) -> Standing:
    """A peer's standing on a founding that shares nothing with others."""
    root, tip = (blake3.blake3(f"{name} {at}".encode()).digest() for at in (0, 1))
    chain = Chain([Link(0, root, 0), Link(1, tip, tokens)])
    return Standing(1, tip, chain, MergedMap())


@pytest.mark.parametrize(("mine", "theirs"), [(100, 100_000), (1000, 1001), (100_000, 100)])
def test_histories_that_were_founded_apart_are_neither_mixed_nor_left_by_one_fragment(
    mine: int, theirs: int
) -> None:
    own, other = founded_by("me", mine), founded_by("anna", theirs)
    relation = relate(own.head(), own.chain, other.head())
    assert isinstance(relation, Apart) and relation.founded_apart
    assert not meets(relation, own.head(), other.head())

    for message in (asks(ANNA, other), Received(ANNA, said.Compare(0, other.head()))):
        effects = machine(own).handle(message, 1.0)
        assert {"peer": ANNA, "mine": mine, "theirs": theirs} in [
            note.fields for note in of(effects, Note) if note.event == "founded_apart"
        ]
        assert not of(effects, CatchUp)
        answers = sent(effects, ANNA)
        # The lighter side does not answer a comparison, or two would compare for ever.
        assert any(isinstance(each, said.Compare) for each in answers) == (mine > theirs)


def test_chains_that_begin_later_than_a_founding_prove_nothing() -> None:
    own, other = founded_by("me", 10), founded_by("anna", 10)
    cut = Head(other.version, other.lineage, other.head().links[:1])
    assert relate(own.head(), own.chain, cut) == Unclear()


# Leading


def test_another_run_is_refused_with_both_names() -> None:
    rounds = machine()

    (answer,) = sent(rounds.handle(asks(ANNA, standing("start"), topic=bytes(16)), 1.0))

    assert isinstance(answer, said.Refused)
    assert TOPIC.hex() in answer.reason and bytes(16).hex() in answer.reason


def test_a_joiner_that_is_behind_is_told_so_by_any_peer() -> None:
    rounds = machine(standing("start", "one"))

    (answer,) = sent(rounds.handle(asks(ANNA, standing("start")), 1.0), ANNA)

    assert isinstance(answer, said.Behind)
    assert answer.head.version == 1


def test_a_peer_told_that_it_is_behind_catches_up_even_if_it_sees_several_groups() -> None:
    """The peer could take part as it is there, but the leader that tells it sees one group."""
    ahead, others = standing("start", "one"), tuple(PeerId(f"p{n}") for n in range(5))
    rounds = machine(standing("start"), others, replace(POLICY, group_size=4))
    head = certified(ahead, others)

    shown = rounds.handle(Received(others[0], said.Compare(0, head)), 1.0)
    assert not of(shown, CatchUp)
    told = said.Behind(0, head, standing("start").lineage)
    assert of(rounds.handle(Received(others[0], told), 1.0), CatchUp)


def shown_a_version(number: int, attempts: int) -> FragmentRounds:
    """A machine among several groups that was shown a certified version, after failed attempts."""
    others = tuple(PeerId(f"p{n}") for n in range(5))
    rounds = machine(standing("start"), others, replace(POLICY, group_size=4))
    shown = replace(standing("start", "one"), version=number)
    rounds.handle(Received(others[0], said.Compare(0, certified(shown, others))), 1.0)
    if phase(rounds) is Phase.CATCHING:
        rounds.handle(CaughtUp(None), 1.0)  # it is not to be had
    for _ in range(attempts):
        rounds.handle(Due(), 1.0)
        rounds.handle(Offered(None), 1.0)
    return rounds


def test_a_peer_that_finds_no_group_is_dealt_by_the_version_that_others_show() -> None:
    assert shown_a_version(1, ATTEMPTS_IN_VAIN - 1).peers.epoch(0, 2.0) == 0
    assert shown_a_version(1, ATTEMPTS_IN_VAIN).peers.epoch(0, 2.0) == 1


def test_an_invented_version_does_not_keep_a_peer_from_its_group_for_good() -> None:
    """Two colluders certify any number among several groups."""
    rounds = shown_a_version(10**6, ATTEMPTS_IN_VAIN)
    assert rounds.peers.epoch(0, 2.0) == MELD_LAG
    later = 2 + POLICY.stale_max
    assert rounds.peers.epoch(later, 2.0) == later


def test_a_peer_that_hears_of_a_longer_chain_catches_up() -> None:
    rounds = machine()
    ahead = standing("start", "one")

    effects = rounds.handle(Received(BORIS, behind(ahead)), 1.0)

    assert of(effects, CatchUp) == [CatchUp(BORIS, 1, ahead.lineage)]
    assert phase(rounds) is Phase.CATCHING
    rounds.handle(CaughtUp(ahead), 2.0)
    assert rounds.standing == ahead and phase(rounds) is Phase.IDLE


def test_a_peer_that_caught_up_or_failed_to_shows_its_source_where_it_stands() -> None:
    """The source may have gone on meanwhile, or have a version that nobody can fetch."""
    rounds = machine()
    ahead, further = standing("start", "one"), standing("start", "one", "two")
    rounds.handle(Received(BORIS, behind(ahead)), 1.0)

    (asked,) = sent(rounds.handle(CaughtUp(ahead), 60.0), BORIS)

    assert isinstance(asked, said.Compare) and asked.head.lineage == ahead.lineage
    effects = rounds.handle(Received(BORIS, behind(further)), 60.1)
    (again,) = of(effects, CatchUp)
    assert isinstance(again, CatchUp) and again.version == 2

    (told,) = sent(rounds.handle(CaughtUp(None), 61.0), BORIS)
    assert isinstance(told, said.Compare) and told.head.lineage == ahead.lineage, "it stays here"
    answer = rounds.handle(Received(BORIS, behind(further, found="one")), 61.1)
    assert not sent(answer) and not of(answer, CatchUp), (
        "and the two do not go on telling each other"
    )


def test_a_failed_catch_up_leaves_everything_as_it_was_and_has_a_deadline() -> None:
    rounds = machine()
    rounds.handle(LineMeasured(1e6), 0.0)
    rounds.handle(Received(BORIS, behind(standing("start", "one"))), 1.0)
    assert rounds.deadline == 1.0 + POLICY.catch_up_s

    effects = rounds.handle(Tick(), 1.0 + POLICY.catch_up_s)

    assert phase(rounds) is Phase.IDLE and rounds.standing == standing("start")
    assert reasons_of(effects, "catch_up_failed") == [f"not done within {POLICY.catch_up_s:g} s"]


def test_on_a_slow_line_a_catch_up_may_take_as_long_as_the_states_of_all_fragments() -> None:
    rounds = machine()
    rounds.handle(LineMeasured(125e3), 0.0)
    rounds.handle(Received(BORIS, behind(standing("start", "one"))), 1.0)

    states_s = POLICY.due.fragments * 2 * (1 << 20) / 125e3
    assert states_s > POLICY.catch_up_s / 2
    assert rounds.deadline == pytest.approx(1.0 + 4 * states_s)


def test_a_catch_up_that_failed_is_told_of_once_and_with_its_reason() -> None:
    """A second event without a reason stood beside it, which people read as "unknown"."""
    rounds = machine()
    rounds.handle(Received(BORIS, behind(standing("start", "one"))), 1.0)

    effects = rounds.handle(CaughtUp(None, reason="the source broke off"), 2.0)
    assert reasons_of(effects, "catch_up_failed") == ["the source broke off"]
    late = rounds.handle(CaughtUp(None, reason="the source broke off"), 3.0)
    assert reasons_of(late, "catch_up_failed") == []


def test_a_source_that_did_not_deliver_is_not_asked_again_at_once() -> None:
    rounds = machine()
    ahead = standing("start", "one")
    rounds.handle(Received(ANNA, behind(ahead)), 1.0)
    rounds.handle(CaughtUp(None), 2.0)

    assert not of(rounds.handle(Received(ANNA, behind(ahead)), 3.0), CatchUp)
    assert of(rounds.handle(Received(BORIS, behind(ahead)), 3.0), CatchUp)
    rounds.handle(CaughtUp(None), 4.0)
    assert of(rounds.handle(Received(ANNA, behind(ahead)), 60.0), CatchUp)


def test_the_light_side_rebases_and_the_heavy_one_tells_it_to() -> None:
    heavy = standing("start", *(f"h{i}" for i in range(8)))
    light = standing("start", "l0")

    rounds = machine(light)
    (rebase,) = of(rounds.handle(Received(ANNA, said.Compare(0, certified(heavy))), 1.0), Rebase)
    assert isinstance(rebase, Rebase) and rebase.source == ANNA

    (answer,) = sent(machine(heavy).handle(asks(ANNA, light), 1.0), ANNA)
    assert answer == said.Compare(0, certified(heavy, by=(ME,)))


def test_a_peer_of_one_of_several_groups_leaves_its_work_to_its_side_when_it_rebases() -> None:
    """A partition may have left one group, and a peer in it may be in a meld before it rebases."""
    light, heavy = standing("start", "mine", tokens=10), standing("start", "theirs", tokens=1000)

    def rebases(rounds: FragmentRounds) -> bool:
        effects = rounds.handle(Received(ANNA, said.Compare(0, certified(heavy))), 2.0)
        (rebase,) = of(effects, Rebase)
        assert isinstance(rebase, Rebase)
        return rebase.others_follow

    assert not rebases(machine(light))
    once_dealt = machine(light)
    once_dealt.certificates.among_groups_at = 1
    assert rebases(once_dealt)


def test_a_roster_of_all_peers_is_committed_signed_and_entered() -> None:
    rounds = leading()
    others = sorted(rounds.peers.view)
    joined_me = joined_as_leader(rounds)
    assert joined_me
    for peer in others:
        effects = rounds.handle(asks(peer, standing("start")), 2.0)

    (enter,) = of(effects, Enter)
    assert isinstance(enter, Enter)
    assert {entry.peer for entry in enter.commit.members} == {ME, *others}
    assert enter.commit.members[0].peer == ME, "the leader is first in succession"
    committed = [m for m in sent(effects) if isinstance(m, said.Committed)]
    assert len(committed) == 2
    assert sign(ME, committed[0].commit) == committed[0].signature
    assert len(of(effects, Upload)) == len(enter.commit.reducers)


def test_those_that_came_too_late_are_forgotten_with_a_round_that_comes_to_nothing() -> None:
    rounds = leading()
    present, absent = sorted(rounds.peers.view)
    assert joined_as_leader(rounds)
    rounds.handle(asks(present, standing("start")), 2.0)
    now = 2.0
    while rounds.own_round is None and now < 100.0:
        now = max(now + 1e-3, rounds.deadline or 0.0)
        rounds.handle(Tick(), now)
    rounds.handle(asks(absent, standing("start")), now)
    assert absent in rounds.leading._late

    while rounds.rounds and now < 3600.0:
        now = max(now + 1e-3, rounds.deadline or 0.0)
        rounds.handle(Tick(), now)
    assert not rounds.rounds and absent not in rounds.leading._late


def joined_as_leader(rounds: FragmentRounds) -> bool:
    rounds.handle(Due(), 1.0)
    rounds.handle(Offered(offer(standing("start"))), 1.0)
    return rounds.open_roster is not None and ME in rounds.open_roster.joins


def leading_at(*standings: Standing) -> FragmentRounds:
    """First in rank among its peers at each of these standings."""
    for count in range(1, 2000):
        others = (PeerId(f"a{count}"), PeerId(f"b{count}"))
        if all(ranked((ME, *others), where.head())[0] == ME for where in standings):
            return machine(None, others)
    raise AssertionError("no names found")


def test_a_leader_behind_its_joiner_sends_it_on_and_catches_up() -> None:
    rounds = leading_at(standing("start"), standing("start", "one"))
    first, second = sorted(rounds.peers.view)
    ahead = standing("start", "one")
    head = certified(ahead, (first, second))

    effects = rounds.handle(asks(first, ahead, head=head), 1.0)

    (catch_up,) = of(effects, CatchUp)
    assert isinstance(catch_up, CatchUp) and catch_up.source == first
    (refused,) = sent(effects, first)
    assert isinstance(refused, said.Refused) and refused.another_leads

    (refused,) = sent(rounds.handle(asks(second, standing("start")), 1.5), second)
    assert isinstance(refused, said.Refused) and refused.another_leads, "it leads nobody meanwhile"
    assert rounds.open_roster is None

    rounds.handle(CaughtUp(ahead), 2.0)
    assert [type(m) for m in sent(rounds.handle(asks(first, ahead, head=head), 2.5), first)] == [
        said.Noted
    ]


def test_a_leader_that_cannot_follow_its_joiner_shows_it_where_it_stands_and_leads_on() -> None:
    """The version that a join claims may be a lie. It is no reason to refuse other joins."""
    rounds = leading_at(standing("start"), standing("start", "one"))
    first, second = sorted(rounds.peers.view)

    shown, refused = sent(rounds.handle(asks(first, standing("start", "one")), 1.0), first)
    assert isinstance(shown, said.Compare), "the version that it stands on"
    assert isinstance(refused, said.Refused) and refused.another_leads

    rounds.handle(asks(second, standing("start")), 2.5)
    assert rounds.open_roster is not None
    assert first not in rounds.open_roster.joins


def test_those_that_passed_are_called_again_when_one_of_them_comes_all_the_same() -> None:
    rounds = leading()
    assert rounds.standing is not None
    where = rounds.standing
    first, second = sorted(rounds.peers.view)
    assert joined_as_leader(rounds)
    for peer in (first, second):
        rounds.handle(Received(peer, said.Pass(0, "my line carries one version of 2")), 2.0)

    effects = rounds.handle(asks(first, where), 3.0)
    assert [type(message) for message in sent(effects, second)] == [said.Call]
    assert not of(effects, Enter)

    effects = rounds.handle(asks(second, where), 4.0)
    (entered,) = of(effects, Enter)
    assert isinstance(entered, Enter) and len(entered.commit.members) == 3


def test_a_peer_that_passes_once_more_is_not_waited_for() -> None:
    rounds = leading()
    assert rounds.standing is not None
    where = rounds.standing
    first, second = sorted(rounds.peers.view)
    assert joined_as_leader(rounds)
    no = said.Pass(0, "my line carries one version of 2")
    for peer in (first, second):
        rounds.handle(Received(peer, no), 2.0)
    rounds.handle(asks(first, where), 3.0)

    (entered,) = of(rounds.handle(Received(second, no), 3.1), Enter)
    assert isinstance(entered, Enter) and len(entered.commit.members) == 2


def test_without_a_quorum_all_joiners_are_told_and_keep_their_work() -> None:
    rounds = leading()
    joined_as_leader(rounds)
    assert isinstance(rounds.peers.view, dict)
    for peer, seen in list(rounds.peers.view.items()):
        rounds.peers.view[peer] = msgspec.structs.replace(
            seen, heard_at=20.0
        )  # alive, and silent to the call

    effects = rounds.handle(Tick(), 1.0 + POLICY.quorum.wait_s)

    assert [e.reason for e in of(effects, GiveUp) if isinstance(e, GiveUp)] == [
        "no quorum of 2 within 30 s: 1 of 3 live peers joined"
    ]
    assert rounds.open_roster is None and phase(rounds) is Phase.IDLE


def test_a_member_that_only_dials_out_comes_last_and_reduces_nothing() -> None:
    joins = [
        (PeerId(name), join(standing("start"), reachable=name != "dialler", bytes_per_s=speed))
        for name, speed in (("anna", 1e6), ("dialler", 9e6), ("boris", 3e6))
    ]
    leader = Leader(peer=ANNA, incarnation=1, topic=TOPIC, fragment=0, nonce=1)

    commit = compose(leader, joins, POLICY, encoded_bytes=lambda codec: 10 << 20)

    assert [entry.peer for entry in commit.members] == ["anna", "boris", "dialler"]
    assert sorted(commit.reducers) == ["anna", "boris"]
    assert dict(zip(commit.reducers, commit.shares, strict=True)) == {"anna": 100, "boris": 300}


def test_a_member_on_a_slow_line_reduces_nothing() -> None:
    joins = [
        (PeerId(name), join(standing("start"), bytes_per_s=speed))
        for name, speed in (("anna", 6e6), ("boris", 4e6), ("clara", 0.9e6), ("new", 0.0))
    ]
    leader = Leader(peer=PeerId("clara"), incarnation=1, topic=TOPIC, fragment=0, nonce=1)

    commit = compose(leader, joins, POLICY, encoded_bytes=lambda codec: 10 << 20)

    assert len(commit.members) == 4
    assert sorted(commit.reducers) == ["anna", "boris", "new"]


def test_a_codec_that_a_member_lacks_is_not_used() -> None:
    joins = [
        (ANNA, join(standing("start"))),
        (BORIS, join(standing("start"), codecs=("f32",))),
    ]
    leader = Leader(peer=ANNA, incarnation=1, topic=TOPIC, fragment=0, nonce=1)

    commit = compose(leader, joins, POLICY, encoded_bytes=lambda codec: 100)

    assert (POLICY.codec, commit.codec, commit.codec_down) == ("int4", "f32", None)


@pytest.mark.parametrize(
    ("known", "used"),
    [
        (("f32", "int4", "int2"), ("int2", "int4")),
        (("f32", "int4"), (None, None)),
        (("f32", "int2"), (None, None)),
    ],
)
def test_both_codecs_of_the_run_are_used_or_none(
    known: tuple[str, ...], used: tuple[str | None, str | None]
) -> None:
    leader = Leader(peer=ANNA, incarnation=1, topic=TOPIC, fragment=0, nonce=1)
    joins = [
        (ANNA, join(standing("start"), codecs=known)),
        (BORIS, join(standing("start"), codecs=known)),
    ]
    policy = replace(POLICY, codec="int2", codec_down="int4")

    commit = compose(leader, joins, policy, encoded_bytes=lambda codec: 100)

    assert (commit.codec, commit.codec_down) == (used[0] or "f32", used[1])
    assert recomposed(commit, policy, encoded_bytes=lambda codec: 100) == commit
    assert len(commit.reducers) == 1, "a hundred bytes are not cut"


def test_two_lineages_make_a_meld_in_which_both_bring_their_state() -> None:
    one, two = standing("start", "a"), standing("start", "b", tokens=300)
    leader = Leader(peer=ANNA, incarnation=1, topic=TOPIC, fragment=0, nonce=1)

    commit = compose(
        leader, [(ANNA, join(one)), (BORIS, join(two))], POLICY, encoded_bytes=lambda codec: 100
    )

    assert commit.kind == "meld" and commit.codec == "int4/f32"
    assert [parent.lineage for parent in commit.parents] == [two.lineage, one.lineage]
    assert {entry.peer: entry.parent for entry in commit.members} == {BORIS: 0, ANNA: 1}
    assert said.decode_commit(said.encode_commit(commit)) == commit


# The commit at a member


def waiting(policy: RoundPolicy = POLICY) -> tuple[FragmentRounds, PeerId]:
    rounds = machine(policy=policy)
    while rounds.pacemaker.leader(standing("start").head(), 1.0) == ME:
        rounds.pacemaker.attempt += 1
    leader = joined(rounds)
    assert leader != ME
    return rounds, leader


def end_attempt(rounds: FragmentRounds, leader: PeerId) -> list[Effect]:
    """The leader that was joined finds no quorum."""
    attempt = rounds.joining.attempt
    assert attempt is not None
    answer = said.Refused(0, attempt.join.join, "nobody came")
    return rounds.handle(Received(leader, answer), 1.0)


def test_a_commit_of_the_leader_is_entered_once() -> None:
    rounds, leader = waiting()
    message = committed(rounds, leader)

    effects = rounds.handle(Received(leader, message), 2.0)
    assert of(effects, Enter)
    assert of(effects, Upload)
    again = rounds.handle(Received(leader, message), 2.1)

    assert not of(again, Enter) and rounds.counters["repeated_commit"] == 1


def test_a_commit_that_its_leader_did_not_sign_is_counted_and_dropped() -> None:
    rounds, leader = waiting()

    effects = rounds.handle(
        Received(leader, committed(rounds, leader, signer=PeerId("mallory"))), 2.0
    )

    assert not effects or all(isinstance(e, Note) for e in effects)
    assert rounds.counters["bad_signature"] == 1 and phase(rounds) is Phase.JOINING


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"incarnation": 6}, "I have been restarted since"),
        ({"join": 99}, "I have withdrawn that join"),
        ({"mark": 1000}, f"{ME} did not sign what it says of it"),
        ({"steps": 1}, "its 'members' is not what follows from the joins and the run's settings"),
        ({"tokens": 7}, f"{ME} did not sign what it says of it"),
        ({"staleness": 5}, f"{ME} did not sign what it says of it"),
        (
            {"reachable": False},
            "its 'reducers' is not what follows from the joins and the run's settings",
        ),
    ],
)
def test_a_commit_that_misquotes_the_join_is_declined(changes: dict[str, int], reason: str) -> None:
    rounds, leader = waiting()
    commit = said.decode_commit(committed(rounds, leader).commit)
    members = tuple(
        msgspec.structs.replace(entry, **changes) if entry.peer == ME else entry
        for entry in commit.members
    )

    effects = rounds.handle(Received(leader, committed(rounds, leader, members=members)), 2.0)

    (answer,) = sent(effects, leader)
    assert isinstance(answer, said.Declined) and answer.reason == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"codec": "zip"}, "I lack its codec 'zip'"),
        ({"codec_down": "zip"}, "I lack its codec 'zip'"),
        ({"codec_down": "f32"}, "its 'codec_down' is not what follows"),
        ({"merge": "vote"}, "its 'merge' is not what follows"),
        ({"eta": 9.0}, "its 'eta' is not what follows"),
        ({"mu": 0.5}, "its 'mu' is not what follows"),
        ({"contributors_min": 1}, "its 'contributors_min' is not what follows"),
        ({"upload_s": 1e6}, "its 'upload_s' is not what follows"),
        ({"round_s": 1e7}, "its 'round_s' is not what follows"),
        ({"reducers": (ANNA, ANNA)}, "its 'reducers' is not what follows"),
        ({"reducers": (ME, PeerId("mallory"))}, "its 'reducers' is not what follows"),
        ({"reducers": (ME,), "shares": (1,)}, "its 'reducers' is not what follows"),
        ({"shares": (100, 700)}, "its 'shares' is not what follows"),
        ({"batch_tokens_max": 10**9}, "its 'batch_tokens_max' is not what follows"),
    ],
)
def test_a_commit_against_the_rules_of_the_run_or_of_another_shape_than_its_joins_is_declined(
    changes: dict[str, Any], reason: str
) -> None:
    rounds, leader = waiting()

    (answer,) = sent(
        rounds.handle(Received(leader, committed(rounds, leader, **changes)), 2.0), leader
    )

    assert isinstance(answer, said.Declined) and reason in answer.reason
    assert rounds.own_round is None


@pytest.mark.parametrize(
    "changes", [{"steps": 24 * 10**8}, {"mark": 25}, {"bytes_per_s": 9e9}, {"reachable": False}]
)
def test_a_commit_that_says_of_a_member_what_it_did_not_sign_is_declined(
    changes: dict[str, object],
) -> None:
    rounds, leader = waiting()
    commit = said.decode_commit(committed(rounds, leader).commit)
    members = [
        msgspec.structs.replace(entry, **changes) if entry.peer == leader else entry
        for entry in commit.members
    ]
    forged = recomposed(
        msgspec.structs.replace(commit, members=tuple(members)),
        POLICY,
        encoded_bytes=lambda codec: 1 << 20,
    )
    encoded = said.encode_commit(forged)
    message = said.Committed(0, encoded, sign(leader, encoded))

    (answer,) = sent(rounds.handle(Received(leader, message), 2.0), leader)

    assert isinstance(answer, said.Declined)
    assert answer.reason == f"{leader} did not sign what it says of it"


def test_a_join_to_another_leader_is_refused() -> None:
    rounds = leading()
    first, second = sorted(rounds.peers.view)
    elsewhere = signed(first, join(standing("start")), leader=second)

    effects = rounds.handle(Received(first, elsewhere), 1.0)

    (answer,) = sent(effects, first)
    assert isinstance(answer, said.Refused) and "another leader" in answer.reason
    assert rounds.open_roster is None


def test_a_roster_in_which_strangers_are_a_majority_is_declined() -> None:
    rounds, leader = waiting()
    attempt = rounds.joining.attempt
    assert attempt is not None
    strangers = [PeerId(f"sybil {number}") for number in range(2)]
    joins = [
        *((who, join(standing("start"))) for who in (leader, *strangers)),
        (ME, attempt.join),
    ]
    commit = compose(
        Leader(peer=leader, incarnation=1, topic=TOPIC, fragment=0, nonce=1),
        sorted((who, signed(who, plain, leader=leader)) for who, plain in joins),
        POLICY,
        encoded_bytes=lambda codec: 1 << 20,
    )
    encoded = said.encode_commit(commit)

    effects = rounds.handle(
        Received(leader, said.Committed(0, encoded, sign(leader, encoded))), 2.0
    )

    (answer,) = sent(effects, leader)
    assert isinstance(answer, said.Declined)
    assert answer.reason == "I know 2 of its 4 voters; a majority is 3"


def test_a_leader_whose_commit_does_not_hold_is_not_asked_next() -> None:
    """The leader ranks first for this version, and would for ever: no version comes of its
    rounds."""
    rounds, leader = waiting(replace(POLICY, batch_tokens_max=100))
    wrong = committed(rounds, leader, batch_tokens_max=101)
    rounds.handle(Received(leader, wrong), 2.0)
    assert rounds.phase is Phase.IDLE

    assert rounds.pacemaker.leader(standing("start").head(), 2.0) != leader


def test_a_commit_of_another_leader_than_the_joined_one_is_declined() -> None:
    rounds, leader = waiting()
    (other,) = {ANNA, BORIS} - {leader}

    (answer,) = sent(rounds.handle(Received(other, committed(rounds, other)), 2.0), other)

    assert isinstance(answer, said.Declined)
    assert answer.reason == "I am not promised to this leader"


def test_a_member_that_declined_as_absent_stays_out_when_the_commit_would_hold_later() -> None:
    rounds, leader = waiting()
    message = committed(rounds, leader)
    attempt = rounds.joining.attempt
    rounds.joining.attempt = None
    (answer,) = sent(rounds.handle(Received(leader, message), 2.0), leader)
    assert isinstance(answer, said.Declined) and answer.absent

    rounds.joining.attempt = attempt
    (again,) = sent(rounds.handle(Received(leader, message), 3.0), leader)

    assert isinstance(again, said.Declined) and again.reason == "I gave this round up"
    assert again.absent, "the next coordinator has to know it as well"
    assert rounds.own_round is None


def test_a_member_that_declined_tells_a_later_coordinator_that_it_never_was_in_the_round() -> None:
    """Eleven of ninety peers waited for a majority that could not come, until the end of a run."""
    rounds, leader = waiting()
    message = committed(rounds, leader)
    rounds.joining.attempt = None
    rounds.handle(Received(leader, message), 2.0)
    round_id = said.digest(message.commit)
    (other,) = {ANNA, BORIS} - {leader}

    (answer,) = sent(rounds.handle(Received(other, said.Prepare(0, round_id, 2)), 3.0), other)

    assert isinstance(answer, said.Declined) and answer.absent


def test_a_restarted_agent_does_not_say_that_it_was_absent_where_it_may_have_voted() -> None:
    """The agent's incarnation is that of the learner, which goes on: a voter of a chosen seal
    counted as absent from the start, and a later coordinator could end the round as void.
    """
    before, leader = waiting()
    message = committed(before, leader)
    round_id = said.digest(message.commit)
    before.handle(Received(leader, message), 2.0)
    vote = said.Propose(0, round_id, 0, (0, 1), sign(leader, said.vote(round_id, 0, (0, 1))))
    (accepted,) = sent(before.handle(Received(leader, vote), 2.5), leader)
    assert isinstance(accepted, said.Accepted)

    numbered = replace(identity(ME), first_number=10**9)
    rounds = FragmentRounds(numbered, view=before.peers.view, standing=standing("start"), now=3.0)
    other = joined(rounds, 3.0)
    (answer,) = sent(rounds.handle(Received(leader, message), 3.0), leader)
    assert isinstance(answer, said.Declined) and not answer.absent
    end_attempt(rounds, other)
    (again,) = sent(rounds.handle(Received(leader, said.Prepare(0, round_id, 2)), 4.0), leader)
    assert isinstance(again, said.Declined) and not again.absent


def test_of_a_roster_that_it_has_not_seen_a_peer_does_not_say_that_it_was_absent() -> None:
    rounds = machine()
    (answer,) = sent(rounds.handle(Received(ANNA, said.Prepare(0, bytes(32), 2)), 3.0), ANNA)
    assert isinstance(answer, said.Declined) and not answer.absent


@pytest.mark.parametrize(
    "early",
    [
        lambda name: said.Reassign(0, name, 0, 0, ANNA),
        lambda name: said.Ask(0, name),
        lambda name: said.Prepare(0, name, 1),
        lambda name: said.Propose(0, name, 1, (), bytes(64)),
        lambda name: said.Forswear(0, name, 1),
    ],
)
def test_nothing_said_of_a_round_before_its_commit_keeps_a_member_out(
    early: Callable[[bytes], said.Message],
) -> None:
    """The member took it for a round which it had given up: one that had the commit first could
    keep it out of every round."""
    rounds, leader = waiting()
    message = committed(rounds, leader)
    told = early(said.digest(message.commit))
    (other,) = {ANNA, BORIS} - {leader}
    sender = leader if isinstance(told, said.Reassign) else other

    assert not sent(rounds.handle(Received(sender, told), 1.9), sender)
    rounds.handle(Received(leader, message), 2.0)

    assert rounds.own_round is not None and rounds.own_round.is_open


def test_what_is_said_again_of_a_round_that_never_came_is_answered_after_all() -> None:
    rounds, leader = waiting()
    asked = Received(BORIS, said.Ask(0, bytes(32)))
    assert not sent(rounds.handle(asked, 1.9), BORIS)
    end_attempt(rounds, leader)
    (vow,) = sent(rounds.handle(asked, 5.0), BORIS)
    assert isinstance(vow, said.Forsworn)


@pytest.mark.parametrize(("number", "incarnation", "gone"), [(1, 3, 2), (2, 3, 0), (1, 4, 0)])
def test_only_the_join_in_the_roster_can_be_withdrawn_from_it(
    number: int, incarnation: int, gone: int
) -> None:
    """Another incarnation may have voted, and another join of the same one is not in the roster."""
    rounds = leading()
    others = sorted(rounds.peers.view)
    joined_as_leader(rounds)
    for peer in others:
        rounds.handle(asks(peer, standing("start"), 1), 2.0)
    (part,) = rounds.rounds.values()
    assert part.coordinator is not None

    for peer in others:
        rounds.handle(Received(peer, said.Withdraw(0, number, incarnation)), 3.0)

    assert len(part.coordinator.absent) == gone
    assert part.is_open == (not gone)


def test_an_upload_may_bring_the_commit_but_never_a_wrong_one() -> None:
    rounds, leader = waiting()
    message = committed(rounds, leader)
    round_id = said.digest(message.commit)
    commit = said.decode_commit(message.commit)
    mine = commit.reducers.index(ME)

    def opening(**changes: object) -> Opening:
        plain = Opening(
            fragment=0,
            round=round_id,
            slice=mine,
            commit=message.commit,
            signature=message.signature,
        )
        return msgspec.structs.replace(plain, **changes)

    def refused(sender: PeerId, opened: Opening) -> str | None:
        return refusal(rounds.handle(StreamOpened(sender, opened), 2.0))

    wrong = opening(round=bytes(32))
    assert refused(leader, wrong) == "the commit is not that of the round"
    effects = rounds.handle(StreamOpened(leader, opening()), 2.0)
    assert refusal(effects) is None and of(effects, Enter)
    assert refused(PeerId("eve"), opening()) == "the sender is not in the roster"
    assert refused(leader, opening(slice=77)) == f"slice 77 of {len(commit.reducers)}"
    other = opening(slice=1 - mine)
    assert refused(leader, other) == "another peer reduces this slice"
    for riders in ((commit.index(ME) or 0,), (60_000,)):
        stolen = opening(riders=riders)
        assert refused(leader, stolen) == "it carries members of other sites"


def test_messages_of_strangers_about_a_round_are_counted_and_dropped() -> None:
    rounds, leader = waiting()
    message = committed(rounds, leader)
    rounds.handle(Received(leader, message), 2.0)
    round_id = said.digest(message.commit)

    for word in (
        said.Sealed(0, round_id, 0, (0, 1)),
        said.Void(0, round_id, "because", forsworn=False),
        said.Propose(0, round_id, 0, ()),
    ):
        rounds.handle(Received(PeerId("eve"), word), 3.0)

    assert rounds.counters["stranger"] == 3
    assert rounds.own_round is not None and rounds.own_round.is_open


def test_a_seal_without_the_votes_of_a_majority_counts_from_nobody() -> None:
    rounds, leader = waiting()
    message = committed(rounds, leader)
    rounds.handle(Received(leader, message), 2.0)
    part = rounds.own_round
    assert part is not None
    assert [entry.peer for entry in part.commit.members] == [leader, ME]

    def sealed(*voters: tuple[int, PeerId]) -> said.Sealed:
        said_by = tuple((i, sign(peer, said.vote(part.id, 0, (0, 1)))) for i, peer in voters)
        return said.Sealed(0, part.id, 0, (0, 1), said_by)

    for claim in (sealed(), sealed((0, leader)), sealed((0, leader), (1, leader))):
        rounds.handle(Received(leader, claim), 3.0)
        assert part.seal is None

    rounds.handle(Received(leader, sealed((0, leader), (1, ME))), 4.0)
    assert part.seal == (0, 1)


def test_a_ballot_counts_only_from_its_owner() -> None:
    rounds, leader = waiting()
    message = committed(rounds, leader)
    rounds.handle(Received(leader, message), 2.0)
    round_id = said.digest(message.commit)

    rounds.handle(Received(leader, said.Prepare(0, round_id, 2)), 3.0)  # ballot 2 is mine

    assert rounds.counters["stranger"] == 1
    assert rounds.own_round is not None and rounds.own_round.acceptor.promised == 0


def test_a_voter_cannot_use_up_the_ballots_of_a_round() -> None:
    """With one message of the highest ballot it was in the way until the deadline: those of its
    successors could not be read."""
    rounds, leader = waiting()
    message = committed(rounds, leader)
    rounds.handle(Received(leader, message), 2.0)
    assert rounds.own_round is not None
    highest = said.Prepare(0, said.digest(message.commit), said.COUNT_MAX)
    assert owner_of(highest.ballot, rounds.own_round.commit) == leader

    rounds.handle(Received(leader, highest), 3.0)
    begun: list[said.Prepare] = []
    while not begun and rounds.deadline is not None:
        effects = rounds.handle(Tick(), rounds.deadline)
        begun += [m for m in sent(effects, leader) if isinstance(m, said.Prepare)]

    assert begun
    assert said.decode(said.encode(begun[0])) == begun[0]


def test_the_round_ends_at_its_deadline_at_the_latest() -> None:
    rounds, leader = waiting()
    message = committed(rounds, leader)
    commit = said.decode_commit(message.commit)
    rounds.handle(Received(leader, message), 2.0)
    now = 2.0
    for _ in range(2000):
        deadline = rounds.deadline
        if deadline is None or now > 2.0 + commit.round_s:
            break
        now = max(now + 1e-3, deadline)
        rounds.handle(Tick(), now)

    assert rounds.own_round is None and phase(rounds) is Phase.IDLE
    assert rounds.doubt is None, "of two, who did not accept is in no doubt"


def test_a_question_about_an_unknown_round_is_answered_with_a_vow() -> None:
    rounds, leader = waiting()
    message = committed(rounds, leader)
    round_id = said.digest(message.commit)

    end_attempt(rounds, leader)
    (answer,) = sent(rounds.handle(Received(leader, said.Ask(0, round_id)), 2.0), leader)
    assert isinstance(answer, said.Forsworn)
    (late,) = sent(rounds.handle(Received(leader, message), 3.0), leader)

    assert isinstance(late, said.Declined) and not rounds.rounds, "the vow holds"


def test_a_vow_holds_when_the_peer_has_joined_the_same_leader_once_more() -> None:
    """It needs no memory: the roster names a join that is over."""
    rounds, leader = waiting()
    message = committed(rounds, leader)
    end_attempt(rounds, leader)
    (vow,) = sent(
        rounds.handle(Received(BORIS, said.Ask(0, said.digest(message.commit))), 2.0), BORIS
    )
    assert isinstance(vow, said.Forsworn)
    rounds.handle(Due(), 3.0)
    rounds.handle(Offered(offer(standing("start"))), 3.0)
    rounds.joining.change_leader(leader, 3.1)
    assert rounds.joining.attempt is not None and rounds.joining.attempt.leader == leader
    late = rounds.handle(Received(leader, message), 3.2)
    (declined,) = [each for each in sent(late, leader) if isinstance(each, said.Declined)]
    assert declined.reason == "I have withdrawn that join"
    assert not rounds.rounds


def test_questions_about_rounds_that_need_not_exist_make_a_peer_forget_no_round() -> None:
    """Sixty-four of them were enough. A peer that had finished a round then vowed that it had not:
    work was offered, and merged, a second time."""
    rounds = machine()
    finished, head = bytes([9]) * 32, standing("start", "v1").head()
    rounds.outcomes.finish(finished, head)
    for number in range(200):
        rounds.handle(Received(ANNA, said.Ask(0, number.to_bytes(32, "big"))), 1.5)

    (answer,) = sent(rounds.handle(Received(BORIS, said.Ask(0, finished)), 2.0), BORIS)
    assert isinstance(answer, said.Finished) and answer.head.lineage == head.lineage


def test_messages_of_strangers_take_bounded_memory() -> None:
    rounds = machine()
    for number in range(3000):
        round_id = number.to_bytes(32, "big")
        eve = PeerId(f"eve{number}")
        rounds.handle(Received(eve, said.Closed(0, 5, round_id)), 1.0)
        rounds.handle(LinkLost(eve), 1.0)

    assert len(rounds.peers.failed) <= 256
    assert len(rounds.leading._late) <= 64


@pytest.mark.parametrize("seed", range(60))
def test_no_sequence_of_messages_upsets_a_machine(seed: int) -> None:
    """Members may lie. Nothing they say may raise, or leave the machine without a deadline."""
    rng = random.Random(seed)
    rounds, leader = waiting()
    message = committed(rounds, leader)
    round_id = said.digest(message.commit)
    ahead, fork = standing("start", "one"), standing("start", "x", "y", "z")
    now = 2.0
    if seed % 3:
        rounds.handle(Received(leader, message), now)
    for _ in range(120):
        now += rng.choice([0.0, 0.1, 3.0])
        sender = rng.choice([leader, leader, ANNA, BORIS, PeerId("eve")])
        example = rng.choice(EXAMPLES)
        changes: dict[str, object] = {"fragment": 0}
        fields = example.__struct_fields__
        if "round" in fields and rng.random() < 0.8:
            changes["round"] = round_id
        if "head" in fields:
            where = rng.choice([standing("start"), ahead, fork])
            changes["head"] = where.head()
        if "topic" in fields:
            changes["topic"] = TOPIC
        if "ballot" in fields:
            changes["ballot"] = rng.choice([0, 1, 2, 3, 4, 900])
        if "slice" in fields:
            changes["slice"] = rng.choice([0, 1, 7, 65535])
        if "seal" in fields:
            changes["seal"] = rng.choice([(), (0, 1), (1, 0), (0, 0), (5,), (1,)])
        if "accepted" in fields:
            changes["accepted"] = rng.choice([(), (0, 1), (9,)])
        if "join" in fields:
            changes["join"] = rng.choice([1, 2, 3])
        if "reducer" in fields:
            changes["reducer"] = rng.choice([ME, leader, PeerId("eve")])
        changed = msgspec.structs.replace(example, **changes)
        if isinstance(changed, said.Committed):
            changed = msgspec.structs.replace(changed, commit=message.commit)
        effects = rounds.handle(Received(sender, changed), now)
        for effect in list(effects):
            if isinstance(effect, CatchUp):
                rounds.handle(CaughtUp(None), now)
            if isinstance(effect, TakeSnapshot) and rounds.standing is not None:
                rounds.handle(Offered(offer(rounds.standing)), now)
            if isinstance(effect, Upload):
                if effect.to == ME:
                    rounds.handle(UploadArrived(effect.round, effect.slice, ME, None), now)
                elif rng.random() < 0.5:
                    merged = MergedArrived(effect.round, effect.slice, bytes(32), (0, 1))
                    rounds.handle(merged, now)
            if isinstance(effect, Merge):
                rounds.handle(SliceMerged(effect.round, effect.slice, bytes(32)), now)
            if isinstance(effect, Apply):
                rounds.handle(Applied(effect.round), now)
        rounds.handle(Tick(), now)
        if rounds.phase is not Phase.IDLE:
            assert rounds.deadline is not None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 5}, "another version"),
        ({"lineage": bytes(32)}, "I stand elsewhere now"),
    ],
)
def test_a_commit_that_misquotes_the_standing_is_declined(
    changes: dict[str, object], reason: str
) -> None:
    rounds, leader = waiting()
    commit = said.decode_commit(committed(rounds, leader).commit)
    parent = msgspec.structs.replace(commit.parents[0], **changes)

    effects = rounds.handle(Received(leader, committed(rounds, leader, parents=(parent,))), 2.0)

    (answer,) = sent(effects, leader)
    assert isinstance(answer, said.Declined) and reason in answer.reason


def test_a_policy_whose_rounds_are_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="round_s"):
        replace(POLICY, round_s=30.0)


@pytest.mark.parametrize("required", [None, "all"])
def test_a_borrowed_leader_never_counts_itself_among_those_it_waits_for(
    required: Literal["all"] | None,
) -> None:
    """The leader looks for peers that have come into sight, and is none of them."""
    quorum = replace(POLICY.quorum, required=required)
    keeper = machine(policy=replace(POLICY, quorum=quorum), trains=False)
    for peer in (ANNA, BORIS):
        assert isinstance(keeper.peers.view, dict)
        keeper.peers.view[peer] = msgspec.structs.replace(keeper.peers.view[peer], reachable=False)
    where = standing("start")

    effects = keeper.handle(asks(ANNA, where, reachable=False), 0.0)
    assert keeper.open_roster is not None and not of(effects, Enter)
    keeper.handle(Tick(), keeper.open_roster.search_at)
    assert keeper.open_roster.group == (ANNA, BORIS)

    effects = keeper.handle(asks(BORIS, where, reachable=False), 5.0)
    (closed,) = [e.fields for e in of(effects, Note) if e.event == "closed"]
    assert closed["live"] == closed["members"] == 2
    assert of(effects, Enter)
