"""Averagers on the in-memory network: real rounds, numbers and all, on virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import numpy as np
import pytest

from averaging.history.manifest import numbers_digest
from averaging.history.state import FragmentState
from averaging.live.fragment import FragmentWork
from averaging.live.settings import AveragerSettings
from averaging.live.states.fetch_server import fetch_protocol
from averaging.live.streams.bulk import FIRST, Uplink
from averaging.numbers.arrays import Float32s
from averaging.numbers.layout import Layout, TensorSpec
from averaging.round.interface.effects import Apply
from averaging.round.interface.inputs import Due, GiveWay
from averaging.round.interface.phase import Phase
from averaging.rules.due import DuePolicy
from averaging.rules.peer_view import PeerView
from averaging.rules.quorum import QuorumPolicy
from dht.errors import PeerUnreachable
from dht.host import Stream
from dht.identity import PeerId
from dht.memory.host import MemoryNetwork
from dht.memory.network import CALM
from dht.protocol import NEWEST
from dht.wrapped_host import ForwardingHost
from tests.averaging.live.quadratic import POLICY, RUN, check_tokens, start_of, swarm


def rms_distance(one: Sequence[Float32s], other: Sequence[Float32s]) -> float:
    squares = sum(float(np.square(a - b).sum()) for a, b in zip(one, other, strict=True))
    return float(np.sqrt(squares / sum(a.size for a in one)))


async def test_two_learners_end_up_near_their_common_minimum_with_equal_bits() -> None:
    """With the other codecs: numbers/test_exactness.py."""
    async with swarm(MemoryNetwork()) as made:
        policy = replace(POLICY, codec="int4")
        anna = await made.add("anna", policy=policy)
        boris = await made.add("boris", policy=policy)
        await made.live(85.0)
        made.check()
        assert min(v for v in anna.versions() if v is not None) >= 10
        for peer in (anna, boris):
            assert peer.learner is not None
            alone = rms_distance(peer.learner.targets, made.optimum)
            assert peer.learner.distance(made.optimum) < 0.5 * alone
        rounds = anna.told("round")
        assert rounds and all(len(r["members"]) == 2 for r in rounds)
        closed = [*anna.told("closed"), *boris.told("closed")]
        assert {each["protocol"] for each in closed} == {NEWEST}
        assert anna.averager.stats.contributed > 0


@pytest.mark.parametrize(("down", "site"), [("int4", None), ("int2", "a lab")])
async def test_with_error_feedback_learners_keep_what_encoding_loses_on_both_ways(
    down: str, site: str | None
) -> None:
    """Equal members all of whom take part: what one gains by a version, the others lose."""
    async with swarm(MemoryNetwork()) as made:
        policy = replace(
            POLICY, codec="int2", codec_down=down, feedback=frozenset({"int2"}), eta=1.0, mu=0.0
        )
        learners = []
        for name in ("anna", "boris", "clara"):
            at = None if name == "clara" else site
            peer = await made.add(name, policy=policy, site=at)
            assert peer.learner is not None
            learners.append(peer.learner)
        await made.live(85.0)
        made.check()
        assert min(version or 0 for version in peer.versions()) >= 5
        rounds = peer.told("round")
        assert all(len(told["contributors"]) == 3 for told in rounds)
        assert any(told.get("delegates") for told in rounds) == (site is not None)
        for index, state in enumerate(made.first):
            moved = sum(learner.parameters(index) - state.theta for learner in learners)
            walked = sum(learner.walked[index] for learner in learners)
            off = np.linalg.norm(moved - walked) / np.linalg.norm(walked)
            assert off < 1e-5, "all steps are in the parameters"


async def test_where_outer_momentum_is_0_a_joiner_downloads_half_and_no_state_has_any() -> None:
    layout = Layout.build([TensorSpec("w", (512, 512))], 1)
    served: list[int] = []
    for mu in (0.5, 0.0):
        network = MemoryNetwork()
        async with swarm(network, layout=layout) as made:
            due = replace(POLICY.due, fragments=1)
            policy = replace(POLICY, mu=mu, due=due)
            await made.add("anna", policy=policy)
            await made.add("boris", policy=policy)
            await made.live(20.0)
            late = await made.add("clara", knows_start=False, policy=policy)
            await made.until(lambda late=late: bool(late.told("state_fetched")), within_s=30.0)  # type: ignore[misc]
            served.append(network.sent_bytes[fetch_protocol(RUN)])
            await made.until(lambda late=late: late.averager.stats.contributed > 0, within_s=60.0)  # type: ignore[misc]
            made.check()
            for peer in made.peers:
                (state,) = peer.averager.states
                assert state is not None and state.momentum.size == (layout.size if mu else 0)
    assert served[1] == pytest.approx(served[0] / 2, rel=0.01)


@pytest.mark.parametrize("mu", [0.5, 0.0])
async def test_states_whose_momentum_is_not_that_of_the_run_are_refused(mu: float) -> None:
    async with swarm(MemoryNetwork()) as made:
        other = [
            replace(state, momentum=np.zeros(0 if mu else state.theta.size, np.float32))
            for state in made.first
        ]
        with pytest.raises(ValueError, match="the run's is"):
            await made.add("anna", policy=replace(POLICY, mu=mu), states=other)


async def test_a_late_joiner_fetches_the_state_and_then_contributes() -> None:
    async with swarm(MemoryNetwork()) as made:
        anna = await made.add("anna")
        await made.add("boris")
        await made.live(20.0)
        late = await made.add("clara", knows_start=False)
        assert late.versions() == [None] * len(made.layout.fragments)
        await made.live(20.0)
        made.check()
        assert late.told("state_fetched")
        await made.until(lambda: late.versions() == anna.versions(), within_s=5.0)
        assert late.averager.stats.contributed > 0


async def test_a_peer_that_missed_rounds_replays_them_and_loses_no_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "averaging.live.states.fetch_server")

    network = MemoryNetwork()
    async with swarm(network) as made:
        peers = [await made.add(name) for name in ("anna", "boris", "clara")]
        await made.live(18.0)
        clara = peers[2]
        before = clara.versions()
        network.partition([[clara.id]])
        await made.live(30.0)
        assert clara.versions() == before
        network.heal()
        await made.live(36.0)
        made.check()
        assert clara.versions() == peers[0].versions()
        adopted = clara.told("state_adopted")
        replayed = [a for a in adopted if a["how"] == "replay"]
        assert any(a["version"] > a["from_version"] for a in replayed)
        mine = [told for told in clara.told("round") if clara.id in told["contributors"]]
        without_me = sum(version or 0 for version in clara.versions()) - len(mine)
        assert sum(a["missed"] for a in adopted) == without_me > 0
        assert clara.learner is not None
        assert clara.learner.went_through == [
            (a["fragment"], version)
            for a in replayed
            for version in range(a["from_version"] + 1, a["version"] + 1)
        ]
        assert "fetch_broken" not in caplog.text  # the connections carry the next streams
        check_tokens(peers)


class NoBulkFrom(ForwardingHost):
    """A host that has no connection for bulk data with one peer: only a relay leads to it."""

    hidden: PeerId | None = None

    async def open_stream(
        self, peer: PeerId, protocol: str, *, timeout_s: float, bulk: bool = False
    ) -> Stream:
        if peer == self.hidden and protocol == fetch_protocol(RUN):
            raise PeerUnreachable(peer, "the connection is relayed, and relays carry no bulk")
        return await super().open_stream(peer, protocol, timeout_s=timeout_s, bulk=bulk)


async def test_missed_merges_come_from_a_peer_that_can_send_them_and_not_as_a_state() -> None:
    """A home heard that it was behind from one that only a relay led to, and downloaded 5 MB of
    state from a third in place of the 0.3 MB of merges that the third had as well."""
    network = MemoryNetwork()
    async with swarm(network) as made:
        await made.add("anna")
        await made.add("boris")
        clara = await made.add("clara", wrap=NoBulkFrom)
        clara_host = clara.averager.host
        assert isinstance(clara_host, NoBulkFrom)
        await made.live(18.0)
        network.partition([[clara.id]])
        await made.live(30.0)
        network.heal()
        for source in made.peers[:2]:
            clara_host.hidden = source.id
            await made.live(36.0)
            adopted = clara.told("state_adopted")
            if clara.told("replay_failed"):
                break
            network.partition([[clara.id]])
            await made.live(30.0)
            network.heal()
        made.check()
        assert clara.told("replay_failed") and clara.versions() == made.peers[0].versions()
        assert {told["how"] for told in adopted} == {"replay"}
        assert not clara.told("catch_up_failed")


async def test_histories_founded_apart_are_never_averaged_and_one_goes_over_whole() -> None:
    async with swarm(MemoryNetwork()) as made:
        anna, boris = await made.add("anna"), await made.add("boris")
        other = [
            FragmentState.founded(
                made.layout.hash, each.fragment, each.theta + np.float32(1), each.momentum.size
            )
            for each in made.first
        ]
        clara = await made.add("clara", states=other)
        await made.live(36.0)
        made.check()
        assert clara.versions() == [0] * len(made.layout.fragments)
        assert {told["peer"] for told in clara.told("founded_apart")} >= {anna.id}
        assert {told["peer"] for told in anna.told("founded_apart")} == {clara.id}
        assert all(told["kind"] == "merge" for told in anna.told("round"))
        assert all(set(told["members"]) <= {anna.id, boris.id} for told in anna.told("round"))

        states = await clara.averager.states_of(anna.id)
        await made.until(lambda: Phase.JOINING in clara.averager.phases, within_s=36.0)
        loop = asyncio.get_running_loop()
        began = loop.time()
        await clara.averager.replace_states(states, reason="founded_apart")
        assert loop.time() - began < 2.0, "it does not wait for its roster, to which nobody comes"
        await made.live(36.0)
        made.check()
        assert clara.averager.stats.contributed > 0
        assert clara.versions() == anna.versions()
        check_tokens([anna, boris, clara])
        assert clara.learner is not None
        assert clara.learner.discarded(0) > 0


async def test_two_that_come_at_once_to_a_founder_take_its_state_and_contribute() -> None:
    """They count as newcomers while they fetch. Did each take the other for one that trains, it
    would wait for its signature under the founder's state, and both for ever."""
    async with swarm(MemoryNetwork()) as made:
        await made.add("anna")
        await made.live(5.0)
        late = [await made.add(name, knows_start=False) for name in ("boris", "clara")]
        await made.live(60.0)
        made.check()
        assert all(peer.averager.stats.contributed for peer in late)


