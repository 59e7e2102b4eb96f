"""Settings of averaging and presence that follow from a run file, which they do not know.

Four rounds of different fragments exchange data at once; more would only slow each other down. The
number that may wait for members is bounded by memory: 18 of 24 fragments at four bits, 6 in f32.
"""

from __future__ import annotations

import math
from dataclasses import replace

from blake3 import blake3

from averaging.live.settings import AveragerSettings
from averaging.messages import Stamp
from averaging.numbers.codecs import codec_named
from averaging.numbers.layout import Layout
from averaging.rules.due import DuePolicy
from averaging.rules.line_levels import Level, ladder
from averaging.rules.mixing import MixingPolicy
from averaging.rules.orders import Place, RoundOrders
from averaging.rules.policy import ProbationPolicy, RoundPolicy
from averaging.rules.quorum import ALL, QuorumPolicy, Required
from dht.membership.credentials import Directive, encode
from dht.membership.orders import Orders
from dht.membership.table import MembershipSettings
from dht.presence.this_peer import PresenceSettings
from peer.rules.amendments import effective
from peer.run_file.merging import Mixing, Outer, Quorum, Rounds
from peer.run_file.places import place_of
from peer.run_file.sections import FilesData, HfData, MuonInner, Policy, RunFile


def round_policy(run: RunFile, *, fragments: int) -> RoundPolicy:
    """The rules of rounds. ``fragments``: the number of fragments of the layout."""
    outer, rounds = run.outer, run.rounds
    due = DuePolicy(cycle_steps=outer.steps_per_cycle, fragments=fragments)
    if run.synchronous:
        # Synchronous peers wait for each other, so each makes as many steps as the others. Each
        # waits at one fragment, and may have come there by other steps than others: it must answer
        # every call, or two would wait for each other at two fragments.
        due = replace(due, scale_by_speed=False, called_share=1 / outer.steps_per_cycle)
    upload_s = min(RoundPolicy().upload_s, rounds.round_deadline_s / 3)
    return replace(
        merging_policy(
            outer, rounds, run.mixing, upload_s=upload_s, muon=isinstance(run.inner, MuonInner)
        ),
        due=due,
        probation=_probation_policy(run.policy),
        audit_rate=run.policy.audits,
        spot_checks=run.policy.spot_checks,
        tokens_end=run.end.tokens if isinstance(run.end.tokens, int) else None,
        batch_tokens_max=run.limits.step_tokens_max,
    )


def merging_policy(
    outer: Outer, rounds: Rounds, mixing: Mixing, *, upload_s: float, muon: bool
) -> RoundPolicy:
    """The rules that follow from ``[outer]``, ``[rounds]`` and ``[mixing]``, but for due times.

    ``muon``: it is the inner optimizer.
    """
    up, down = outer.codecs
    return RoundPolicy(
        quorum=QuorumPolicy(
            required=_required(rounds.quorum),
            wait_s=rounds.quorum_deadline_s,
            gamma=rounds.grace,
            tau=float(outer.overlap_steps),
        ),
        mixing=MixingPolicy(theta=mixing.theta, momentum=mixing.momentum),
        group_size=rounds.group_size,
        codec=up,
        codec_down=down,
        smaller_levels=_smaller_levels(outer),
        embedding_codecs=outer.embedding_pair,
        line_share=outer.line_share,
        feedback=outer.fed_back,
        feeds_back_merged=outer.feeds_back_merged(muon=muon),
        merge=outer.merge,
        late_work=outer.late_work,
        eta=outer.learning_rate,
        mu=outer.momentum,
        stale_max=rounds.stale_max,
        upload_s=upload_s,
        round_s=rounds.round_deadline_s,
        alone_s=rounds.alone_s,
    )


def round_orders(run: RunFile, directive: Directive | None, *, fragments: int) -> RoundOrders:
    """The part of the owner's last directive that rounds follow."""
    if directive is None:
        return RoundOrders()
    orders, encoded = directive.orders, encode(directive)
    paused = f"the run is paused by directive {directive.number} of its owner"
    return RoundOrders(
        stamp=Stamp(directive.number, blake3(encoded).digest(16)),
        encoded=encoded,
        paused=paused if orders.paused else None,
        last_version=None if orders.end is None else orders.end.version,
        policies=tuple(
            (each.version, round_policy(effective(run, orders, each.version), fragments=fragments))
            for each in orders.amendments
        ),
        attested=_attested(orders),
    )


