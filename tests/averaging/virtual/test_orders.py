"""Amendments, pauses and ends in storms: no round mixes settings, and no promise is broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from averaging.messages import Stamp
from averaging.round.interface.effects import Apply, Effect, Enter
from averaging.rules.orders import RoundOrders
from averaging.rules.policy import RoundPolicy
from averaging.virtual.swarm import Peer, PeerPlan
from tests.averaging.virtual.swarm import (
    SEVERAL_GROUPS,
    Storm,
    Swarm,
    orders_of,
    reach_one_final_lineage,
    storm,
)
from tests.averaging.virtual.swarm import weather_out as survive
from tests.averaging.virtual.truth import Broken
from tests.seeds import seeds

ISSUED_AT = (20.0, 45.0, 70.0)
QUICK, SOAK, CHUNK = 3, 1000, 3


def issue(swarm: Swarm, number: int, **orders: object) -> RoundOrders:
    """A directive of the run's owner, which nobody knows yet."""
    stamp = Stamp(number, number.to_bytes(16, "big"))
    made = RoundOrders(stamp=stamp, encoded=b"directive %d" % number, **orders)  # type: ignore[arg-type]
    swarm.orders_issued[made.encoded] = made
    return made


def tell_one(swarm: Swarm, orders: RoundOrders) -> Callable[[], None]:
    """The owner's command reaches one peer. The others hear of it in rounds alone."""

    def tell() -> None:
        up = swarm.trainers()  # a peer that is in no round passes nothing on in rounds
        if up:
            swarm.follow(swarm.rng.choice(up).name, orders)
        else:
            swarm.call_in(1.0, tell)

    return tell


def watch_settings(swarm: Swarm) -> dict[str, int]:
    """Count the rounds under each setting, and hold each of them against its directive."""
    seen: dict[str, int] = {}
    of_version: dict[bytes, tuple[Stamp | None, str]] = {}

    def applied(node: Peer, apply: Apply) -> None:
        commit = apply.commit
        named = commit.directive
        orders = RoundOrders()
        if named is not None:
            orders = swarm.orders_issued[b"directive %d" % named.number]
        policy: RoundPolicy = orders.policy_at(commit.version, swarm.policy)
        if commit.kind == "merge" and commit.codec not in (policy.codec, "f32"):
            raise Broken(f"version {commit.version} by {named} in {commit.codec}")
        was = of_version.setdefault(apply.standing.lineage, (named, commit.codec))
        if was != (named, commit.codec):
            raise Broken(f"one version by {was} and by {named}, {commit.codec}")
        seen[commit.codec] = seen.get(commit.codec, 0) + 1

    def carried_out(peer: Peer, effect: Effect) -> Effect:
        if isinstance(effect, Enter) and effect.commit.directive != orders_of(peer).stamp:
            raise Broken(
                f"{peer.name} entered a round under {effect.commit.directive}, and follows "
                f"{orders_of(peer).stamp}"
            )
        return effect

    swarm.on_apply = applied
    swarm.on_effect = carried_out
    return seen


def with_amendments(seed: int, how: Storm) -> tuple[Swarm, dict[str, int]]:
    swarm = storm(seed, how)
    policies: tuple[tuple[int, RoundPolicy], ...] = ()
    for number, at in enumerate(ISSUED_AT, start=1):
        codec = ("f16", "int8", "f32")[number - 1]
        policies = (*policies, (3 * number, replace(swarm.policy, codec=codec, codec_down=None)))
        paused = "the owner has paused it" if number == 2 else None
        orders = issue(swarm, number, policies=policies, paused=paused)
        swarm.call_at(at, tell_one(swarm, orders))
    return swarm, watch_settings(swarm)


@pytest.mark.parametrize("first", seeds(QUICK, soak=SOAK, step=CHUNK))
def test_no_storm_of_orders_breaks_a_promise_or_mixes_settings(first: int) -> None:
    rounds: dict[str, int] = {}
    for seed in range(first, first + CHUNK):
        how = Storm()
        swarm, seen = with_amendments(seed, how)
        try:
            survive(swarm, how)
        except Exception as error:
            error.add_note(f"seed {seed}, at {swarm.now:.3f} s")
            raise
        swarm.run(swarm.now + 60.0)
        known = {orders_of(node).stamp for node in swarm.trainers()}
        assert known == {Stamp(3, (3).to_bytes(16, "big"))}, f"seed {seed}: {known}"
        for codec, count in seen.items():
            rounds[codec] = rounds.get(codec, 0) + count
    assert rounds.get("f32"), f"no round by an amended codec: {rounds}"


def test_members_that_do_not_ask_for_the_directive_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("averaging.rules.orders.OrderBook.objection", lambda book, theirs: None)
    with pytest.raises(Broken, match="entered a round under"):
        for seed in range(20):
            swarm, _ = with_amendments(seed, Storm())
            survive(swarm, Storm())


def pass_orders_on(swarm: Swarm) -> None:
    """Peers that are connected show each other the newest directive, now and every few seconds."""
    up = [node for node in swarm.alive if not swarm.network.is_paused(node.name)]
    for node in up:
        for other in up:
            known = swarm.network.connected(node.name, other.name)
            if known and orders_of(node).stamp is not None:
                swarm.follow(other.name, orders_of(node))
    swarm.call_in(swarm.everybody.beat_s, pass_orders_on, swarm)


def ends_on_one_lineage(seed: int, how: Storm) -> None:
    """The owner ends the run while the storm is on, and one peer hears of it first."""
    swarm = storm(seed, how)

    def order() -> None:
        tell_one(swarm, issue(swarm, 1, last_version=max(swarm.versions()) + 2))()
        pass_orders_on(swarm)

    swarm.call_at(60.0, order)
    swarm.run(how.rough_s)
    reach_one_final_lineage(swarm, within_s=180.0)


@pytest.mark.parametrize("seed", seeds(1, soak=80))
def test_the_sides_of_a_partition_that_end_at_a_version_end_on_one_lineage(seed: int) -> None:
    """And, with further seeds, several groups."""
    one_group = Storm(peers=(4, 8), accidents=(2, 5))
    ends_on_one_lineage(seed, (one_group, *SEVERAL_GROUPS[:2])[seed % 3])


def test_a_peer_that_invents_a_directive_stops_nobody() -> None:
    swarm = Swarm(6, [PeerPlan(founder=True)] + [PeerPlan()] * 4)
    swarm.run(30.0)
    before = max(swarm.versions())
    invented = RoundOrders(stamp=Stamp(99, bytes(16)), encoded=b"signed by nobody")
    liar = swarm.nodes[swarm.names[1]]
    liar.averager.terms.book.orders = invented
    swarm.run(180.0)
    honest = [node for node in swarm.trainers() if node is not liar]
    assert all(orders_of(node).stamp is None for node in honest)
    made = min(node.state.version for node in honest if node.state is not None) - before
    assert made >= 5, f"{made} versions in 150 s"