@pytest.mark.parametrize(("wants_the_way", "how"), [(False, "state"), (True, "replay")])
async def test_a_peer_that_needs_the_versions_between_replays_payloads_larger_than_a_state(
    wants_the_way: bool, how: str
) -> None:
    """A new agent at a running trainer finds the base of its work nowhere else: it was lost."""
    network = MemoryNetwork()
    async with swarm(network) as made:
        clara = [await made.add(name) for name in ("anna", "boris", "clara")][2]
        await made.live(18.0)
        network.partition([[clara.id]])
        await made.live(100.0)
        assert clara.learner is not None
        clara.learner.wants_the_way = wants_the_way
        network.heal()
        await made.live(18.0)
        made.check()
        far = [a for a in clara.told("state_adopted") if a["version"] - a["from_version"] > 8]
        assert {a["how"] for a in far} == {how}


async def test_a_peer_that_only_dials_out_takes_part_and_reduces_nothing() -> None:
    network = MemoryNetwork()
    async with swarm(network) as made:
        anna = await made.add("anna")
        await made.add("boris")
        hidden = await made.add("clara", reachable=False)
        await made.live(40.0)
        made.check()
        assert hidden.averager.stats.contributed >= 8
        for done in anna.told("round"):
            assert done["leader"] != hidden.id
        assert hidden.versions() == anna.versions()


