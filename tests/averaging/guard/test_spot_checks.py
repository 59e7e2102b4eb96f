"""Live peers check each other's contributions: who poisons is refused, and nobody else is."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3

from averaging.guard.rules.spot_checks import REFUSED
from averaging.guard.spot_checking import Losses, OtherData, Trial
from averaging.history.claims import Claim
from averaging.history.readings import Reading
from averaging.live.slices.evidence import Evidence
from averaging.live.slices.exchange import Exchange
from averaging.messages import Suspected
from averaging.round.contributing import Contribution
from dht.identity import PeerId
from dht.memory.host import MemoryNetwork, identity_of
from dht.memory.virtual_loop import run
from tests.averaging.guard.guards import whole
from tests.averaging.live.quadratic import POLICY, Peer, QuadraticLearner, Swarm, layout_of, swarm

MALLORY = identity_of("mallory").peer_id
CHECKED = replace(POLICY, spot_checks=4.0)
NAMES = ("anna", "boris", "clara")
LAYOUT = layout_of(4)


class QuadraticJudge:
    """The ``Judge`` of a quadratic learner: its data is its target, which the swarm knows."""

    def __init__(
        self,
        made: Swarm,
        me: PeerId,
        *,
        same_data: bool = True,
        own: str = "",
        judges: bool = True,
        quick: float = math.inf,
    ) -> None:
        """``own``: of other data than the author's, if not empty. ``quick``: number of times that
        it says at once what it has read."""
        self._made = made
        self._me = me
        self._own = own
        self.same_data = same_data
        self.judges = judges
        self._quick = quick
        self.judged: list[PeerId] = []

    def _digest(self, author: PeerId, step: int) -> bytes:
        return blake3(f"{self._own}/{author}/{step}".encode()).digest()

    async def reading_of(self, step: int) -> Reading | None:
        self._quick -= 1
        if self._quick < 0:
            await asyncio.sleep(1.5 * POLICY.upload_s)  # each answer is only a little late
        return Reading({"step": step}, 1, self._digest(self._me, step))

    async def judge(self, trial: Trial) -> Losses | OtherData | None:
        if self._digest(trial.author, trial.reading.position["step"]) != trial.reading.digest:
            return OtherData()
        self.judged.append(trial.author)
        (author,) = (peer for peer in self._made.peers if peer.id == trial.author)
        assert isinstance(author.learner, QuadraticLearner)
        target = author.learner.targets[trial.fragment]
        before, after = (
            float(np.square(state - target).mean()) for state in (trial.before, trial.after)
        )
        return Losses(before, after)


async def checking(
    made: Swarm, *names: str, policy: Any = CHECKED, judged_by: Mapping[str, Any] | None = None
) -> list[Peer]:
    return [
        await made.add(
            name,
            policy=policy,
            judge=QuadraticJudge(
                made, identity_of(name).peer_id, **(judged_by or {}).get(name, {})
            ),
        )
        for name in names
    ]


def poison(monkeypatch: pytest.MonkeyPatch, *, direction: str = "reverse") -> None:
    """Mallory uploads something else than it has learned, as long as that."""
    honestly = Exchange.contribute
    rng = np.random.default_rng(5)

    def contribute(self: Exchange, given: Contribution) -> None:
        if self.parts.me == MALLORY:
            moved = given.values - given.base
            if direction == "noise":
                noise = rng.standard_normal(moved.size, dtype=np.float32)
                moved = -noise * np.float32(np.linalg.norm(moved) / np.linalg.norm(noise))
            given = replace(given, values=given.base - moved)
        honestly(self, given)

    monkeypatch.setattr(Exchange, "contribute", contribute)


def failed(peers: list[Peer]) -> list[set[PeerId]]:
    return [{fields["peer"] for fields in peer.told("spot_check_failed")} for peer in peers]


def reasons_of(peers: list[Peer]) -> set[str]:
    """The reasons why Mallory's work was left out of rounds. A peer that does not reduce knows
    none."""
    rounds = [fields for peer in peers for fields in peer.told("round")]
    return {each["left_out"][MALLORY] for each in rounds if MALLORY in each["left_out"]}


def checks_of(peers: list[Peer]) -> int:
    return sum(peer.averager.counters()["spot_checks"] for peer in peers)


WAYS = {
    "one group": CHECKED,
    "several reducers": replace(CHECKED, slice_bytes_min=16),
    "other codec down, with feedback": replace(
        CHECKED, codec="int2", codec_down="int4", feedback=frozenset({"int2"})
    ),
    "melds": replace(CHECKED, group_size=2),
    "without audits": replace(CHECKED, audit_rate=0.0),
    "centered clip": replace(CHECKED, merge="centered_clip", codec="int4"),
}


ALIKE = ("one group", "mixes", "without audits", "centered clip")
"""Ways in which a check does nothing else than in one of the others."""


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=pytest.mark.slow) if way in ALIKE else way for way in WAYS],
)
async def test_honest_peers_that_check_each_other_strike_nobody(way: str) -> None:
    async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
        peers = await checking(made, *NAMES, "dora", policy=WAYS[way])
        await made.live(30.0)
        assert checks_of(peers) >= 24
        assert failed(peers) == [set()] * 4
        assert not any(peer.averager.counters()["spot_checks_evaded"] for peer in peers)
        made.check()


@pytest.mark.parametrize("direction", ["reverse", pytest.param("noise", marks=pytest.mark.slow)])
async def test_a_poisoner_within_the_norm_bound_is_refused_by_all_that_check(
    monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    poison(monkeypatch, direction=direction)

    async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
        peers = await checking(made, *NAMES, "mallory")
        await made.live(80.0)
        # Some may never have been given anything of it to check: others refused it before.
        assert set().union(*failed(peers[:3])) == {MALLORY}
        merged = [
            fields
            for at, name, fields in peers[0].events
            if name == "round" and fields["outcome"] == "finished" and at > 45.0
        ]
        with_poison = [each for each in merged if MALLORY in each["contributors"]]
        assert len(merged) > 10 and len(with_poison) < len(merged) / 4
        assert REFUSED in reasons_of(peers[:3])
        made.check()


async def test_poison_that_moves_the_loss_nowhere_fails_the_first_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The effect of own contributions is the measure, long before anything is usual."""
    poison(monkeypatch, direction="noise")

    async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
        peers = await checking(made, *NAMES, "mallory")
        await made.live(15.0)
        assert set().union(*failed(peers[:3])) == {MALLORY}
        for peer in peers[:3]:
            spot_checks = whole(peer.averager).spot_checks
            assert spot_checks is not None
            counters, now = peer.averager.counters(), peer.averager.now()
            assert 0 < counters["own_contributions_judged"] <= counters["spot_checks"]
            assert spot_checks._checks.asks_own(0, now), "nothing is usual yet"


