"""How an agent gets into its run: from a checkpoint, from the others, or as its founder.

The trainer waits meanwhile. Nobody founds a run that others have a state of, nobody joins one that
its model does not fit, and nobody waits for ever for a state whose holders are gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence, Set
from datetime import UTC, datetime

from multiaddr import Multiaddr

from averaging import messages as said
from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.numbers.arrays import Float32s
from averaging.round.phase import Phase
from dht import addresses as address_rules
from dht.identity import PeerId
from dht.presence.intake import Misfit
from peer.agent.account import Account
from peer.agent.slots import SlotPort
from peer.agent.station import Station
from peer.bridge.agent_link import Begin
from peer.bridge.shared_memory import SharedTensors
from peer.errors import RunEnded, RunRefused
from peer.rules.ending import seconds_left
from peer.status import Status
from peer.storage.outer_state import OuterState, load_outer

ASKED_FIRST = 8
FOUNDER_PATIENCE_S = 60.0
"""A newcomer leaves founding to another one for so long."""

REFUSE_AFTER_S = 6.0
"""What one peer says of its layout turns nobody away while others may still be met."""

GONE_AFTER_S = 60.0
"""A newcomer gives up when for so long nobody is there who has a state."""

SETTLE_AFTER_S = 20.0
FRIENDS_WITHIN_S = 6.0
COMPARED_WITHIN_S = 5.0
CAUGHT_UP_WITHIN_S = 600.0


class Entrance:
    """One agent's way into its run."""

    def __init__(
        self,
        station: Station,
        port: SlotPort,
        memory: SharedTensors,
        account: Account,
        begin: Begin,
    ) -> None:
        self._station = station
        self._port = port
        self._memory = memory
        self._account = account
        self._begin = begin
        self.founded = False
        """Whether the run begins with this peer's own parameters."""
        self._from_checkpoint: tuple[FragmentState, ...] = ()
        self._settled: list[int] = []
        """Own tokens of this incarnation that the checkpoint has, merged or given up."""

    def __repr__(self) -> str:
        return f"Entrance({self._station!r})"

    async def first_states(self) -> list[FragmentState]:
        """What to begin with: a checkpoint, a founder's own parameters, or nothing yet.

        Nobody but the averager may hold on to them: what they become replaces them there.
        """
        station = self._station
        outer = await asyncio.to_thread(self._load)
        self._account.open(
            None if outer is None else outer.ledger,
            earlier_tokens=self._begin.earlier_tokens,
            ended_cleanly=self._begin.ended_cleanly,
        )
        self._settled = [
            self._account.ledger.settled(fragment) for fragment in range(self._memory.fragments)
        ]
        for fragment in range(self._memory.fragments):
            self._port.resume(fragment, self._known_base(outer, fragment))
        if outer is not None:
            station.tell_phase("fetching", "going on from the last checkpoint", 0.0)
            self._from_checkpoint = outer.states
            return list(outer.states)
        if await self._somebody_has_a_state():
            if station.ending.done():
                return []
            await station.until_dialled()
            station.tell_phase("fetching", "downloading the state of the run", 0.0)
            return []
        return await self._found()

    def _load(self) -> OuterState | None:
        station = self._station
        return load_outer(station.folder, run_id=station.run_id, layout_hash=station.layout.hash)

    def _known_base(self, outer: OuterState | None, fragment: int) -> Float32s | None:
        held = self._memory.base(fragment)
        if outer is None or held is None or outer.states[fragment].lineage != held.lineage:
            return None
        return outer.states[fragment].theta

    async def _somebody_has_a_state(self) -> bool:
        """Look for peers that are in the run. ``False``: it is for this peer to found it."""
        station = self._station
        loop = asyncio.get_running_loop()
        patience_s = self._begin.found_after_s
        found_at = None if patience_s is None else loop.time() + patience_s
        misfit_since: float | None = None
        while not station.ending.done():
            live = [member.peer for member in station.presence.table.live(loop.time())]
            answers = await station.statuses(live[:ASKED_FIRST])
            others = other_layouts(station.layout.hash.hex(), answers)
            if others is None:
                return True
            if others:
                # Founding the run once more would split it, however patient this peer was.
                misfit_since = loop.time() if misfit_since is None else misfit_since
                if loop.time() - misfit_since >= REFUSE_AFTER_S:
                    own = station.layout.hash.hex()
                    raise RunRefused("the layout of the model", own, others[0])
                await asyncio.sleep(0.2)
                continue
            out_of_patience = found_at is not None and loop.time() >= found_at
            if patience_s != 0.0 and not live:
                self._check_who_answered(out_of_patience=out_of_patience)
            if out_of_patience:
                assert found_at is not None
                # Several newcomers and no state among them: the first of them founds the run.
                first = all(station.me < answer.peer for answer in answers)
                if first or loop.time() >= found_at + FOUNDER_PATIENCE_S:
                    return False
            await asyncio.sleep(0.2)
        return True

    def _check_who_answered(self, *, out_of_patience: bool) -> None:
        seeds = {address_rules.peer_of(Multiaddr(seed)) for seed in self._begin.seeds}
        peer = wrong_peer(
            self._station.presence.misfits,
            seeds,
            out_of_patience=out_of_patience,
        )
        if peer is not None:
            misfit = self._station.presence.misfits[peer]
            raise RunRefused(f"the {misfit.what} of peer {peer}", misfit.ours, misfit.theirs)

    async def _found(self) -> list[FragmentState]:
        """The trainer's own parameters are version 0 of the run."""
        station = self._station
        end = station.run_file.end
        left_s = seconds_left(end, station.presence.clock, now=datetime.now(UTC))
        if left_s is not None and left_s <= 0:
            raise RunEnded(station.run_file.name, f"{end.date:%Y-%m-%d %H:%M} UTC")
        station.tell_phase("founding", "nobody else is here: founding the run", 0.0)
        states = []
        for fragment in range(self._memory.fragments):
            values = None
            while values is None and not station.ending.done():
                values = await self._port.values(fragment, timeout_s=1.0)
            if values is None:
                return []
            state = FragmentState.founded(station.layout.hash, fragment, values.copy())
            states.append(state)
            self._port.adopt(fragment, state, contained=self._memory.offered(fragment)[0])
        self.founded = True
        station.event("founded", fragments=len(states))
        return states

    async def go_on_from_checkpoint(self) -> None:
        """With its states: first ask the others how far they are, then take them in.

        A trainer may be further on than its new agent; what it has is not set back. While there is
        hope to hear of newer states it waits. What the averager fetches it hands over by itself.
        """
        states, self._from_checkpoint = self._from_checkpoint, ()
        station, loop = self._station, asyncio.get_running_loop()
        waiting = {state.fragment: state for state in states}
        if any(self._memory.base(fragment) is not None for fragment in waiting):
            patience_s = SETTLE_AFTER_S
        else:
            has_friends = bool(self._begin.seeds) or (station.directory / "peers.json").exists()
            patience_s = FRIENDS_WITHIN_S if has_friends else 0.0
        asked = False
        deadline = loop.time() + patience_s
        last = loop.time() + CAUGHT_UP_WITHIN_S
        while waiting and (
            loop.time() < deadline or (self._is_catching_up(waiting) and loop.time() < last)
        ):
            station.refresh_view()
            live = sorted(station.view)
            if live and not asked:
                asked = True
                await station.until_dialled()
                for index, state in enumerate(states):
                    compare = said.Compare(state.fragment, Standing.of(state).head())
                    to = live[index % len(live)]
                    station.averager.transport.send(to, said.encode(compare))
                deadline = min(deadline, loop.time() + COMPARED_WITHIN_S)
            for fragment, state in list(waiting.items()):
                held, current = self._memory.base(fragment), station.averager.states[fragment]
                if current is not state or (held is not None and held.lineage == state.lineage):
                    del waiting[fragment]
                    if current is state:
                        self._port.adopt_first(fragment, state)
            await asyncio.sleep(0.05)
        for fragment, state in waiting.items():
            held = self._memory.base(fragment)
            if held is None or state.chain.find(held.version, held.lineage) is not None:
                self._port.adopt_first(fragment, state)
            else:
                # A version that nobody here has: it died with the agent before this one.
                station.event("kept", fragment=fragment, version=held.version, since=state.version)
                self._port.keep(fragment, state, tokens=self._settled[fragment])

    def _is_catching_up(self, fragments: Iterable[int]) -> bool:
        """Whether newer states of some of these are on their way."""
        phases = self._station.averager.phases
        return any(phases[fragment] is Phase.CATCHING for fragment in fragments)

    async def give_up_when_nobody_is_left(self) -> None:
        """End a newcomer's wait for a state that nobody who is there has any more."""
        station, loop = self._station, asyncio.get_running_loop()
        seen_at = loop.time()
        while station.phase == "fetching" and any(state is None for state in station.states):
            members = station.presence.table.live(loop.time())
            if any(member.record.versions for member in members):
                seen_at = loop.time()
            elif loop.time() - seen_at >= GONE_AFTER_S:
                station.end(
                    f"nobody who has the run's state was there for {GONE_AFTER_S:.0f} s; "
                    "join again when one of its peers is back",
                    3,
                    finished=False,
                    timeout_s=0.0,
                )
                return
            await asyncio.sleep(1.0)


def other_layouts(own: str, answers: Sequence[Status]) -> tuple[str, ...] | None:
    """The layouts of those who have a state, none of which fits; ``None`` if one does.

    Empty while nobody has a state.
    """
    layouts = tuple(answer.layout for answer in answers if answer.versions)
    return None if own in layouts else layouts


def wrong_peer(
    misfits: Mapping[PeerId, Misfit],
    seeds: Set[PeerId | None],
    *,
    out_of_patience: bool,
) -> PeerId | None:
    """Somebody who shows that this peer was sent to another run, or to a later protocol.

    Strangers of other runs are met in the directory as well; only seeds, and members of the
    run itself who speak another protocol, say something about where this peer wants to go.
    ``None`` among the seeds is an address that does not say whose it is.
    """
    speakers = [peer for peer, misfit in misfits.items() if misfit.what != "run"]
    wrong = [peer for peer in seeds if peer is not None and peer in misfits]
    if (out_of_patience and (speakers or wrong)) or (wrong and len(wrong) == len(seeds)):
        return [*speakers, *wrong][0]
    return None