async def test_a_peer_that_others_dial_does_not_look_for_those_who_left() -> None:
    """Earlier, such a peer kept links to them: it dialled them every five seconds, for ever."""
    async with swarm(MemoryNetwork()) as made:
        anna = await made.add("anna")
        boris = await made.add("boris")
        clara = await made.add("clara", reachable=False)
        await made.live(20.0)
        clara.averager.set_reachable(True)
        await made.live(20.0)
        for gone in (anna, boris):
            made.peers.remove(gone)
            await gone.ended()
            await gone.host.close()
            del clara.view[gone.id]  # as its presence does when they say goodbye
        await made.live(240.0)  # a round that they have left is over
        before = len(clara.told("link_lost"))
        await made.live(120.0)
        assert len(clara.told("link_lost")) == before


async def test_a_keeper_that_reduced_a_round_does_not_fetch_it_from_homes() -> None:
    """Earlier, such a keeper fetched 31 times in 28 rounds, which doubled what the homes
    uploaded."""
    async with swarm(MemoryNetwork()) as made:
        keeper = await made.add("keeper", trains=False)
        anna = await made.add("anna", reachable=False)
        boris = await made.add("boris", reachable=False)
        await made.live(80.0)
        made.check()
        assert min(version or 0 for version in anna.versions()) >= 3
        adopted = keeper.told("state_adopted")
        assert len(adopted) >= 3 * len(made.layout.fragments)
        assert keeper.averager.fetcher.counters["entries_fetched"] == 0
        for home in (anna, boris):
            assert home.averager.counters()["pieces_served"] == 0
        assert (
            min(
                mine - kept
                for mine, kept in zip(keeper.versions(), anna.versions(), strict=True)
                if mine is not None and kept is not None
            )
            >= -1
        )


