"""Storms with members that lie: the honest keep one certified history, their work, and their pace.

Fewer than a third of the members are admitted, count as anybody does, and lie in one way or in all.
They also repeat what others have said, some of it altered. Merges are audited; a peer that is
convicted has lied. Not lied about: merged slices that differ from member to member, which pass for
a round's result until somebody computes them again (``liars.forge_slices``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest

from averaging.history.state import FragmentState
from averaging.numbers import chunks
from averaging.rules.mixing import MixingPolicy
from averaging.rules.peer_view import ESTABLISHED_AFTER_S
from averaging.rules.probation import ProbationPolicy
from averaging.simulated.node import FragmentNode
from tests.averaging.simulated import false_reducers, liars, usurpers
from tests.averaging.simulated.liars import Behaviour, SwarmWithLiars
from tests.averaging.simulated.strangers import Chatterers
from tests.averaging.simulated.swarm import Node, Storm, cause_storm, weather_out
from tests.seeds import all_that_happens, seeds

SHORT = Storm(peers=(4, 7), accidents=(1, 4), rough_s=50.0, calm_s=400.0, audit_rate=0.4)
"""A partner that falls silent costs a round its deadline: the calm lasts until all have met."""
GROUPS = replace(
    SHORT,
    peers=(7, 9),
    group_size=4,
    mixing=MixingPolicy(every=1),
    probation=ProbationPolicy(rounds=6, seconds=10.0),
)
"""With probation, as in open runs: only there do strikes keep silent peers out of groups."""
QUICK, QUICK_VOTERS, SOAK, CHUNK = 40, 20, 10_000, 20
BEHAVIOURS = (*liars.BEHAVIOURS, *false_reducers.BEHAVIOURS)
OF_VOTERS = (*usurpers.BEHAVIOURS, usurpers.deny_votes, usurpers.coordinate_without_sealing)


def assert_certifiable(swarm: SwarmWithLiars) -> None:
    """The honest are enough to certify a version for each of them, once they know each other.

    A peer that is still to come back from a crash (seed 6145), or to come at all (seed 52151),
    counts a while after it has.
    """

    def lacks(node: Node) -> bool:
        honest = {other.name for other in swarm.trainers()}
        electorate = node.machine.peers.electorate(node.now())
        needed = node.machine.certificates._needed(len(electorate))
        return len(electorate & honest) < needed

    if any(map(lacks, swarm.trainers())):
        swarm.run(swarm.heap.now + 2 * ESTABLISHED_AFTER_S)
    assert not list(filter(lacks, swarm.trainers()))


def assert_the_honest_count(swarm: SwarmWithLiars) -> None:
    """None of them is out of favour with another one."""
    honest = [(node.name, node.audits) for node in swarm.trainers() if node.audits is not None]
    for name, audits in honest:
        now = swarm.nodes[name].now()
        out = [other for other, _ in honest if audits.strikes.is_out(other, now)]
        assert not out, f"{out} have too many strikes at {name}"


def besieged(
    seed: int, behaviours: Sequence[Behaviour] = BEHAVIOURS, how: Storm | None = None
) -> Counter[str]:
    """One storm with liars. Raises ``Broken``; returns what happened in it.

    The seed says in which of these ways they lie, or that they do in all of them.
    """
    how = how or (GROUPS if seed % 5 == 4 else SHORT)
    swarm: SwarmWithLiars = cause_storm(SwarmWithLiars, seed, how)
    chatter = Chatterers(swarm, seed, sorted(swarm.liars), every_s=2.0)
    chosen = seed % (len(behaviours) + 1)
    for number, behaves in enumerate(behaviours):
        if chosen in (number, len(behaviours)):
            behaves(swarm, chatter)
            swarm.truth.coverage[behaves.__name__] += 1
    weather_out(swarm, how)
    for node in swarm.trainers():
        standing = node.machine.standing
        assert standing is not None
        assert standing.lineage in swarm.truth.covered, "a version that nobody made"
    assert_the_honest_count(swarm)
    if how.group_size == SHORT.group_size:
        assert_certifiable(swarm)
    return swarm.truth.coverage


@pytest.mark.parametrize("seed", [64, 69])
def test_an_invention_that_several_show_is_taken_by_nobody_as_its_lineage_does_not_bind_it(
    seed: int,
) -> None:
    swarm: SwarmWithLiars = cause_storm(SwarmWithLiars, seed, GROUPS)
    Chatterers(swarm, seed, sorted(swarm.liars), every_s=2.0)

    def forge(node: FragmentNode, true: FragmentState) -> FragmentState:
        merged = true.merged.with_work(swarm.names[0], 1, 10**6, 500)
        return replace(true, merged=merged)

    swarm.forge_state = forge
    swarm.run(200.0)
    assert swarm.truth.coverage["finished meld"]


@pytest.mark.parametrize("seed", [159, 1584])
def test_peers_behind_a_single_honest_holder_take_part_with_what_they_have(seed: int) -> None:
    """In groups of four, one honest peer went on with two that serve forged bits. Nobody could
    fetch its state, since no second peer had the same bits; and nobody was let into a round with an
    older one, although each was a version that the leader itself had gone through."""
    besieged(seed)


def test_small_groups_whose_states_too_few_had_signed_go_on() -> None:
    besieged(689)


def test_small_groups_that_missed_each_others_closings_find_each_other() -> None:
    """Each peer dealt groups by the newest closing that it had taken part in or been called to.
    Three were two and three versions behind the others, whose joins showed them the newer one."""
    besieged(259)


def test_a_peer_told_that_it_is_behind_catches_up_though_it_sees_several_groups() -> None:
    """Peers differed in who counts. One saw several groups, and joined from the version before; the
    leader saw one, and told it for ever that it was behind."""
    besieged(1924)


def test_a_peer_that_only_dials_out_finds_a_leader_when_its_group_has_none() -> None:
    """The peer's version dealt it into a group in which nobody could be dialled any more. The
    others went on to versions with other groups, of which it heard nothing."""
    besieged(1269)


def test_an_honest_peer_alone_with_a_version_that_a_liar_has_made_with_it_goes_back() -> None:
    """The payload of that version was lost in a restart, and the liar served another state: the
    others could fetch nothing, and were too few for a quorum without it."""
    besieged(4282)


def test_an_honest_peer_alone_with_the_mix_that_a_liar_made_with_it_goes_back() -> None:
    """Two others had stayed on one version each, so no second peer had the bits of either."""
    besieged(44961)


def test_a_member_of_a_meld_offers_nothing_of_it_again_though_it_counts_few_peers() -> None:
    """The member saw one group, so it took what it had melded for work that a rebase takes back."""
    besieged(45524, (*BEHAVIOURS, *OF_VOTERS))


def test_reducers_that_keep_what_they_merge_do_not_reduce_for_ever() -> None:
    """The reducers of a round follow from its version, and no successor has the upload of the one
    that keeps the slice: each attempt at the version had one of two liars among its reducers. Its
    leader, the same in each, did not hold it against them, and an attempt took 45 s."""
    besieged(8617, how=replace(SHORT, calm_s=200.0))


@pytest.mark.parametrize("seed", [992, 5360])
def test_leaders_that_overstate_their_work_do_not_send_members_to_each_other_for_ever(
    seed: int,
) -> None:
    """Members that passed one of two such leaders over were sent back to it by the other."""
    besieged(seed)


def test_a_word_that_is_repeated_to_its_author_makes_no_round_void_for_it() -> None:
    """Seed 1224 of later ballots showed the same."""
    besieged(2414)


def test_a_slice_that_is_handed_over_while_it_is_merged_is_not_taken() -> None:
    """The slice was made falsely, and the lineage then had other bits than its digests say."""
    besieged(9476, (*BEHAVIOURS, *OF_VOTERS))


def test_a_leader_that_tells_one_member_that_its_round_is_void_has_no_work_merged_twice() -> None:
    """The leader had the others seal the round, and the member offered its work again in another
    group."""
    happened = besieged(54359, (*BEHAVIOURS, *OF_VOTERS))
    assert happened["presumed"]


def test_members_that_tell_one_of_them_that_its_round_is_void_have_no_work_merged_twice() -> None:
    """Two liars were most voters of a group, sealed the round, and met the member again in another
    group."""
    happened = besieged(91239)
    assert happened["presumed"]


def test_work_of_an_unanswered_doubt_is_not_offered_to_several_groups() -> None:
    """A partition left a member alone with its doubt. Others had finished the round, and met it in
    a swarm of several groups, in which it joined from the version before."""
    happened = besieged(56434)
    assert happened["presumed"]


@pytest.mark.parametrize("seed", [73445, 73604])
def test_an_honest_peer_that_is_restarted_before_its_round_is_audited_still_counts(
    seed: int,
) -> None:
    """Several pieces were audited at once, and it had none of them: it was out of favour."""
    besieged(seed, (*BEHAVIOURS, *OF_VOTERS))


@pytest.mark.parametrize("seed", [84, 239, 1224])
def test_a_voter_makes_no_round_void_by_a_ballot_of_its_own(seed: int) -> None:
    """In groups of four, one that was told so offered its sealed work again: it was merged twice.
    So a later coordinator's word that a round is void counts like any member's."""
    besieged(seed, usurpers.BEHAVIOURS)


def test_a_voter_that_denies_its_vote_is_convicted_by_all() -> None:
    """The voter had voted in ballot 0, whose seal was chosen, and denied it to the next
    coordinator."""
    happened = besieged(618, (usurpers.deny_votes,))
    assert happened["denied a vote"] == 1
    assert happened["convicted"] == 3


@pytest.mark.slow  # it compares the pace of 24 storms
def test_coordinators_that_never_seal_hardly_cost_versions() -> None:
    made, usual = Counter[str](), Counter[str]()
    for seed in range(0, 24, 2):
        made += besieged(seed, (usurpers.coordinate_without_sealing,))
        usual += besieged(seed, ())
    assert made["did not seal"] > 100
    assert made["closed merge"] > 0.8 * usual["closed merge"]


def test_members_that_lie_where_slices_have_several_pieces_are_convicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks, "PIECE_MIN_VALUES", 1)
    happened: Counter[str] = Counter()
    for number, behaves in enumerate(BEHAVIOURS):
        if behaves.__name__ in ("first_for_all", "forge_sources"):
            for seed in range(number, 80, len(BEHAVIOURS) + 1):
                happened += besieged(seed)
    assert happened["merged falsely"] and happened["convicted"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", seeds(QUICK, soak=SOAK, step=CHUNK))
def test_members_that_lie_cost_no_history_no_work_and_no_standstill(first: int) -> None:
    happened = all_that_happens(besieged, first=first, count=CHUNK)

    assert happened["finished merge"] > CHUNK


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", seeds(QUICK_VOTERS, soak=SOAK, step=CHUNK))
def test_voters_that_lie_in_ballots_of_their_own_cost_no_history_and_no_work(first: int) -> None:
    voters = partial(besieged, behaviours=OF_VOTERS)
    happened = all_that_happens(voters, first=first, count=CHUNK)

    assert happened["finished merge"] > CHUNK
    assert min(happened[each.__name__] for each in OF_VOTERS) > 0
