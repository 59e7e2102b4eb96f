"""An agent's way into its run: from a checkpoint, from the other peers, or as the run's founder.

The trainer waits meanwhile. A run is not founded while other peers have a state of it, a peer whose
model does not fit is refused, and the wait for a state whose holders are gone has an end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

import numpy as np
from multiaddr import Multiaddr

from averaging.history.state import FragmentState, Pieces
from averaging.live.averager import Averager
from averaging.numbers.arrays import Float32s
from averaging.round.interface.phase import Phase as RoundPhase
from dht import addresses as address_rules
from dht.identity import PeerId
from dht.presence.intake import Misfit
from peer.agent.account import Account
from peer.agent.leaving import send_standing
from peer.agent.peer import Peer
from peer.agent.questions import differences
from peer.agent.services import FirstStates
from peer.agent.slots import SlotPort
from peer.bridge.messages import Begin
from peer.bridge.shared_memory import SharedTensors
from peer.errors import Declined, ModelMismatch, RunOver, RunRefused, Unusable
from peer.quantities import duration_text, peers_text
from peer.rules.ending import State, ended
from peer.rules.leaving import Departure
from peer.rules.others import UNTESTED, agree, first_asked, heaviest, may_found
from peer.status import PeerStatus
from peer.storage.earlier import date_text, remembered
from peer.storage.home import PEERS
from peer.storage.outer_state import OuterState

FOUNDER_PATIENCE_S = 60.0
"""Time for which a newcomer leaves founding to another one."""

ANSWERED_WITHIN_S = 10.0
"""Time for which a newcomer that would found the run waits for the word of others in sight."""

REFUSE_AFTER_S = 6.0
"""Time to meet peers of this layout before those of another one make this peer give up."""

GONE_AFTER_S = 60.0
"""Time without any peer that has a state after which a newcomer gives up."""

SETTLE_AFTER_S = 20.0
"""Time to hear of newer states when the trainer has parameters of the run already."""

FRIENDS_WITHIN_S = 6.0
"""The same when the trainer waits for its first parameters."""

TOLD_AFTER_S = 10.0
"""Time of waiting for the run's peers after which the owner is told, and again whenever it has
doubled."""

TOLD_EVERY_MAX_S = 3600.0
"""Longest time between two such messages to the owner."""

COMPARED_WITHIN_S = 5.0
ASKED_EVERY_S = 1.0
"""A peer that has not noticed yet that an agent died sends its answer to that one."""
CAUGHT_UP_WITHIN_S = 600.0
HELD_EVERY_S = 0.05


class Entrance:
    """One agent's way into its run."""

    def __init__(
        self,
        peer: Peer,
        port: SlotPort,
        memory: SharedTensors,
        account: Account,
        begin: Begin,
    ) -> None:
        self._peer = peer
        self._port = port
        self._memory = memory
        self._account = account
        self._begin = begin
        self._tell_at = 0.0
        self._known: str | None = None
        """Memory of the run on this machine, in words."""

    def __repr__(self) -> str:
        return f"Entrance({self._peer!r})"

    async def first_states(self) -> FirstStates:
        """A checkpoint's states, a founder's own parameters, or nothing if others have a state."""
        here = self._peer
        outer = await asyncio.to_thread(here.load_checkpoint)
        if outer is not None:
            here.network.presence.door.take(outer.directives)
        self._account.open(
            None if outer is None else outer.ledger,
            earlier_tokens=self._begin.earlier_tokens,
            ended_cleanly=self._begin.ended_cleanly,
        )
        fragments = range(self._memory.fragments)
        settled = tuple(self._account.ledger.settled(fragment) for fragment in fragments)
        for fragment in fragments:
            self._port.resume(fragment, self._known_base(outer, fragment))
        if outer is not None and here.owner.takes_back_checkpoint(outer):
            roots = await asyncio.to_thread(here.owner.roots)
            states = tuple(root for root in roots if root is not None)
            outer = replace(outer, states=states) if len(states) == len(roots) else None
        if outer is not None:
            here.enter_phase("fetching", "going on from the last checkpoint", 0.0)
            return FirstStates(outer.states, settled=settled)
        if await self._somebody_has_a_state():
            if here.ending.departure is None:
                here.enter_phase("fetching", "downloading the state of the run", 0.0)
            return FirstStates()
        return await self._found()

    async def arrive(self) -> None:
        """Be in the run once the trainer holds every state, and it offers nothing before.

        Where nobody is known that can be dialled, others have to try it with this peer first. The
        outcome decides who leads: two that heard of it in the midst of rounds, one after the other,
        both led.
        """
        here, fragments = self._peer, range(self._memory.fragments)
        while True:
            await asyncio.sleep(HELD_EVERY_S)
            if all(self._port.holds(index) for index in fragments):
                break
        others = here.live_peers
        nobody_leads = bool(others) and not any(seen.reachable for seen in others)
        if nobody_leads and not here.network.dialled.is_set():
            here.enter_phase(here.phase, UNTESTED, 1.0)
            await here.network.until_dialled()
        if here.ending.state is State.ARRIVING:
            here.enter_phase("ready", "in the run", 1.0)

    def _known_base(self, outer: OuterState | None, fragment: int) -> Float32s | None:
        held = self._memory.base(fragment)
        if outer is None or held is None or outer.states[fragment].lineage != held.lineage:
            return None
        return outer.states[fragment].theta

    async def _somebody_has_a_state(self) -> bool:
        """Look for peers that are in the run. ``False``: this peer has to found it."""
        here, network = self._peer, self._peer.network
        loop, rng = asyncio.get_running_loop(), np.random.default_rng()
        patience_s = self._begin.found_after_s
        began = loop.time()
        found_at = math.inf if patience_s is None else began + patience_s
        misfit_since = math.inf
        self._tell_at = began + TOLD_AFTER_S
        while here.ending.departure is None:
            members = network.live_members()
            live = [member.peer for member in members]
            asked = first_asked(live, rng)
            answers = await network.statuses(asked, enough=partial(self._is_decided, len(asked)))
            others = self._other_models(answers)
            if others is None:
                self._follow_one_founding(answers)
                return True
            if others:
                # To found the run once more would split it, whatever the patience.
                misfit_since = min(misfit_since, loop.time())
                if loop.time() - misfit_since >= REFUSE_AFTER_S:
                    raise await self._mismatch(others[0])
                await asyncio.sleep(0.2)
                continue
            out_of_patience = loop.time() >= found_at
            if patience_s != 0.0 and not live:
                self._check_who_answered(out_of_patience=out_of_patience)
            is_late = loop.time() >= found_at + FOUNDER_PATIENCE_S
            learners = {member.peer for member in members if member.record.role == "learner"}
            rivals: dict[PeerId, PeerStatus | None] = dict.fromkeys(learners & set(asked))
            rivals |= {PeerId(each.peer): each for each in answers if each.role == "learner"}
            waited = loop.time() >= found_at + ANSWERED_WITHIN_S
            is_there = any(member.record.versions for member in members)
            is_first = not is_there and may_found(here.me, rivals, waited=waited)
            if is_late or (out_of_patience and is_first):
                return False
            if patience_s is None:
                self._check_known_end(loop.time() - began, is_there=is_there)
                self._tell_of_waiting(loop.time() - began, company=bool(live))
            await asyncio.sleep(0.2)
        return True

    def _other_models(self, answers: Sequence[PeerStatus]) -> tuple[PeerStatus, ...] | None:
        own = self._peer.description.frozen_hash
        frozen = None if self._begin.allow_frozen_differences else own
        return other_models(self._peer.layout.hash.hex(), frozen, answers)

    def _is_decided(self, asked: int, answers: Sequence[PeerStatus]) -> bool:
        """True if this peer fetches, and knows what, before one that is gone fails to answer."""
        return self._other_models(answers) is None and agree(answers, asked)

    def _follow_one_founding(self, answers: Sequence[PeerStatus]) -> None:
        """Begin with states of the heaviest founding, and not with one of each.

        Raises ``RunOver`` if the run has ended.
        """
        here = self._peer
        over = ended(
            here.owner.run_now.end,
            answers,
            now=datetime.now(UTC),
            ordered=here.owner.orders.end is not None,
        )
        if over is not None:
            at, tokens = over
            raise RunOver(here.run_file.name, date_text(at), tokens)
        here.network.follow(heaviest(answers))

    def _check_date(self) -> None:
        """Raise ``Declined`` if the run is over by its date."""
        left_s = self._peer.seconds_left()
        if left_s is not None and left_s <= 0:
            raise self._ended(f"ended at {self._peer.owner.run_now.end.date:%Y-%m-%d %H:%M} UTC")

    def _ended(self, how: str) -> Declined:
        """The run is over, as far as is known here."""
        return Declined(
            f"run {self._peer.run_file.name!r} {how}, and no peer with its state is online; ask "
            "one of its peers for the exported model, or found a new run with another end",
            section="run-ended",
        )

    def _check_known_end(self, waited_s: float, *, is_there: bool) -> None:
        """Raise ``Declined`` if a newcomer waits for a run that its date or its owner has ended.

        ``is_there``: a peer in sight has a state of it. An owner's order is heard from peers
        without a state as well.
        """
        end = self._peer.owner.orders.end
        if is_there or waited_s < TOLD_AFTER_S:
            return
        self._check_date()
        if end is not None and end.version is not None:
            raise self._ended(f"was ended by its owner, at version {end.version}")

    def _tell_of_waiting(self, waited_s: float, *, company: bool) -> None:
        """Say that nobody is here, and what is known of the run, at times ever further apart."""
        now = asyncio.get_running_loop().time()
        if now < self._tell_at:
            return
        self._tell_at = now + max(TOLD_AFTER_S, min(waited_s, TOLD_EVERY_MAX_S))
        here = self._peer
        if self._known is None:
            self._known = remembered(here.run_id, here.directory)
            if not self._begin.settings.seeds and not (here.directory / PEERS).exists():
                self._known += "; there is no address to ask: get a link with one"
        who = "nobody here has the state of this run" if company else "nobody of this run is here"
        here.enter_phase(
            "waiting",
            f"{who} ({self._known}); still looking after {duration_text(waited_s)}, and joins when "
            "somebody comes",
            0.0,
        )

    async def _mismatch(self, other: PeerStatus) -> ModelMismatch:
        """The error that says how this peer's model differs from that of ``other``."""
        here = self._peer
        frozen = other.layout == here.layout.hash.hex()
        ours, theirs = here.layout.hash.hex(), other.layout
        if frozen:
            ours, theirs = here.description.frozen_hash, other.frozen
        peer = PeerId(other.peer)
        differing = await differences(here.network, here.run_id, here.description, peer)
        return ModelMismatch(here.run_file.name, ours, theirs, differing, len(differing), frozen)

    def _check_who_answered(self, *, out_of_patience: bool) -> None:
        seeds = {address_rules.peer_of(Multiaddr(seed)) for seed in self._begin.settings.seeds}
        misfits = self._peer.network.presence.misfits
        peer = wrong_peer(misfits, seeds, out_of_patience=out_of_patience)
        if peer is not None:
            misfit = misfits[peer]
            if misfit.advice:
                raise Declined(
                    f"peer {peer} speaks protocol versions {misfit.theirs}, this peer "
                    f"{misfit.ours}: {misfit.advice}",
                    section="protocol-refused",
                )
            raise RunRefused(f"the {misfit.what} of peer {peer}", misfit.ours, misfit.theirs)

    async def _found(self) -> FirstStates:
        """Make the trainer's own parameters version 0 of the run.

        Raises ``Unusable`` if they are not all finite, or ``Declined`` if the run is over.
        """
        here = self._peer
        self._check_date()
        nobody = "nobody else is here"
        if others := len(here.network.live_members()):
            nobody = f"nobody has its state ({peers_text(others)} in sight)"
        here.enter_phase("founding", f"{nobody}: founding the run", 0.0)
        states: list[FragmentState] = []
        for fragment in range(self._memory.fragments):
            values = None
            while values is None and here.ending.departure is None:
                values = await self._port.values(fragment, timeout_s=1.0)
            if values is None:
                return FirstStates()
            theta = here.floats(values.size)
            np.copyto(theta, values)
            if not np.isfinite(theta).all():
                units = here.layout.fragments[fragment].units
                bad = next(each for each in units if not np.isfinite(theta[each.values]).all())
                raise Unusable(
                    f"{bad.tensor} has values that are not finite (NaN or infinity), so run "
                    f"{here.run_file.name!r} is not founded: no other peer would take its state; "
                    "initialise all parameters before peer.join (to_empty and torch.empty leave in "
                    "them what was in memory)",
                    section="weights-not-finite",
                )
            part, mu = here.layout.fragments[fragment], here.run_file.outer.momentum
            momentum = Pieces.of(part, mu).momentum
            state = FragmentState.founded(here.layout.hash, fragment, theta, momentum)
            states.append(state)
            self._port.adopt(fragment, state, contained=self._memory.offered(fragment)[0])
        here.event("founded", fragments=len(states))
        return FirstStates(tuple(states))

    async def go_on_from_checkpoint(self, averager: Averager, first: FirstStates) -> None:
        """Compare the checkpoint with the other peers, then give its states to the trainer.

        A trainer may be ahead of its new agent; its parameters are not set back. It waits while
        newer states may still come. States that the averager fetches reach the trainer anyway.
        """
        if first.settled is None:
            return
        waiting = await self._compared(averager, first.states)
        for fragment, state in waiting.items():
            held = self._memory.base(fragment)
            if averager.states[fragment] is not state:
                continue  # a newer one has come since the last look
            if held is None or state.follows(held.version, held.lineage):
                self._port.adopt_first(fragment, state)
            else:
                # No live peer has this version: it was lost with the agent before this one.
                since = state.version
                self._peer.event("kept", fragment=fragment, version=held.version, since=since)
                self._port.keep(fragment, state, tokens=first.settled[fragment])

    async def _compared(
        self, averager: Averager, states: Iterable[FragmentState]
    ) -> dict[int, FragmentState]:
        """Ask other peers for newer states. Returns those for which none came, by fragment, but
        for those that the trainer has already."""
        here, loop = self._peer, asyncio.get_running_loop()
        waiting = {state.fragment: state for state in states}
        asked, ask_at = 0, loop.time()
        deadline, last = loop.time() + self._patience_s(), loop.time() + CAUGHT_UP_WITHIN_S
        while waiting:
            fetches = any(averager.phases[each] is RoundPhase.CATCHING for each in waiting)
            if loop.time() >= (last if fetches else deadline):
                break
            here.refresh_view()
            live = sorted(here.view)
            if live and loop.time() >= ask_at:
                if not asked:
                    deadline = min(deadline, loop.time() + COMPARED_WITHIN_S)
                for state in waiting.values():
                    send_standing(averager, live[(state.fragment + asked) % len(live)], state)
                asked, ask_at = asked + 1, loop.time() + ASKED_EVERY_S
            for fragment, state in list(waiting.items()):
                held, current = self._memory.base(fragment), averager.states[fragment]
                if current is not state or (held is not None and held.lineage == state.lineage):
                    del waiting[fragment]
                    if current is state:
                        self._port.adopt_first(fragment, state)
            await asyncio.sleep(0.05)
        return waiting

    def _patience_s(self) -> float:
        """Time to hear of states that are newer than those of the checkpoint."""
        if any(self._memory.base(each) is not None for each in range(self._memory.fragments)):
            return SETTLE_AFTER_S
        has_friends = bool(self._begin.settings.seeds) or (self._peer.directory / PEERS).exists()
        return FRIENDS_WITHIN_S if has_friends else 0.0

    async def give_up_when_nobody_is_left(self) -> None:
        """End a newcomer's wait for a state when no live peer has one any more."""
        here, loop = self._peer, asyncio.get_running_loop()
        seen_at = loop.time()
        while here.phase == "fetching" and any(state is None for state in here.states):
            if any(member.record.versions for member in here.network.live_members()):
                seen_at = loop.time()
            elif loop.time() - seen_at >= GONE_AFTER_S:
                nobody = (
                    f"nobody who has the run's state was there for {GONE_AFTER_S:.0f} s; "
                    "join again when one of its peers is back"
                )
                here.end.hear(Departure(nobody, 3, finished=False, timeout_s=0.0))
                return
            await asyncio.sleep(1.0)