async def test_no_averager_is_built_with_an_incarnation_that_no_commit_holds() -> None:
    async with swarm(MemoryNetwork()) as made:
        with pytest.raises(ValueError, match="incarnation is 9007199254740992"):
            await made.add("anna", incarnation=2**53)


async def test_a_keeper_leads_two_who_only_dial_out_and_nobody_waits_for_work_of_its_own() -> None:
    """Even where a roster needs everybody: a keeper is no member of it."""
    everybody = replace(POLICY, quorum=QuorumPolicy(required="all"))

    async with swarm(MemoryNetwork()) as made:
        keeper = await made.add("keeper", trains=False, policy=everybody)
        anna = await made.add("anna", reachable=False, policy=everybody)
        boris = await made.add("boris", reachable=False, policy=everybody)
        await made.live(80.0)
        made.check()
        homes = {anna.id, boris.id}
        rounds = [done for peer in (anna, boris) for done in peer.told("round")]
        assert len(rounds) >= 8
        assert {done["leader"] for done in rounds} == {keeper.id}
        assert all(set(done["members"]) == homes for done in rounds)
        finished = [done for done in rounds if done["outcome"] == "finished"]
        assert len(finished) == len(rounds)
        assert all(set(done["contributors"]) == homes for done in finished)
        for closed in keeper.told("closed"):
            assert closed["live"] == closed["members"] == 2
        assert keeper.averager.stats.contributed == 0


async def test_a_keeper_follows_without_a_learner() -> None:
    async with swarm(MemoryNetwork()) as made:
        keeper = await made.add(
            "keeper",
            trains=False,
            knows_start=False,
            settings=AveragerSettings(look_round_s=4.0),
        )
        anna = await made.add("anna")
        await made.add("boris")
        await made.live(80.0)
        made.check()
        ahead = [
            mine - kept
            for mine, kept in zip(anna.versions(), keeper.versions(), strict=True)
            if mine is not None and kept is not None
        ]
        assert len(ahead) == len(made.layout.fragments) and max(ahead) <= 2
        assert any(a["how"] == "replay" for a in keeper.told("state_adopted"))


async def test_a_lone_founder_folds_and_its_run_is_ordinary_training() -> None:
    async with swarm(MemoryNetwork()) as made:
        anna = await made.add("anna", founder=True)
        await made.live(90.0)
        assert anna.averager.stats.folds >= 20
        assert anna.learner is not None
        state = anna.averager.states[0]
        assert state is not None and not state.momentum.any()
        check_tokens([anna])


async def test_a_newcomer_on_a_slow_line_gets_a_state_that_takes_longer_than_catching_up_may() -> (
    None
):
    """Its pieces were of a version that was gone when it asked again: it began anew for ever."""
    layout = Layout.build([TensorSpec("weight", (600, 500))], 1)
    async with swarm(MemoryNetwork(), layout=layout) as made:
        policy = replace(POLICY, due=replace(POLICY.due, fragments=1), catch_up_s=10.0)
        for name in ("anna", "boris"):
            await made.add(name, policy=policy)
        await made.live(30.0)
        clara = await made.add("clara", policy=policy, knows_start=False)
        made.network.set_link(clara.id, down_bytes_s=150e3)
        await made.live(60.0)
        assert clara.told("state_fetched") and not clara.told("fetch_failed")


