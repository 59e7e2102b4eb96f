"""One fragment at one peer: carries out what its round machine decides.

The part of ``averaging.live.averager`` of which there is one for each fragment: its state and
replay log, the learner's snapshot, the exchanges of the rounds that are under way or may still be
asked for.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np

from averaging.history.adoption import Parting
from averaging.history.lineage import Lineage
from averaging.history.manifest import numbers_digest
from averaging.history.replay import ReplayEntry, ReplayHead, ReplayLog
from averaging.history.standing import Standing, sealed_parents
from averaging.history.state import FragmentState
from averaging.live.following import Following
from averaging.live.learner_port import LearnerPort, Progress, Snapshot
from averaging.live.services import Services
from averaging.live.slices.exchange import Exchange
from averaging.live.slices.parts import FragmentFacts
from averaging.live.slices.reducing import Reducing
from averaging.live.states.state_files import StateFiles
from averaging.messages import Commit, Head
from averaging.numbers.arithmetic import encoded_size
from averaging.round.contributing import contribution
from averaging.round.interface import effects
from averaging.round.interface.effects import Apply, Effect
from averaging.round.interface.identity import Circumstances, Identity
from averaging.round.interface.inputs import (
    Applied,
    Folded,
    Input,
    MergedArrived,
    Offer,
    Offered,
    Progressed,
    SliceMerged,
    SliceOutcome,
    UploadArrived,
)
from averaging.round.interface.phase import Phase, Stage
from averaging.round.machine import FragmentRounds
from averaging.round.turns import rank
from averaging.rules.sites import site_pass
from averaging.rules.usual_norms import UsualNorms
from dht.bounded_mapping import BoundedMapping, by_age

NUMBER_BITS = 48
"""Bits of the random number that this peer's commits and joins begin with."""
GOOD_VERSIONS = 8
"""Every so many versions a state is kept, to be attested (``averaging.history.manifest``): the same
ones at all peers, or none of them would be at more than one."""
REDUCED_MAX = 2
"""Rounds of one fragment that were reduced for others, and are kept until they are replayed."""


