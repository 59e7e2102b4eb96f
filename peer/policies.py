"""From a run file to the settings of the layers below, which do not know run files."""

from __future__ import annotations

import math

from averaging.driver import AveragerSettings
from averaging.due import DuePolicy
from averaging.policy import RoundPolicy
from averaging.quorum import ALL, QuorumPolicy, Required
from averaging.transport import TransportSettings
from dht.identity import PeerId
from dht.membership import MembershipSettings
from dht.presence import PresenceSettings
from peer.run_file import Quorum, RunFile


def round_policy(run: RunFile, *, fragments: int) -> RoundPolicy:
    """How rounds go, as the run file has it. ``fragments``: as many as the layout made."""
    outer, rounds = run.outer, run.rounds
    upload_s = min(30.0, rounds.round_deadline_s / 3)
    return RoundPolicy(
        quorum=QuorumPolicy(
            required=_required(rounds.quorum),
            wait_s=rounds.quorum_deadline_s,
            gamma=rounds.grace,
            tau=float(outer.overlap_steps),
        ),
        due=DuePolicy(cycle_steps=outer.steps_per_cycle, fragments=fragments),
        group_size=rounds.group_size,
        codec=outer.codec,
        merge=outer.merge,
        eta=outer.learning_rate,
        mu=outer.momentum,
        stale_max=rounds.stale_max,
        batch_tokens_max=run.limits.step_tokens_max,
        upload_s=upload_s,
        round_s=rounds.round_deadline_s,
        alone_s=rounds.alone_s,
    )


def averager_settings(run: RunFile) -> AveragerSettings:
    """How the averager works, where the run file has a say in it."""
    ratio = run.rounds.norm_max_ratio
    return AveragerSettings(
        progress_s=0.01 if run.synchronous else 0.1,
        norm_ratio_max=math.inf if ratio == "off" else ratio,
        transport=TransportSettings(admitted=admitted_peers(run)),
    )


def admitted_peers(run: RunFile) -> frozenset[PeerId] | None:
    """The only peers that may take part; ``None``: everybody."""
    if run.policy.admission == "open":
        return None
    return frozenset(PeerId(peer) for peer in run.policy.peers)


def _required(quorum: Quorum) -> Required:
    if quorum == "all":
        return ALL
    if quorum == "majority":
        return None
    return quorum


def presence_settings(run: RunFile) -> PresenceSettings:
    """How peers of the run notice each other."""
    return PresenceSettings(
        membership=MembershipSettings(
            heartbeat_s=run.membership.heartbeat_s, expiry_s=run.membership.expiry_s
        )
    )