async def test_newcomers_follow_a_founder_that_folded_after_they_had_its_state() -> None:
    """Most sources had what the newcomers have: they believed those, and mixed with the founder."""
    async with swarm(MemoryNetwork()) as made:
        anna = await made.add("anna", founder=True)
        await made.live(20.0)
        fetched = [
            replace(state, theta=state.theta.copy(), momentum=state.momentum.copy())
            for state in anna.averager.states
            if state is not None
        ]
        await made.live(10.0)
        newcomers = [
            await made.add(name, states=[replace(s, momentum=s.momentum.copy()) for s in fetched])
            for name in ("boris", "clara", "dora")
        ]
        await made.live(40.0)
        made.check()
        peers = [anna, *newcomers]
        kinds = {r["kind"] for peer in peers for r in peer.told("round")}
        assert kinds == {"merge"}, "whoever is behind catches up instead of going apart"
        assert not any(peer.told("catch_up_failed") for peer in peers)
        check_tokens(peers)


async def test_draining_ends_what_is_under_way_and_begins_nothing() -> None:
    async with swarm(MemoryNetwork()) as made:
        anna = await made.add("anna")
        await made.add("boris")
        await made.live(31.0)
        assert await anna.averager.drain(timeout_s=30.0)
        versions = anna.versions()
        await made.live(30.0)
        assert anna.versions() == versions
        made.check()


async def test_fragments_that_are_made_due_are_merged_long_before_their_cycle_is_over() -> None:
    async with swarm(MemoryNetwork()) as made:
        policy = replace(POLICY, due=replace(POLICY.due, cycle_steps=1_000_000))
        anna, boris = [await made.add(name, policy=policy) for name in ("anna", "boris")]
        await made.live(20.0)
        assert anna.averager.stats.rounds == 0
        boris.averager.gather_everybody()
        anna.averager.make_due(range(len(anna.averager.states)))
        await made.live(20.0)
        assert all(len(told["contributors"]) == 2 for told in anna.told("round"))
        assert set(anna.versions()) == set(boris.versions()) == {1}
        made.check()


async def test_at_the_end_a_roster_waits_for_called_peers_and_those_that_catch_up_first() -> None:
    """A run by its date left out who was told of the end 40 ms later, or had missed a version."""
    async with swarm(MemoryNetwork()) as made:
        policy = replace(
            POLICY,
            due=replace(POLICY.due, cycle_steps=1_000_000),
            quorum=replace(POLICY.quorum, tau=0.0),
        )
        names = ("anna", "boris", "clara")
        anna, boris, clara = [await made.add(name, policy=policy) for name in names]
        fragments = range(len(made.layout.fragments))
        await made.live(20.0)
        made.memory.partition([[clara.id]])
        for peer in (anna, boris):
            peer.averager.make_due(fragments)
        await made.live(20.0)
        made.memory.heal()
        assert not clara.averager.stats.rounds and clara.versions() < anna.versions()
        for peer in (anna, boris, clara):
            peer.averager.gather_everybody()
        before = len(anna.told("round"))
        boris.averager.make_due(fragments)
        await made.live(30.0)
        last = anna.told("round")[before:]
        assert len(last) == len(fragments)
        assert all(len(told["contributors"]) == 3 for told in last)
        made.check()


async def test_a_fragment_due_while_too_many_are_under_way_is_skipped_and_has_its_turn() -> None:
    async with swarm(MemoryNetwork()) as made:
        settings = AveragerSettings(progress_s=1.0, in_flight_max=1)
        peers = [await made.add(name, settings=settings) for name in ("anna", "boris")]
        await made.live(10.0)
        before = [version or 0 for version in peers[0].versions()]
        for peer in peers:
            peer.averager.make_due(range(len(made.layout.fragments)))
        assert peers[0].averager.in_flight <= 1
        await made.live(60.0)
        made.check()
        assert all(peer.told("skipped") for peer in peers)
        gained = [(v or 0) - b for v, b in zip(peers[0].versions(), before, strict=True)]
        assert min(gained) >= 2


