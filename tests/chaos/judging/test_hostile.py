"""What became of spoilt uploads, of strangers, and of members that lie."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from averaging.rules.reputation import LIMIT
from tests.chaos.judging.evidence import Blame, Evidence, HostileUpload, LieTold
from tests.chaos.judging.history import judge_once
from tests.chaos.judging.hostile import CONVICTED, STRIKE, STRIKES_MAX, found, kept_out
from tests.chaos.judging.lies import ACTS, LAST_ACT, PROVABLE, Act, Lie, acts, liars_of
from tests.chaos.judging.progress import judge_goes_on
from tests.chaos.stories import IDS, NAMES, evidence, peer, rounds


def blame(at_s: float, kind: str = CONVICTED, about: str = "mallory", **more: Any) -> Blame:
    return Blame(at_s=at_s, peer_id=IDS[about], kind=kind, reason="merged falsely", **more)


def beside_a_liar(lie: Lie, *blames: Blame) -> Evidence:
    """Two honest peers that hold these things against others, and one that lies from 51 s on."""
    liar = replace(peer("anna"), name="liar-0", peer_id=IDS["mallory"], hostile=True)
    told = LieTold(at_s=51.0, liar="liar-0", lie=lie)
    both = (peer(name, blames=blames) for name in NAMES)
    return evidence(*both, liar, acts=(Act(50.0, 98.0, (lie,)),), lies=(told,))


@pytest.mark.parametrize(
    ("kind", "merged", "kept", "count"),
    [("nan", True, False, 0), ("nan", False, True, 1), ("flip", True, True, 0)],
)
def test_a_merged_spoilt_upload_is_found_except_flipped_signs(
    kind: str, merged: bool, kept: bool, count: int
) -> None:
    told = list(rounds())
    if merged:
        told[5] = replace(told[5], contributors=(*told[5].contributors, IDS["mallory"]))
    both = (peer(name, rounds=tuple(told)) for name in NAMES)
    upload = HostileUpload(round="round-6", kind=kind)
    given = evidence(*both, peer("mallory", hostile=True), hostile_uploads=(upload,))
    assert (judge_once(given).kept, kept_out(given)) == (kept, count)


def test_an_honest_peer_that_is_banned_or_struck_out_is_found() -> None:
    def judged(*blames: Blame) -> tuple[bool | None, str]:
        verdict = judge_goes_on(evidence(peer("anna", blames=blames), peer("boris")))
        return verdict.kept, verdict.reason

    assert judged(blame(60.0, about="boris")) == (False, "anna banned boris: it merged falsely")
    for strikes, kept in ((2.9, True), (STRIKES_MAX, False)):
        assert judged(blame(60.0, STRIKE, "boris", strikes=strikes))[0] is kept
    faded = (blame(s, STRIKE, "boris", strikes=n) for s, n in ((60.0, 3.0), (90.0, 2.0)))
    assert judged(*faded)[0] is True
    assert STRIKES_MAX == LIMIT


def test_the_table_says_who_found_a_lie_and_what_it_cost() -> None:
    (proved,) = found(beside_a_liar(Lie.REDUCE, blame(60.0)), evidence())
    assert (proved.found_by, proved.rounds, proved.lies) == ("proof: merged falsely", 5, 1)
    assert proved.versions_per_minute == pytest.approx(30.0, rel=0.05)
    assert proved.usual_versions_per_minute == pytest.approx(30.0, rel=0.05)
    refused = blame(60.0, "join_refused"), blame(62.0, STRIKE, strikes=2.0)
    (seen,) = found(beside_a_liar(Lie.OVERSTATE, *refused), None)
    assert seen.found_by == "join_refused (2), strike (2), up to 2.0 strikes"
    assert (seen.rounds, seen.usual_versions_per_minute) == (5, None)
    (unseen,) = found(beside_a_liar(Lie.POISON), None)
    assert (unseen.found_by, unseen.rounds) == ("nothing", None)


def test_acts_follow_on_each_other_and_end_with_what_can_be_proved() -> None:
    planned = acts(10.0, 120.0)
    assert planned[0].begins_s == 10.0 and planned[-1].ends_s == pytest.approx(120.0)
    assert all(a.ends_s == b.begins_s for a, b in itertools.pairwise(planned))
    lengths = [act.ends_s - act.begins_s for act in planned]
    assert lengths[-1] == pytest.approx(LAST_ACT * lengths[0])
    assert set(ACTS[-1]) == PROVABLE
    assert not PROVABLE.intersection(lie for kinds in ACTS[:-1] for lie in kinds)
    assert [planned[-1].of(number) for number in range(4)] == [*ACTS[-1], ACTS[-1][0]]
    assert [liars_of(peers) for peers in (2, 4, 7, 14)] == [1, 2, 3, 6], "three in ten"
