"""The protocol number of a round: the newest one for which all of its members have signed.

A leader may take an older one, as it may take f32 instead of a smaller codec. It does so while it
sees a live peer of the run that does not speak the newest one: rounds are replayed by peers that
were not in them.
"""

from __future__ import annotations

from collections.abc import Mapping

from averaging.messages import Join
from averaging.rules.peer_view import PeerView
from dht.identity import PeerId
from dht.protocol import Range


def agreed_protocol(
    joins: Mapping[PeerId, Join], view: Mapping[PeerId, PeerView], speaks: Range, now: float
) -> int:
    """The number of a round of these joins: one of those that most of them have signed.

    Three releases may meet at a leader of the middle one, and no number is common to all of them.
    """
    oldest, newest = speaks
    signers = {
        number: sum(number in join.protocols for join in joins.values())
        for number in range(oldest, newest + 1)
    }
    most = max(signers.values())
    able = [number for number, count in signers.items() if count == most]
    in_sight = min(
        (seen.protocol for peer, seen in view.items() if seen.is_live(now)), default=newest
    )
    return max((number for number in able if number <= in_sight), default=able[0])


def without_protocol(joins: Mapping[PeerId, Join], number: int) -> dict[PeerId, Join]:
    """The joins that were not signed for a round of this number."""
    return {peer: join for peer, join in joins.items() if number not in join.protocols}