async def test_a_peer_called_while_an_abandoned_snapshot_is_taken_comes_with_the_next_one() -> None:
    """Earlier, it was turned away as if it had no place, and the leader closed the roster without
    it: a peer that has just caught up missed one more round."""
    async with swarm(MemoryNetwork()) as made:
        anna = await made.add("anna")
        boris = await made.add("boris", step_time_s=3.0)
        await made.live(30.0)
        work = boris.averager._works[0]
        machine = work.machine
        assert machine is not None
        for _ in range(600):
            if machine.phase is Phase.WANTED:
                break
            await asyncio.sleep(0.1)
        work.do(machine.handle(GiveWay("it is behind"), boris.averager.now()))
        assert machine.phase is Phase.IDLE
        assert boris.learner is not None
        before, released = len(boris.told("round")), boris.learner.released
        work.do(machine.handle(Due(), boris.averager.now()))
        assert machine.phase is Phase.WANTED
        anna.averager.make_due([0])
        await made.live(10.0)
        assert not boris.told("skipped")
        assert boris.learner.released == released + 1
        rounds = [told for told in boris.told("round")[before:] if told["fragment"] == 0]
        assert rounds and boris.id in rounds[0]["contributors"]
        made.check()


@pytest.mark.parametrize(("count", "spread", "line_bytes_s"), [(3, 0.0, 5e3), (2, 0.5, 1e4)])
async def test_where_one_round_fits_at_a_time_every_fragment_has_as_many(
    count: int, spread: float, line_bytes_s: float
) -> None:
    """On a slow line the last fragment found the place taken whenever it was due: it had 1 round
    while the others had 60, and peers held theirs open for different fragments, in vain."""
    slow = MemoryNetwork(replace(CALM, bandwidth_bytes_s=line_bytes_s))
    async with swarm(slow) as made:
        policy = replace(POLICY, codec="f32", quorum=QuorumPolicy(wait_s=30.0))
        settings = AveragerSettings(progress_s=1.0, in_flight_max=1)
        peers = [
            await made.add(name, policy=policy, settings=settings, step_time_s=1.0 + spread * index)
            for index, name in enumerate(("anna", "boris", "clara")[:count])
        ]
        await made.live(150.0)
        made.check()
        check_tokens(peers)
        versions = [version or 0 for version in peers[0].versions()]
        assert max(versions) - min(versions) <= 3, versions
        cycles = 150.0 / (POLICY.due.cycle_steps * (1.0 + spread))
        assert min(versions) >= 0.8 * cycles, versions
        assert not any(peer.told("no_quorum") for peer in peers)


async def test_fragments_that_wait_for_their_group_take_no_place_from_others() -> None:
    """A place held for one group's fragment was what another group waited for, where groups change
    with every version: with one place there was one version where there are six."""
    shapes = [TensorSpec(f"block.{index}", (4, 20)) for index in range(12)]
    async with swarm(MemoryNetwork(), layout=Layout.build(shapes, 12)) as made:
        policy = replace(
            POLICY,
            group_size=3,
            quorum=QuorumPolicy(wait_s=30.0, tau=6.0),
            due=DuePolicy(cycle_steps=12, fragments=12),
        )
        settings = AveragerSettings(progress_s=1.0, exchanges_max=1)
        for index in range(6):
            await made.add(
                f"peer {index}", policy=policy, settings=settings, step_time_s=1.0 + 0.1 * index
            )
        await made.live(90.0)
        versions = [version or 0 for version in made.peers[0].versions()]
        assert min(versions) >= 0.7 * 90.0 / (12 * 1.25), versions


@pytest.mark.parametrize("groups_of", [pytest.param(16, marks=pytest.mark.slow), 3])
async def test_statistics_are_merged_by_plain_means_beside_parameters_with_momentum(
    groups_of: int,
) -> None:
    """Also where the rounds of several groups meld theta and momentum."""
    shapes = [TensorSpec("weight", (40, 20)), TensorSpec("running_var", (20,))]
    layout = Layout.build(shapes, 2, statistics=["running_var"])
    due = replace(POLICY.due, fragments=len(layout.fragments))
    policy = replace(
        POLICY, mu=0.9, codec="int4", merge="centered_clip", due=due, group_size=groups_of
    )
    async with swarm(MemoryNetwork(), layout=layout) as made:
        peers = [await made.add(f"peer {index}", policy=policy) for index in range(6)]
        await made.live(48.0)
        if groups_of > len(peers):
            made.check()
        for peer in peers:
            *parameters, statistics = peer.averager.states
            assert statistics is not None and statistics.version >= 3
            assert statistics.momentum.size == 0
            assert all(state is not None and state.momentum.any() for state in parameters)
            # Each began at the same start and goes straight to its own target.
            sides = [
                start_of(layout)[-1].theta,
                *(p.learner.targets[-1] for p in peers if p.learner),
            ]
            lowest, highest = np.min(sides, axis=0), np.max(sides, axis=0)
            within = (statistics.theta > lowest - 0.1) & (statistics.theta < highest + 0.1)
            assert within.all()