def other_models(
    layout: str, frozen: str | None, answers: Sequence[PeerStatus]
) -> tuple[PeerStatus, ...] | None:
    """The answers with a state, if none of them is of this peer's model; ``None`` if one is.

    Empty while no answer has a state. ``frozen``: the hash of the own frozen parameters, empty if
    it is not known; ``None``: they may differ.
    """
    holders = tuple(answer for answer in answers if answer.versions)
    for each in holders:
        same_frozen = not frozen or each.frozen in ("", frozen)
        if each.layout == layout and same_frozen:
            return None
    # One with the same layout first: it says how the frozen parameters differ.
    return tuple(sorted(holders, key=lambda each: each.layout != layout))


def wrong_peer(
    misfits: Mapping[PeerId, Misfit],
    seeds: Set[PeerId | None],
    *,
    out_of_patience: bool,
) -> PeerId | None:
    """A peer that proves that the seeds belong to another run, or to another protocol version.

    Peers of other runs are met in the directory as well. Only seeds, and members of the run itself
    with another protocol version, are proof. ``None`` among the seeds is an address without a peer
    id. Returns ``None`` if there is no proof.
    """
    speakers = [peer for peer, misfit in misfits.items() if misfit.what != "run"]
    wrong = [peer for peer in seeds if peer is not None and peer in misfits]
    if (out_of_patience and (speakers or wrong)) or (wrong and len(wrong) == len(seeds)):
        return [*speakers, *wrong][0]
    return None
