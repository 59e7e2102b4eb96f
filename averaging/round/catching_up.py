"""Where others stand: behind, ahead or apart, and what to do about it.

The part of ``averaging.round.machine`` that compares chains and asks the owner to catch up or to
rebase. It belongs to one ``FragmentRounds``; fetching is the owner's, and so is the judging of what
came.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from averaging import messages as said
from averaging.history.standing import Apart, IAmBehind, Standing, TheyAreBehind, relate
from averaging.messages import Head
from averaging.round.effects import CatchUp, Rebase
from averaging.round.phase import Phase
from averaging.rules import final_mix as finale
from averaging.rules.mixing import meets
from averaging.rules.policy import RoundPolicy
from dht.identity import PeerId

if TYPE_CHECKING:
    from averaging.round.machine import FragmentRounds

DOUBTED_MAX = 64
DOUBTED_MARGINS = 4
"""A source that could not be caught up with is not tried again for so many ``margin_s``."""
CATCH_UP_BASE_S = 30.0
TRANSFERS_AT_ONCE = 4
"""On the line on which a state comes: another one, and rounds."""


def patience_s(policy: RoundPolicy, size_bytes: int) -> float:
    """What fetching so many bytes may take, from somebody who says that it has them."""
    transfer_s = TRANSFERS_AT_ONCE * size_bytes / policy.slow_link_bytes_s
    return min(policy.catch_up_s, CATCH_UP_BASE_S + transfer_s)


class Doubts:
    """Who said that it is further and then did not deliver: for a while it is not believed.

    One for all fragments of a peer. Who holds it up again and again is doubted for twice as long
    each time, so that no liar, however slow it answers, has it catching up for long.
    """

    __slots__ = ("_doubted", "_longest_s", "_shortest_s")

    def __init__(self, policy: RoundPolicy) -> None:
        self._shortest_s = DOUBTED_MARGINS * policy.margin_s
        self._longest_s = policy.catch_up_s
        self._doubted: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()
        """Until when, and for how long when it had held me up."""

    def __repr__(self) -> str:
        return f"Doubts({len(self._doubted)} peers)"

    def believes(self, source: PeerId, now: float) -> bool:
        return now >= self._doubted.get(source, (now, 0.0))[0]

    def failed(self, source: PeerId, *, held_s: float, now: float) -> None:
        """It did not deliver, and I waited for it so long."""
        if not self.believes(source, now):
            return  # another fragment has said so
        _, before_s = self._doubted.pop(source, (now, 0.0))
        wait_s = self._shortest_s
        if self.is_long(held_s):
            wait_s = before_s = min(self._longest_s, max(held_s, 2 * before_s))
        self._doubted[source] = (now + wait_s, before_s)
        while len(self._doubted) > DOUBTED_MAX:
            self._doubted.popitem(last=False)

    def is_long(self, held_s: float) -> bool:
        """Whether waiting so long is held against whoever was waited for."""
        return held_s > self._shortest_s

    def kept_its_word(self, source: PeerId) -> None:
        self._doubted.pop(source, None)


class Catching:
    """One peer as somebody who may be behind, or on the lighter side of a fork."""

    __slots__ = ("_began_at", "_doubts", "_hint", "_me", "_peer", "_source")

    def __init__(self, peer: FragmentRounds, doubts: Doubts) -> None:
        self._peer = peer
        self._me = peer.me
        self._hint: tuple[PeerId, Head] | None = None
        self._source: PeerId | None = None
        self._began_at = 0.0
        self._doubts = doubts

    def __repr__(self) -> str:
        return f"Catching({self._me}, source={self._source})"

    def told_behind(self, message: said.Behind, now: float) -> None:
        """Somebody has found my lineage in its chain."""
        if message.source == self._me or self._peer.standing is None:
            return
        apart = relate(self._peer.standing.head(), self._peer.standing.chain, message.head)
        if (
            not isinstance(apart, Apart)
            or apart.they_are_light
            or not self._believes(message.source, now)
        ):
            self.compare(message.source, message.head, now)
            return
        # A message shows some links of a chain; mine may lie between them. Who says so has looked
        # it up in all of its chain, and whatever is fetched must have it there as well.
        self._peer.joining.leave("behind")
        self._peer.event("behind", source=message.source, version=message.head.version)
        version, lineage = message.head.version, message.head.lineage
        self._catch(CatchUp(message.source, version, lineage, "it found my lineage"), now)

    def _believes(self, source: PeerId, now: float) -> bool:
        """Whether I may catch up now, and this source has not failed me lately."""
        busy = self._peer.phase in (Phase.ENTERED, Phase.FOLDING, Phase.CATCHING)
        return not busy and self._doubts.believes(source, now)

    def take_hint(self, now: float) -> None:
        """Look now at what could not be looked at in the middle of a round."""
        hint, self._hint = self._hint, None
        if hint is not None:
            self.compare(hint[0], hint[1], now)

    def compare(self, source: PeerId, theirs: Head, now: float) -> None:
        """Somebody shows where it stands: catch up, rebase, or tell it that it should."""
        if self._peer.standing is None or source == self._me:
            return
        if self._peer.phase in (Phase.ENTERED, Phase.FOLDING):
            self._hint = (source, theirs)
            return
        if self._peer.phase is Phase.CATCHING:
            return
        if not self._doubts.believes(source, now):
            self._peer.counters["doubted_source"] += 1
            return
        mine = self._peer.standing.head()
        relation = relate(mine, self._peer.standing.chain, theirs)
        if isinstance(relation, Apart) and self.ends_with_one(source, mine, relation, theirs, now):
            return
        if (
            self._peer.doubt is None
            and self._peer.parts_at_each_round(now)
            and meets(relation, mine, theirs)
        ):
            return
        match relation:
            case IAmBehind():
                self._peer.joining.leave("behind")
                self._peer.event("behind", source=source, version=theirs.version)
                self._catch(
                    CatchUp(source, theirs.version, theirs.lineage, "its chain holds my lineage"),
                    now,
                )
            case Apart() as apart if apart.i_am_light:
                self._rebase(source, theirs, apart, now)
            case Apart() as apart if apart.they_are_light:
                self._peer.say(source, said.Compare(self._peer.fragment, mine))
            case TheyAreBehind():
                self._peer.say(source, said.Behind(self._peer.fragment, mine, self._me))
            case _:
                return

    def ends_with_one(
        self, source: PeerId, mine: Head, relation: Apart, theirs: Head, now: float
    ) -> bool:
        """Whether one of us takes the other's state, which is final."""
        tokens_end = self._peer.policy.tokens_end
        if tokens_end is None or not self._peer.closed_ranks:
            return False
        if finale.gives_way(mine, theirs, tokens_end):
            if self._believes(source, now):
                self._rebase(source, theirs, relation, now)
            return True
        if finale.gives_way(theirs, mine, tokens_end):
            self._peer.say(source, said.Compare(self._peer.fragment, mine))
            return True
        return False

    def _rebase(self, source: PeerId, theirs: Head, apart: Apart, now: float) -> None:
        self._peer.joining.leave("apart")
        self._peer.event("rebase", source=source, mine=apart.mine, theirs=apart.theirs)
        self._catch(
            Rebase(
                source,
                theirs.version,
                theirs.lineage,
                apart.ancestor,
                f"merged since we parted: {apart.mine} tokens here, {apart.theirs} there",
                others_follow=self._others_follow(now),
            ),
            now,
        )

    def _others_follow(self, now: float) -> bool:
        """Whether others go on with what was merged on my side since the ancestor.

        They do when it was merged in rounds of several groups. And where a partition has left one
        group of several: whoever is with me on this side may be in a meld before it rebases.
        """
        return self._peer.dealt_version is not None or self._peer.around.is_dealt(now)

    def _catch(self, effect: CatchUp | Rebase, now: float) -> None:
        self._peer.to(Phase.CATCHING)
        self._peer.timers["catching"] = now + self._peer.policy.catch_up_s
        self._source = effect.source
        self._began_at = now
        self._peer.emit(effect)

    def caught_up(
        self,
        standing: Standing | None,
        now: float,
        *,
        since: int | None = None,
        held_s: float | None = None,
    ) -> None:
        """``CatchUp`` or ``Rebase`` is done; ``None``: it failed, and I stand where I stood.

        ``since``: my pending work began at that version, not at the one where I stand now.
        ``held_s``: how long the source was waited for, if not all the time.
        """
        if self._peer.phase is Phase.CATCHING:
            self._caught_up(standing, now, now - self._began_at if held_s is None else held_s)
        else:
            self._peer.counters["caught_up_late"] += 1
            if standing is not None and self._peer.phase is Phase.IDLE:
                self._peer.stand(standing, fresh=False)
        if standing is not None and since is not None:
            self._peer.fresh_version = min(since, self._peer.fresh_version)

    def _caught_up(self, standing: Standing | None, now: float, held_s: float) -> None:
        called, self._peer.joining.called_until = self._peer.joining.called_until, None
        source, self._source = self._source, None
        if standing is None:
            # It may have lied about what it has: others get a chance before it is believed again.
            if source is not None:
                self._doubts.failed(source, held_s=held_s, now=now)
            self._peer.event("catch_up_failed")
            self._peer.joining.idle(now, "catching up failed", retry=True)
            return
        if source is not None:
            self._doubts.kept_its_word(source)
        self._peer.stand(standing, fresh=False)
        self._peer.event("caught_up", version=standing.version)
        heard = standing.version <= self._peer.closed_version
        self._peer.joining.idle(now, "caught up", retry=False)
        if not heard:
            self._peer.anchor(standing.version, now)
        gathering = self._peer.gathering
        if gathering is not None:
            gathering.passed.discard(self._me)
            self._peer.leading.stand_elsewhere(gathering, now)
            self._peer.joining.maybe_come(self._me, now, now)
        elif called is not None and now < called[1]:
            self._peer.joining.maybe_come(called[0], called[1], now)