async def test_one_event_tells_who_took_part_in_a_round_with_which_weight_and_cost() -> None:
    async with swarm(MemoryNetwork()) as made:
        anna = await made.add("anna")
        boris = await made.add("boris")
        await made.live(30.0)
        done = anna.told("round")[0]
        assert sorted(done["members"]) == sorted(done["contributors"])
        assert sorted(done["members"]) == sorted([anna.id, boris.id])
        assert sum(done["weights"]) == pytest.approx(1.0)
        assert done["left_out"] == {}
        told = [peer.told("round")[0] for peer in (anna, boris)]
        assert sum(each["sent_bytes"] for each in told) > 0
        assert sum(each["received_bytes"] for each in told) > 0
        assert 0 < done["seconds"] < 5
        assert done["outcome"] == "finished" and done["version"] == 1
        # What an audit needs: the lineage it led to, and which steps of whom are in it.
        chain = anna.averager.states[done["fragment"]].chain
        assert chain.find(1, bytes.fromhex(done["lineage"])) is not None
        for _, mark, steps, tokens in done["marks"].values():
            assert 0 < steps <= mark and tokens > 0
        assert sorted(done["marks"]) == sorted(done["contributors"])


async def test_states_do_not_change_while_rounds_go_on() -> None:
    async with swarm(MemoryNetwork()) as made:
        anna = await made.add("anna")
        await made.add("boris")
        await made.live(30.0)
        held = [state for state in anna.averager.states if state is not None]
        before = [state.digest() for state in held]
        await made.live(30.0)
        assert [state.digest() for state in held] == before
        assert anna.versions() != [state.version for state in held]
        made.check()


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each member of a meld: does it know the digest of what it had before?"""
    known: list[bool] = []
    apply = FragmentWork._apply

    async def noted(self: FragmentWork, effect: Apply) -> None:
        assert self.state is not None
        link, digest = self.state.chain.tip, numbers_digest(self.state)
        await apply(self, effect)
        if effect.commit.melds:
            known.append(self.machine.certificates.known_digest(link) == digest)

    monkeypatch.setattr(FragmentWork, "_apply", noted)
    return known


@pytest.mark.slow  # that halves meld: virtual/test_schedules.py
async def test_two_halves_that_merged_apart_meld_and_agree_again(
    left: list[bool],
) -> None:
    network = MemoryNetwork()
    policy = replace(POLICY, doubt_s=20.0, upload_s=5.0, round_s=25.0)
    async with swarm(network) as made:
        peers = [await made.add(name, policy=policy) for name in ("anna", "boris", "clara", "dora")]
        await made.live(20.0)
        halves = [peers[:2], peers[2:]]
        network.partition([[peer.id for peer in half] for half in halves])
        for half, others in (halves, halves[::-1]):
            for peer in half:
                for other in others:
                    del peer.view[other.id]
        await made.live(policy.round_s + 35.0)  # a round that it cut in two has ended by then
        made.check()
        lineages = [{state.lineage for state in p.averager.states if state} for p in peers]
        assert not lineages[0] & lineages[2], "the halves went on by themselves"
        network.heal()
        loop = asyncio.get_running_loop()
        for half, others in (halves, halves[::-1]):
            for peer in half:
                for other in others:
                    peer.view[other.id] = PeerView(
                        first_seen=loop.time() - 100.0, heard_at=loop.time(), step_time_s=1.0
                    )
                    await peer.host.connect(other.id, await other.host.addresses(), timeout_s=10.0)
        await made.live(50.0)
        made.check()
        mixed = [r for p in peers for r in p.told("round") if r["kind"] == "meld"]
        rebased = [a for p in peers for a in p.told("state_adopted") if a["rebased"]]
        assert any(r["outcome"] == "finished" for r in mixed) or rebased
        assert any(r["outcome"] == "finished" for r in mixed), "no fragment was mixed"
        assert left and all(left), "who melds knows the bits that it had before"
        for index in range(len(made.layout.fragments)):
            states = [p.averager.states[index] for p in peers]
            versions = {state.version for state in states if state is not None}
            assert max(versions) - min(versions) <= 1
        check_tokens(peers)


@pytest.mark.parametrize("mu", [0.5, 0.0])
async def test_groups_that_change_meld_and_everybody_leaves_with_the_reducers_bytes(
    mu: float,
) -> None:
    """Six peers in groups of three or less: real payloads of displacement, theta and momentum."""
    policy = replace(POLICY, group_size=3, slice_bytes_min=1024, mu=mu)
    async with swarm(MemoryNetwork()) as made:
        peers = [await made.add(f"peer-{number}", policy=policy) for number in range(6)]
        await made.live(60.0)
        made.check()  # equal lineage, equal bits
        rounds = [r for p in peers for r in p.told("round") if r["outcome"] == "finished"]
        assert {r["kind"] for r in rounds} == {"merge", "meld"}
        assert max(len(r["members"]) for r in rounds) == 3
        for fragment in range(len(made.layout.fragments)):
            states = [state for p in peers if (state := p.averager.states[fragment])]
            assert len({state.lineage for state in states}) > 1, "groups have their own"
            assert all(len(state.merged) == 6 for state in states), "work reaches everybody"
        measured = [told["dispersion"] for p in peers for told in p.told("melded")]
        assert measured and min(measured) > 0
        optimum = made.optimum
        for peer in peers:
            assert peer.learner is not None
            assert peer.learner.distance(optimum) < 0.7


async def test_on_a_slow_line_states_are_fetched_one_after_the_other_and_replays_together() -> None:
    async with swarm(MemoryNetwork()) as made:
        averager = (await made.add("anna")).averager
        averager.around = replace(averager.around, line_max=lambda: 1000.0)

        async def fetch(turn: Callable[[], AbstractAsyncContextManager[None]]) -> None:
            async with turn():
                await asyncio.sleep(10.0)

        for turn, seconds in ((averager.catching_up, 10.0), (averager.fetching_state, 20.0)):
            began = averager.now()
            await asyncio.gather(fetch(turn), fetch(turn))
            assert averager.now() - began == pytest.approx(seconds)


async def test_what_audits_move_is_load_on_the_line_beside_that_of_rounds() -> None:
    """At a twentieth of all bytes each line looked so much slower than it is."""
    async with swarm(MemoryNetwork()) as made:
        averager = (await made.add("anna")).averager
        began = averager.now()
        await asyncio.sleep(10.0)
        lines = averager.transport.up, averager.transport.down
        for line in lines:
            line.transferred(averager.host.peer_id, 1_000_000, began=began, ended=averager.now())
        averager.moved(sent=500_000, since=began)
        averager.moved(received=250_000, since=began)
        assert [line.bytes_per_s for line in lines] == [pytest.approx(150e3), pytest.approx(125e3)]


async def test_replays_come_first_and_then_all_that_belongs_to_the_oldest_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the order of an ``Uplink``: no times are given to it but those of rounds."""
    given: dict[int, set[float]] = {}
    turn = Uplink.turn

    def noted(self: Uplink, size: int, *, since: float) -> AbstractAsyncContextManager[None]:
        given.setdefault(id(self), set()).add(since)
        return turn(self, size, since=since)

    monkeypatch.setattr(Uplink, "turn", noted)

    network = MemoryNetwork()
    async with swarm(network) as made:
        peers = [await made.add(name) for name in ("anna", "boris", "clara")]
        await made.live(60.0)
        network.partition([[peers[2].id]])
        await made.live(30.0)
        network.heal()
        await made.live(36.0)
        for peer in peers:
            times = given[id(peer.averager.uplink)]
            assert 1 < len(times - {FIRST}) <= len(peer.told("entered"))
        sources = [peer for peer in peers if FIRST in given[id(peer.averager.uplink)]]
        assert sources, "the one that was away has replayed what it missed"