async def test_a_leader_that_refuses_a_peer_leaves_its_work_out_whoever_reduces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One peer alone judges. The poisoner stays a member of its rounds: it keeps its work."""
    poison(monkeypatch)

    async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
        idle = {name: {"judges": False} for name in (*NAMES[1:], "mallory")}
        one_reducer = replace(CHECKED, slice_bytes_min=1 << 20)
        peers = await checking(made, *NAMES, "mallory", policy=one_reducer, judged_by=idle)
        anna, mallory = peers[0], peers[3]

        def without_its_work() -> list[Mapping[str, Any]]:
            left_out = {each["round"] for each in anna.told("not_proposed")}
            return [each for each in mallory.told("round") if each["round"] in left_out]

        await made.until(lambda: len(without_its_work()) > 3, within_s=85.0)
        rounds = without_its_work()
        for each in rounds:
            assert each["leader"] == anna.id and each["outcome"] == "finished"
            assert MALLORY in each["members"] and MALLORY not in each["contributors"]
        assert {each["peer"] for each in anna.told("not_proposed")} == {MALLORY}
        assert REFUSED in reasons_of([anna])
        made.check()


async def test_a_peer_that_hears_of_a_suspect_checks_it_without_having_drawn_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Boris draws nobody itself, and looks at one of those that others name."""
    poison(monkeypatch)

    async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
        anna, boris, clara, *_ = peers = await checking(made, *NAMES, "mallory")
        boriss = whole(boris.averager).spot_checks
        assert boriss is not None
        checks = boriss._checks
        checks._drawn_at, checks._every_steps = 0.0, 10**6
        await made.until(lambda: bool(boris.told("spot_check_failed")), within_s=75.0)
        assert any(each.averager.counters()["peers_named"] > 0 for each in (anna, clara))
        assert {e["peer"] for e in boris.told("spot_check_failed")} == {MALLORY}
        assert checks.strikes_of(MALLORY, boris.averager.now()) > 0.0
        assert not any(checks.strikes_of(each.id, boris.averager.now()) for each in peers[:3])
        made.check()