class FragmentWork:
    """One fragment: its machine, its numbers, and what is under way for it."""

    def __init__(self, averager: Services, index: int, state: FragmentState | None) -> None:
        self.averager = averager
        self.index = index
        self.fragment = averager.terms.layout.fragments[index]
        self.state: FragmentState | None = None
        self.earlier_tokens = 0
        """Tokens of this peer's earlier incarnations in the state that it follows."""
        self.replay: ReplayLog | None = None
        self.exchanges: dict[bytes, Exchange] = {}
        self.snapshot: Snapshot | None = None
        """Taken from the learner, and not yet given back by ``adopt`` or ``release``."""
        self.tick_at: float | None = None
        """The machine's deadline, as of its last input."""
        self._facts = FragmentFacts(
            self.fragment,
            UsualNorms(),
            lambda: None if self.state is None else self.state.theta,
            lambda peer: self.state is None or self.state.merged.takes(peer),
            self._slice_ended,
            self.event,
        )
        self._reduced = BoundedMapping[Lineage, ReplayEntry](
            "reduced for others", REDUCED_MAX, worth=by_age
        )
        """Rounds of others that were reduced here, by the state that they follow on."""
        self.following = Following(self)
        self._asking = False
        self._wants_another = False
        """Another snapshot is to be taken as soon as the last one is put away."""
        if state is not None:
            self.set_state(state)
        self.machine = self._new_machine()

    @property
    def is_busy(self) -> bool:
        """True from the question to the learner to the end of the round."""
        return self._asking or self.snapshot is not None or self.is_exchanging

    @property
    def is_exchanging(self) -> bool:
        """True while this peer is a member of a round."""
        return self.machine.own_round is not None

    @property
    def _is_applying(self) -> bool:
        """True while the outer step of the own round is taken."""
        own = self.machine.own_round
        return own is not None and own.stage is Stage.APPLYING

    def rank(self) -> tuple[int, int]:
        """Sort key: the fragments that go first when not all can."""
        return rank(self.machine)

    def follow(self, state: FragmentState) -> None:
        """This peer's work is accounted for in this state from now on."""
        life = self.averager.life
        self.earlier_tokens = life.earlier_tokens(state.merged, self.earlier_tokens)

    def set_state(self, state: FragmentState) -> None:
        if self.state is None:
            self.follow(state)
        self.state = state
        settings, layout = self.averager.settings, self.averager.terms.layout
        share = settings.replay_bytes_max * self.fragment.size // layout.size
        if self.replay is None:
            self.replay = ReplayLog(bytes_max=share, lineage=state.lineage)
        else:
            self.replay.restart(state.lineage)

    async def put_away(self, files: StateFiles) -> bool:
        """Move the state's numbers from memory to files. ``False``: there is no room for them."""
        state = self.state
        if state is None or not self._rests_on(state) or _is_put_away(state, files):
            return True

        def moved() -> FragmentState:
            theta, momentum = files.put_away(state.theta), files.put_away(state.momentum)
            return replace(state, theta=theta, momentum=momentum)

        filed = await asyncio.to_thread(moved)
        if self._rests_on(state):
            self.state = filed
            if self.averager.port is not None:
                self.averager.port.moved(self.index, state, filed)
        return _is_put_away(filed, files)

    def _rests_on(self, state: FragmentState) -> bool:
        """True if nothing that is under way goes on from this state, or has replaced it."""
        moves_on = self._is_applying or self.machine.phase is Phase.CATCHING
        return self.state is state and not moves_on

    def keep_for_replay(self, entry: ReplayEntry, lineage: Lineage) -> None:
        """Keep a round that led to ``lineage``, for those who are behind."""
        assert self.replay is not None
        self.replay.append(entry, lineage)
        files = self.averager.around.state_files
        if files is not None:
            self.averager.spawn(self._move(entry, files), f"keep a round of fragment {self.index}")

    async def _move(self, entry: ReplayEntry, files: StateFiles) -> None:
        """Move a payload from the buffers of its round to a file."""
        payload = await asyncio.to_thread(files.kept, entry.payload)
        if self.replay is not None:
            self.replay.move(entry, payload)

    def shown(self, state: FragmentState) -> Head:
        """The head of a state as other peers are shown it: with the signatures under it."""
        return self.machine.certificates.show(Standing.of(state).head(), self.averager.now())

    def usual_norm(self) -> float | None:
        """The usual distance by which a merge moves the fragment; ``None``: not known yet."""
        return self._facts.usual.norm(slice(None))

    def start(self) -> None:
        averager = self.averager
        self._find_first_state()
        if averager.port is None:
            averager.spawn(self.following.look_round(), f"look round for fragment {self.index}")

    async def begin_again(self, state: FragmentState | None, *, reason: str) -> None:
        """Go on from ``state`` with a machine that knows nothing; ``None``: fetch a first one."""
        averager = self.averager
        await averager.until(lambda: not self._is_applying)
        for exchange in self.exchanges.values():
            averager.spawn(exchange.close(), f"close exchange of fragment {self.index}")
        self.exchanges.clear()
        self._reduced.clear()
        self.state = self.replay = self.snapshot = None
        if state is not None:
            self.set_state(state)
            if averager.port is not None:
                averager.port.discard(self.index, state, reason=reason)
        self.machine = self._new_machine()
        self._find_first_state(gives_up=reason)
        self.do([])

    def _new_machine(self) -> FragmentRounds:
        averager = self.averager
        port = averager.port
        identity = Identity(
            me=averager.life.peer,
            incarnation=averager.me.incarnation,
            fragment=self.index,
            topic=averager.topic,
            policy=averager.terms.policy.of_kinds(self.fragment.kinds),
            codecs=averager.me.codecs,
            encoded_bytes=self._encoded_bytes,
            sign=averager.me.identity.sign,
            verify=averager.around.verify,
            founder=averager.me.founder,
            speaks=averager.me.speaks,
            site=site_pass(averager.me.site, averager.me.identity.peer_id),
            norm_ratio_max=averager.settings.norm_ratio_max,
            refuses=averager.workshop.refuses,
            first_number=averager.around.draw_bits(NUMBER_BITS),
            book=averager.terms.book,
            spacing=averager.spacing,
            kinds=frozenset(self.fragment.kinds),
        )
        machine = FragmentRounds(
            identity,
            Circumstances(
                port is not None,
                averager.reachable,
                averager.bytes_per_s,
                averager.around.absent,
            ),
            view=averager.around.view,
            standing=None if self.state is None else Standing.of(self.state),
            electors=averager.electors,
            step=port.progress().step if port is not None else 0,
            now=averager.now(),
        )
        averager.around.watch.began(machine)
        return machine

    def _find_first_state(self, *, gives_up: str | None = None) -> None:
        """Fetch a state from others if this peer has none."""
        averager = self.averager
        if self.state is None:
            averager.spawn(
                self.following.begin_from_nothing(gives_up=gives_up),
                f"first state of fragment {self.index}",
            )

    def keep_if_good(self, state: FragmentState) -> None:
        """Keep a state that all peers keep, for the run's owner to attest."""
        averager, keep_state = self.averager, self.averager.around.keep_state
        if keep_state is not None and not state.version % GOOD_VERSIONS:
            # It writes to a disk: the threads are for work on numbers, which rounds wait for.
            keeping = asyncio.to_thread(keep_state, state)
            averager.spawn(keeping, f"keep a state of fragment {self.index}")

    @property
    def upload_bytes(self) -> int:
        """Encoded size of a contribution at the present level."""
        return self._encoded_bytes(self.machine.pace.level.codec)

    def _encoded_bytes(self, codec: str) -> int:
        return encoded_size(codec, self.fragment.unit_sizes)

    # Inputs

    def progressed(self, progress: Progress) -> None:
        waits = self.averager.has_its_turn_later(self.index)
        given = Progressed(progress.step, progress.step_time_s, waits)
        if wanted := self.machine.handle(given, self.averager.now()):
            self.do(wanted)

    def take(self, given: Input) -> None:
        """Give the machine an input and carry out what it wants."""
        self.do(self.machine.handle(given, self.averager.now()))

    def _slice_ended(self, given: SliceOutcome) -> None:
        """Tell the machine what became of a slice of a round."""
        averager = self.averager
        match given:
            case UploadArrived(_, _, sender, str(problem)) if sender != averager.life.peer:
                averager.blame(sender, "upload_refused", problem, fragment=self.index)
        self.take(given)
        if isinstance(given, SliceMerged | MergedArrived):
            self.keep_reduced(given.round)

    def do(self, wanted: list[Effect]) -> None:
        """Carry effects out, in their order."""
        watch = self.averager.around.watch
        for given in wanted:
            if (effect := watch.effect(self.index, given)) is not None:
                self._do(effect)
        self.tick_at = self.machine.deadline
        self.averager.set_timer()
        self.averager.changed()
        watch.handled(self.index)

    def _do(self, effect: Effect) -> None:
        match effect:
            case effects.Send():
                self.averager.send(effect.to, effect.message)
            case effects.WarnOfCommit():
                self.averager.not_a_commit(effect.peer, effect.reason, fragment=self.index)
            case effects.Note() as note:
                if isinstance(note, effects.Blame):
                    self._blame(note)
                self.event(note.event, **note.fields)
            case effects.TakeSnapshot():
                self._take_snapshot()
            case effects.Enter():
                self._enter(effect)
            case effects.Reduce():
                self._reducing(effect.round).reduce(effect.slice)
            case effects.Upload():
                self.exchanges[effect.round].uploading.upload(
                    effect.slice, effect.to, gives=effect.gives
                )
            case effects.Merge():
                self._reducing(effect.round).merge(effect)
            case Apply():
                self.averager.spawn(self._apply(effect), f"apply fragment {self.index}")
            case effects.GiveUp():
                self._give_up(effect)
            case effects.Discard():
                self._discard(effect)
            case effects.Presume():
                self.averager.spawn(self._presume(effect), f"presume fragment {self.index}")
            case effects.Forget():
                self._forget(effect.round)
            case effects.CatchUp():
                self.averager.spawn(
                    self.following.catch_up(effect), f"catch up fragment {self.index}"
                )
            case effects.Fold():
                self.averager.spawn(self._fold(effect), f"fold fragment {self.index}")

    def event(self, event: str, **fields: Any) -> None:
        self.averager.event(event, fragment=self.index, **fields)

    def _reducing(self, round_id: bytes) -> Reducing:
        return self.exchanges[round_id].reducing

    def _blame(self, blame: effects.Blame) -> None:
        """Hold against a peer what it has done."""
        averager, peer, reason = self.averager, blame.peer, blame.reason
        match blame:
            case effects.Strike():
                averager.strike(peer, blame.deed, reason, fragment=self.index)
            case effects.CountRefused():
                if peer != averager.life.peer:
                    averager.blame(peer, blame.kind, reason, fragment=self.index)
            case effects.LeaveOut():
                exchange = self.exchanges[bytes.fromhex(str(blame.fields["round"]))]
                exchange.parts.tally.refused[peer] = reason
                if isinstance(index := blame.fields.get("slice"), int):
                    if peer != averager.life.peer:
                        averager.blame(peer, "upload_refused", reason, fragment=self.index)
                    entry = exchange.parts.commit.index(peer)
                    assert entry is not None
                    exchange.reducing.left_out(index, entry, reason)

    # The learner

    def _take_snapshot(self) -> None:
        averager = self.averager
        assert averager.port is not None
        if averager.has_place() and not self.is_busy:
            self._asking = True
            averager.spawn(self._ask(averager.port), f"snapshot of fragment {self.index}")
        elif self._asking:
            # It was asked for before this peer caught up. A leader waits for the next one.
            self._wants_another = True
        else:
            # From inside of the machine's own effects it must not be called: next turn.
            asyncio.get_running_loop().call_soon(averager.turn_away, self.index)

    async def _ask(self, port: LearnerPort) -> None:
        timeout_s = self.averager.terms.policy.snapshot_s
        try:
            self.snapshot = await port.snapshot(self.index, timeout_s=timeout_s)
        finally:
            self._asking = False
        if not self._wants_another:
            await self._offer(self.snapshot)
            return
        self._wants_another = False
        if self.snapshot is not None:
            await self._release_now(self.snapshot)
        if self.machine.phase is Phase.WANTED:
            self._take_snapshot()

    async def _offer(self, snapshot: Snapshot | None) -> None:
        assert self.averager.port is not None
        offer = None
        if snapshot is not None:
            offer = Offer(
                mark=snapshot.mark,
                steps=snapshot.steps,
                tokens=snapshot.tokens,
                base_version=snapshot.base_version,
                base_lineage=snapshot.base_lineage,
                batch_tokens_max=self.averager.port.progress().batch_tokens_max,
            )
        self.take(Offered(self.averager.around.watch.offers(offer)))

    def _release(self) -> None:
        """Give the learner its arrays back, once no thread reads them any more."""
        if self.snapshot is not None:
            self.averager.spawn(self._release_now(self.snapshot), f"release {self.index}")

    async def _release_now(self, snapshot: Snapshot) -> None:
        await self.stop_encoding()
        if self.snapshot is snapshot and self.averager.port is not None:
            self.snapshot = None
            self.averager.port.release(self.index)
            self.averager.changed()

    async def stop_encoding(self) -> None:
        for exchange in list(self.exchanges.values()):
            await exchange.stop_encoding()

    def adopt(self, state: FragmentState, *, contained: int | None) -> None:
        self.snapshot = None
        if self.averager.port is not None:
            self.averager.port.adopt(self.index, state, contained=contained)

    def rebase(self, state: FragmentState, parting: Parting) -> int | None:
        port = self.averager.port
        regained = None if port is None else port.rebase(self.index, state, parting)
        if regained is not None:
            self.snapshot = None
        return regained

    def _give_up(self, effect: effects.GiveUp) -> None:
        if effect.round is not None:
            self._tell_of_round(effect.round, None, effect.reason)
        if not effect.in_doubt:
            self._release()

    async def _presume(self, effect: effects.Presume) -> None:
        """Mark the offered work as merged: it is, on another lineage."""
        await self.stop_encoding()
        if self.state is not None:
            self.adopt(self.state, contained=effect.mark)

    def _discard(self, effect: effects.Discard) -> None:
        port = self.averager.port
        assert port is not None and self.state is not None
        self.snapshot = None
        self.event("discarded", reason=effect.reason)
        port.discard(self.index, self.state, reason=effect.reason)

    async def _fold(self, effect: effects.Fold) -> None:
        """Make the learner's parameters the state, as the only peer."""
        if self.snapshot is None or self.state is None:
            return  # the run was taken back meanwhile
        values = self.averager.floats(self.fragment.size)
        np.copyto(values, self.snapshot.values)
        if not np.isfinite(values).all():
            self.event("not_finite", reason="fold")
            self._release()
            return
        before, stale_max = self.state, self.averager.terms.policy.stale_max
        assert self.replay is not None
        self.state = state = effect.standing.state(self.index, values, before.momentum)
        self.averager.around.watch.folded(effect, before, state)
        self.replay.fold(before, state, versions_max=stale_max)
        self.adopt(state, contained=effect.contained)
        self.averager.stats.folds += 1
        self.take(Folded())

    # Rounds

    def reduced(self, parent: Lineage) -> ReplayEntry | None:
        """The round that follows on ``parent``, if this peer reduced all of it for others."""
        return self._reduced.get(parent)

    def keep_reduced(self, round_id: bytes) -> None:
        """Keep a round of others when all of its slices were merged here: it need not be fetched.

        A peer without a learner hears that it is behind when the round is long forgotten.
        """
        part, exchange = self.machine.rounds.get(round_id), self.exchanges.get(round_id)
        outcome = None if part is None else part.reduced()
        if outcome is not None and exchange is not None:
            head = ReplayHead(exchange.parts.encoded_commit, *outcome)
            self._reduced[head.parent] = ReplayEntry(head, exchange.parts.merged_bytes)

    def _enter(self, effect: effects.Enter) -> None:
        averager = self.averager
        # Streams and threads are on the loop's time.
        now = averager.now() - averager.around.clock_s
        exchange = Exchange(effect, self._facts, averager.workshop, now=now)
        self.exchanges[effect.round] = exchange
        if effect.entry is None:
            return
        snapshot, policy = self.snapshot, self.machine.identity.policy_at(effect.commit.version)
        offered = None if snapshot is None else (snapshot.base, snapshot.values)
        given = contribution(effect, self.state, offered, policy)
        given = averager.around.watch.contributes(effect.commit, given)
        if given is not None:
            exchange.contribute(given)

    def _forget(self, round_id: bytes) -> None:
        exchange = self.exchanges.pop(round_id, None)
        self.averager.guard.forgot(round_id, None if exchange is None else exchange.parts)
        if exchange is not None:
            tally = exchange.parts.tally
            self.averager.stats.sent_bytes += tally.sent_bytes
            self.averager.stats.received_bytes += tally.received_bytes
            self.averager.tell_line_speed()
            self.averager.spawn(exchange.close(), f"forget {round_id.hex()[:8]}")

    async def _apply(self, effect: Apply) -> None:
        """Take the outer step; from here the round cannot fail for this peer."""
        assert self.state is not None
        averager = self.averager
        exchange = self.exchanges[effect.round]
        await self.stop_encoding()
        before = state = self.state
        left = None
        if effect.commit.melds and not self.machine.peers.has_several_groups(averager.now()):
            left = await averager.threads.run(numbers_digest, before)
        state = await exchange.step(state, effect.standing, effect.seal)
        if averager.guard.gate.measures and exchange.is_unusual:
            await averager.guard.gate.before_jump(before, Standing.of(state))
        if self.snapshot is not None:
            await exchange.leave_rests(effect, self.snapshot.values)
        averager.around.watch.applied(
            effect, before, state, exchange.parts.merged_bytes, exchange.parts.maps
        )
        self.state = state
        self.follow(state)
        assert self.replay is not None
        if exchange.parts.commit.melds:
            self.replay.restart(state.lineage)
        else:
            head = ReplayHead(exchange.parts.encoded_commit, effect.seal, effect.digests)
            self.keep_for_replay(ReplayEntry(head, exchange.parts.merged_bytes), state.lineage)
        self.adopt(state, contained=averager.life.contained_by(effect, state.merged, before.merged))
        averager.stats.rounds += 1
        averager.stats.contributed += effect.contained is not None
        self._tell_of_round(effect.round, effect, effect.reason)
        dispersion = exchange.dispersion
        if dispersion is not None:
            self.event("melded", dispersion=dispersion)
        self.take(Applied(effect.round, Standing.of(state), left))
        port = None if self.fragment.has_statistics else averager.port
        step = None if port is None else port.progress().step
        averager.guard.finished(exchange.parts, state.lineage, effect.seal, before.theta, step)
        self.keep_if_good(state)
        if state.version % averager.settings.audit_versions == 0:
            averager.spawn(
                self.following.take_digest(state, effect.commit), f"digest of fragment {self.index}"
            )

    def _tell_of_round(self, round_id: bytes, apply: Apply | None, reason: str) -> None:
        """Emit one event about a round: members, outcome, durations, bytes, who was left out."""
        exchange = self.exchanges.get(round_id)
        if exchange is None:
            return
        parts = exchange.parts
        commit, tally = parts.commit, parts.tally
        seal = apply.seal if apply is not None else ()
        left_out = {
            entry.peer: tally.refused.get(
                entry.peer, "not in every slice by the deadline, or left out by the leader"
            )
            for index, entry in enumerate(commit.members)
            if apply is not None and index not in seal
        }
        began = parts.entered_at
        self.event(
            "round",
            round=round_id.hex(),
            kind=commit.kind,
            version=commit.version,
            outcome="finished" if apply is not None else "given up",
            reason=reason,
            leader=commit.leader,
            members=[entry.peer for entry in commit.members],
            contributors=[commit.members[index].peer for index in seal],
            # The steps of each contributor in it: an audit of a run adds them up.
            marks={
                entry.peer: [entry.incarnation, entry.mark, entry.steps, entry.tokens]
                for entry in (commit.members[index] for index in seal)
            },
            lineage=self.state.lineage.hex() if apply is not None and self.state else None,
            parents=[each.hex() for each in sealed_parents(commit, seal)] if seal else [],
            weights=list(apply.weights) if apply is not None else [],
            left_out=left_out,
            codec=commit.codec,
            codec_down=commit.codecs[1],
            seconds=self.averager.now() - self.averager.around.clock_s - began,
            encoded_s=None if tally.encoded_at is None else tally.encoded_at - began,
            merged_s=None if tally.merged_at is None else tally.merged_at - began,
            sent_bytes=tally.sent_bytes,
            received_bytes=tally.received_bytes,
            received_line_bytes=tally.received_line_bytes,
            **self._by_site(commit),
        )

    def _by_site(self, commit: Commit) -> dict[str, Any]:
        """Delegates by rider; empty without sites."""
        carried = {
            entry.peer: commit.members[entry.delegate].peer
            for entry in commit.members
            if entry.delegate is not None
        }
        return {"delegates": carried} if carried else {}


def _is_put_away(state: FragmentState, files: StateFiles) -> bool:
    return files.is_put_away(state.theta) and files.is_put_away(state.momentum)