def _attested(orders: Orders) -> dict[Place, bytes]:
    """The attested states, and the roots that a rollback to them has made, by their links."""
    digests = {
        (fragment, each.version, each.lineage): each.digest
        for fragment, each in enumerate(orders.attested)
    }
    if orders.rollback is not None:
        for fragment, (root, each) in enumerate(
            zip(orders.rollback.roots, orders.attested, strict=False)
        ):
            if root.version == each.version + 1:
                digests[fragment, root.version, root.lineage] = each.digest
    return digests


def _smaller_levels(outer: Outer) -> tuple[Level, ...]:
    """Codecs and cycles for lines that do not carry the preferred ones."""
    up, down = outer.codecs
    first = Level(codec=up, codec_down=down, cycle_steps=outer.steps_per_cycle)
    cycle_max = outer.steps_per_cycle_max or outer.steps_per_cycle
    return tuple(ladder(first, outer.smaller_pairs, cycle_max=cycle_max)[1:])


REPLAY_OF_MODEL = 0.5
"""Size of the replay log relative to the model's fp32 size: four cycles at 4 bits."""

REPLAY_MIN_BYTES = 16 << 20
REPLAY_MAX_BYTES = 256 << 20

ROUNDS_OF_MODEL = 1.0
"""Memory of all rounds in flight relative to the model's fp32 size; one is always allowed."""

ROUNDS_FREE_BYTES = 64 << 20
"""Memory that rounds in flight may use in any case."""

SPARE_OF_MODEL = 0.25
"""Buffers kept for the next round. From ten fragments on these are all buffers of a round."""


UPLOADS_OF_MODEL = 0.25
"""Uploads kept for auditors, relative to the model's fp32 size: two cycles at 4 bits."""

UPLOADS_MAX_BYTES = 256 << 20


def averager_settings(run: RunFile, layout: Layout) -> AveragerSettings:
    """The averager's settings that depend on the run file or on the model's size."""
    ratio = run.rounds.norm_max_ratio
    model_bytes = 4 * layout.size
    replay_bytes = int(REPLAY_OF_MODEL * model_bytes)
    uploads_bytes = max(int(UPLOADS_OF_MODEL * model_bytes), REPLAY_MIN_BYTES)
    return AveragerSettings(
        in_flight_max=_rounds_at_once(run, layout),
        replay_bytes_max=min(max(replay_bytes, REPLAY_MIN_BYTES), REPLAY_MAX_BYTES),
        spare_bytes_max=max(int(SPARE_OF_MODEL * model_bytes), REPLAY_MIN_BYTES),
        progress_s=0.01 if run.synchronous else 0.1,
        norm_ratio_max=math.inf if ratio == "off" else ratio,
        uploads_bytes_max=min(uploads_bytes, UPLOADS_MAX_BYTES),
    )


def _rounds_at_once(run: RunFile, layout: Layout) -> int:
    """Number of rounds of the largest fragment that fit their share of memory.

    Each has a new theta, its own upload, the merged payload, and up to half of that from others.
    """
    largest = max(layout.fragments, key=lambda fragment: fragment.size)
    up, down = (codec_named(name).encoded_size(largest.unit_sizes) for name in run.outer.codecs)
    round_bytes = 4 * largest.size + int(1.5 * up + down)
    share_bytes = max(ROUNDS_OF_MODEL * 4 * layout.size, ROUNDS_FREE_BYTES)
    return max(1, min(len(layout.fragments), int(share_bytes / round_bytes)))


def _required(quorum: Quorum) -> Required:
    """The quorum as the rules of rounds have it."""
    if quorum == "all":
        return ALL
    if quorum == "majority":
        return None
    return quorum


def _probation_policy(policy: Policy) -> ProbationPolicy:
    """Newcomers are on probation where anybody may join.

    Elsewhere the owner has vouched for each peer, by an invite or by name, and may take it back
    with all that an invite admitted.
    """
    if policy.admission != "open":
        return ProbationPolicy()
    return ProbationPolicy(rounds=policy.probation_rounds, seconds=60.0 * policy.probation_minutes)


def presence_settings(run: RunFile) -> PresenceSettings:
    """The settings by which peers of the run notice each other."""
    return PresenceSettings(
        membership=MembershipSettings(
            heartbeat_s=run.membership.heartbeat_s, expiry_s=run.membership.expiry_s
        )
    )


def fixes_its_data(run: RunFile) -> bool:
    """True if every byte that learners of the run read follows from the run file.

    A peer that reads something else, as it says, has no excuse there: see
    ``averaging.guard.rules.spot_checks``.
    """
    data = run.data
    if isinstance(data, HfData):
        return data.tokenizer == "bytes"
    if not isinstance(data, FilesData):
        return False
    names = [data.tokenizer, *(text for source in data.sources for text in source.files)]
    return all(name == "bytes" or place_of(name).sha256 is not None for name in names)