async def test_only_an_established_peers_word_about_one_that_is_there_makes_a_peer_look() -> None:
    async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
        anna, boris, clara = await checking(made, *NAMES[:3])
        spot_checks = whole(anna.averager).spot_checks
        assert spot_checks is not None
        named = spot_checks._checks._named
        await made.live(65.0)

        spot_checks.heard_of(boris.id, Suspected(0, PeerId("invented")))
        spot_checks.heard_of(PeerId("stranger"), Suspected(0, clara.id))
        assert not named
        spot_checks.heard_of(boris.id, Suspected(0, clara.id))
        assert dict(named) == {clara.id: {boris.id}}


@pytest.mark.slow
def test_a_poisoner_cannot_hide_behind_other_data_where_the_run_fixes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison(monkeypatch)

    async def main(same_data: bool) -> list[Peer]:
        async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
            how: dict[str, Any] = {name: {"same_data": same_data} for name in NAMES}
            how["mallory"] = {"own": "none of yours"}
            peers = await checking(made, *NAMES, "mallory", judged_by=how)
            await made.live(110.0)
            assert failed(peers[:3]) == [set()] * 3
            assert made.peers[3].id == MALLORY
            assert (REFUSED in reasons_of(peers[:3])) is same_data
            return peers[:3]

    strict = [peer.told("spot_check_evaded") for peer in run(main(True))]
    assert {fields["peer"] for each in strict for fields in each} == {MALLORY}
    lenient = run(main(False))
    assert not any(peer.told("spot_check_evaded") for peer in lenient)
    assert any(peer.averager.counters()["spot_checks_of_other_data"] for peer in lenient)


async def test_a_slow_author_holds_nobody_up_and_is_struck_only_if_it_has_failed_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    poison(monkeypatch)

    async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
        how = {"clara": {"quick": 0}, "mallory": {"quick": 2}}
        peers = await checking(made, *NAMES, "mallory", judged_by=how)
        anna, boris, clara, _ = peers

        def evaded() -> set[PeerId]:
            return {e["peer"] for each in peers[:3] for e in each.told("spot_check_evaded")}

        await made.until(
            lambda: (
                evaded() == {MALLORY}
                and REFUSED in reasons_of(peers[:3])
                and all(len(each.told("spot_check_passed")) > 5 for each in (anna, boris))
            ),
            within_s=400.0,
        )
        assert all(each.averager.counters()["spot_checks_without_answer"] for each in peers[:2])
        assert clara.id not in set().union(*failed([anna, boris]))
        for one, other in ((anna, boris), (boris, anna)):
            passed = [at for at, name, e in one.events if name == "spot_check_passed"]
            assert len(passed) > 5 and {other.id} == {
                e["peer"] for e in one.told("spot_check_passed")
            }


async def test_a_reducer_cannot_have_honest_authors_suspected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mallory lists other claims of the authors than they have signed."""
    honestly = Evidence.claim_merged

    def claim_merged(
        self: Evidence, index: int, members: Any, digest: bytes, sources: Sequence[Claim]
    ) -> None:
        if self._me == MALLORY:
            sources = [msgspec.structs.replace(each, made=bytes(32)) for each in sources]
        honestly(self, index, members, digest, sources)

    monkeypatch.setattr(Evidence, "claim_merged", claim_merged)
    policy = replace(CHECKED, slice_bytes_min=16, audit_rate=0.0)

    async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
        peers = await checking(made, *NAMES, "mallory", policy=policy)
        await made.live(35.0)
        evaded = [each for peer in peers[:3] for each in peer.told("spot_check_evaded")]
        assert evaded == []
        refused = [each for peer in peers[:3] for each in peer.told("audit_refused")]
        assert {each["peer"] for each in refused} == {MALLORY}


async def test_a_peer_that_cannot_judge_asks_for_nothing_and_is_checked() -> None:
    async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
        how = {"anna": {"judges": False}}
        peers = await checking(made, *NAMES, judged_by=how)
        await made.live(40.0)
        assert not sum(
            count
            for name, count in peers[0].averager.counters().items()
            if name.startswith("spot_checks")
        )
        told = [each["peer"] for peer in peers[1:] for each in peer.told("spot_check_passed")]
        assert peers[0].id in told


async def test_without_the_runs_setting_nothing_is_read_kept_or_checked() -> None:
    async with swarm(MemoryNetwork(), layout=LAYOUT) as made:
        policy = replace(POLICY, spot_checks=0.0)
        peers = await checking(made, *NAMES, policy=policy)
        await made.live(30.0)
        assert all(whole(peer.averager).spot_checks is None for peer in peers)
        assert not checks_of(peers)
