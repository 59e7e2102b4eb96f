"""An agent's way into its run: proof that it is wrong, founding, return from a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from averaging.history.standing import Standing
from averaging.history.state import FragmentState
from averaging.messages import Compare, Head, decode
from averaging.numbers.arrays import uninitialised_floats
from averaging.round.interface.phase import Phase
from averaging.rules.peer_view import PeerView
from dht.identity import PeerId
from dht.membership.orders import NONE, End, Orders
from dht.membership.table import Member
from dht.memory.virtual_loop import run
from dht.presence.intake import Misfit
from dht.records import PeerRecord, pack_versions
from peer.agent.entrance import Entrance, other_models, wrong_peer
from peer.agent.network import Network
from peer.agent.services import FirstStates
from peer.agent.slots import SlotPort
from peer.bridge.settings import PeerSettings
from peer.errors import Declined, RunOver, Unusable
from peer.rules.ending import Ending, seconds_left
from peer.rules.leaving import Departure
from peer.rules.others import UNTESTED
from peer.run_file.reading import parse
from peer.run_file.sections import RunFile
from peer.status import PeerStatus
from peer.storage.earlier import LastSeen, save_last_seen
from peer.storage.home import default_directory
from peer.storage.outer_state import founding_name
from tests.peer.agent.example_peers import member
from tests.peer.statuses import a_status
from tests.peer.trainer.learner_pair import Pair, moved, successor, taken_beyond_the_checkpoint

SEED, OTHER, STRANGER = PeerId("12D3KooWSeed"), PeerId("12D3KooWOther"), PeerId("12D3KooWStranger")


def holder(layout: str, frozen: str = "") -> PeerStatus:
    return a_status(layout=layout, frozen=frozen, versions=(3, 4))


def test_one_peer_with_the_own_model_is_enough_whatever_the_others_say() -> None:
    assert other_models("aa", "", [holder("bb"), holder("aa"), holder("cc")]) is None
    assert other_models("aa", "1", [holder("aa", "2"), holder("aa", "1")]) is None


def test_models_are_compared_only_with_peers_that_have_a_state() -> None:
    assert other_models("aa", "", []) == ()
    assert other_models("aa", "", [a_status(layout="bb", versions=())]) == ()
    both = (holder("bb"), holder("cc"))
    assert other_models("aa", "", both) == both


def test_frozen_parameters_count_where_both_sides_know_them() -> None:
    other, same = holder("bb"), holder("aa", "2")
    assert other_models("aa", "1", [other, same]) == (same, other)
    assert other_models("aa", "", [same]) is None
    assert other_models("aa", "1", [holder("aa", "")]) is None
    assert other_models("aa", None, [same]) is None, "the user allows it"


OTHER_RUN = Misfit("run", "ab12", "cd34")
OTHER_PROTOCOL = Misfit("protocol versions", "1 to 1", "2 to 3")


def test_all_seeds_in_another_run_is_a_wrong_address_at_once() -> None:
    assert wrong_peer({SEED: OTHER_RUN}, {SEED}, out_of_patience=False) == SEED
    assert wrong_peer({SEED: OTHER_RUN}, {SEED, OTHER}, out_of_patience=False) is None
    assert wrong_peer({SEED: OTHER_RUN}, {SEED, OTHER}, out_of_patience=True) == SEED


def test_a_seed_without_a_peer_id_may_be_the_right_one() -> None:
    assert wrong_peer({SEED: OTHER_RUN}, {SEED, None}, out_of_patience=False) is None


@pytest.mark.parametrize("out_of_patience", [True, False])
def test_peers_of_other_runs_prove_nothing_about_this_one(out_of_patience: bool) -> None:
    misfits = {STRANGER: OTHER_RUN}
    assert wrong_peer(misfits, {SEED}, out_of_patience=out_of_patience) is None


def test_members_with_another_protocol_are_proof_when_no_other_peer_is_there() -> None:
    assert wrong_peer({STRANGER: OTHER_PROTOCOL}, set(), out_of_patience=False) is None
    assert wrong_peer({STRANGER: OTHER_PROTOCOL}, set(), out_of_patience=True) == STRANGER


class Lobby:
    """The part of a peer on line that a newcomer uses while it waits for a state."""

    def __init__(self, *, holders_until: float) -> None:
        self.phase = "fetching"
        self.run_file = RunFile()
        self.orders = NONE
        self.states: tuple[object, ...] = (None, None)
        self.network = self.owner = self.end = self
        self.ended: list[tuple[float, int]] = []
        self._holders_until = holders_until

    @property
    def run_now(self) -> RunFile:
        return self.run_file

    def seconds_left(self) -> float | None:
        return seconds_left(self.run_file.end, None, now=datetime.now(UTC))

    def live_members(self) -> list[Member]:
        now = asyncio.get_running_loop().time()
        versions = (1, 1) if now < self._holders_until else ()
        record = PeerRecord(
            protocol=(1, 1), role="learner", incarnation=1, versions=pack_versions(versions)
        )
        return [replace(member(), record=record)]

    def hear(self, departure: Departure) -> None:
        assert "join again" in departure.reason
        self.ended.append((asyncio.get_running_loop().time(), departure.exit_code))


def wait_in(lobby: Lobby, seconds: float) -> None:
    async def main() -> None:
        entrance = Entrance(lobby, None, None, None, None)  # type: ignore[arg-type]
        with suppress(TimeoutError):
            await asyncio.wait_for(entrance.give_up_when_nobody_is_left(), seconds)

    run(main())


def test_a_newcomer_gives_up_a_minute_after_the_last_peer_with_a_state_has_gone() -> None:
    lobby = Lobby(holders_until=100.0)
    wait_in(lobby, 155.0)
    assert lobby.ended == []
    lobby = Lobby(holders_until=100.0)
    wait_in(lobby, 900.0)
    ((at, exit_code),) = lobby.ended
    assert 155.0 < at < 165.0
    assert exit_code == 3


def test_a_run_whose_date_has_passed_is_not_founded() -> None:
    lobby = Lobby(holders_until=0.0)
    lobby.run_file = parse('name = "old"\n[end]\ndate = 2020-03-31T12:00:00Z\n')
    entrance = Entrance(lobby, None, None, None, None)  # type: ignore[arg-type]
    with pytest.raises(Declined, match="'old' ended at 2020-03-31 12:00 UTC"):
        run(entrance._found())


async def founded_by(pair: Pair) -> FirstStates:
    """What a founder begins with whose trainer holds its state before its agent has looked."""
    hall = Hall(pair)
    entrance = Entrance(hall, pair.port, pair.memory, None, None)  # type: ignore[arg-type]
    founding = asyncio.ensure_future(entrance._found())
    while not founding.done():
        await asyncio.sleep(0)
        pair.idle()
    hall.enter_phase("ready", "in the run", 1.0)
    return await founding


def test_a_founder_is_one_however_soon_its_trainer_holds_the_state() -> None:
    """A founder that is alone folds at once; a peer not known as founder waits ten minutes."""
    founders = [run(founded_by(Pair())) for _ in range(2)]
    assert all(first.are_own(PeerId("12D3KooWMe")) and len(first.states) == 2 for first in founders)
    names = {founding_name(first.states) for first in founders}
    assert "" not in names and len(names) == 1, "equal first weights are one founding"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_is_not_finite_founds_no_run(value: float) -> None:
    """It founded one that nobody could join: newcomers waited for a quarter of an hour."""
    pair = Pair()
    with torch.no_grad():
        pair.parameters["1.weight"][3, 2] = value
    with pytest.raises(
        Unusable, match=r"^1\.weight has values that are not finite.* before peer\."
    ):
        run(founded_by(pair))


def test_a_newcomer_that_has_the_state_does_not_wait() -> None:
    lobby = Lobby(holders_until=0.0)
    lobby.states = (object(), object())
    wait_in(lobby, 900.0)
    assert lobby.ended == []


class Desk:
    """The part of a lone peer, and of its averager, that a new agent on used memory uses."""

    def __init__(self, states: list[FragmentState]) -> None:
        self.states = tuple(states)
        self.network = self
        self.view: dict[PeerId, object] = {}
        self.phases = [Phase.IDLE] * len(states)
        self.told: list[tuple[str, dict[str, object]]] = []

    def refresh_view(self) -> None:
        return

    def event(self, name: str, **fields: object) -> None:
        self.told.append((name, fields))


class Hall(Desk):
    """The part of a peer on line that a founder uses."""

    def __init__(self, pair: Pair) -> None:
        super().__init__([])
        self.run_file, self.layout = RunFile(), pair.layout
        self.ending = Ending(fragments=2, learns=True)
        self.floats = uninitialised_floats
        self.phase = "connecting"

    def seconds_left(self) -> None:
        return None

    def live_members(self) -> list[Member]:
        return []

    def enter_phase(self, phase: str, text: str, done: float) -> None:
        self.phase = phase


def go_on(pair: Pair, desk: Desk, port: SlotPort) -> None:
    """Do what an agent does that has read a checkpoint and finds its trainer training."""
    entrance = Entrance(desk, port, pair.memory, None, None)  # type: ignore[arg-type]
    first = FirstStates(desk.states, settled=(0, 0))
    run(entrance.go_on_from_checkpoint(desk, first))  # type: ignore[arg-type]
    pair.idle()
    pair.idle()


def test_a_trainer_ahead_of_the_checkpoint_is_not_set_back_while_no_peer_is_there() -> None:
    pair = Pair()
    states, _ = run(taken_beyond_the_checkpoint(pair))
    before = pair.now(0)
    desk = Desk(states)
    go_on(pair, desk, successor(pair, [None, states[1]]))
    assert np.array_equal(pair.now(0), before)
    assert desk.told == [("kept", {"fragment": 0, "version": 1, "since": 0})]


def test_states_that_are_being_fetched_are_awaited_but_not_for_ever() -> None:
    async def story(arrives_after_s: float) -> tuple[float, list[str]]:
        pair = Pair()
        states, after = await taken_beyond_the_checkpoint(pair)
        port = successor(pair, [None, states[1]])
        desk = Desk(states)
        desk.phases = [Phase.CATCHING, Phase.IDLE]
        loop = asyncio.get_running_loop()

        def arrive() -> None:
            desk.states = (after, states[1])

        loop.call_later(arrives_after_s, arrive)
        entrance = Entrance(desk, port, pair.memory, None, None)  # type: ignore[arg-type]
        began = loop.time()
        first = FirstStates(tuple(states), settled=(0, 0))
        await entrance.go_on_from_checkpoint(desk, first)  # type: ignore[arg-type]
        return loop.time() - began, [name for name, _ in desk.told]

    assert run(story(100.0)) == (pytest.approx(100.0, abs=0.1), [])
    assert run(story(10_000.0)) == (pytest.approx(600.0, abs=0.1), ["kept"])


def test_a_state_that_arrives_at_the_last_moment_is_not_taken_for_a_lost_one() -> None:
    """Fetching ended between two looks. The checkpoint's state was then handed to a trainer that
    had a newer one, and what it had done meanwhile counted as lost with a crash."""

    async def story() -> list[str]:
        pair = Pair()
        states, after = await taken_beyond_the_checkpoint(pair)
        port = successor(pair, [None, states[1]])
        desk = Desk(states)
        desk.phases = [Phase.CATCHING, Phase.IDLE]

        def arrive() -> None:
            desk.states = (after, states[1])
            desk.phases = [Phase.IDLE, Phase.IDLE]

        asyncio.get_running_loop().call_later(100.0, arrive)
        entrance = Entrance(desk, port, pair.memory, None, None)  # type: ignore[arg-type]
        first = FirstStates(tuple(states), settled=(0, 0))
        await entrance.go_on_from_checkpoint(desk, first)  # type: ignore[arg-type]
        return [name for name, _ in desk.told]

    assert run(story()) == []


def test_a_peer_that_does_not_answer_is_asked_again() -> None:
    """Its answer may go to the agent that died. What the trainer had done was given up then."""

    class Lossy(Desk):
        """Where another peer loses the first two messages."""

        def __init__(self, states: list[FragmentState], after: FragmentState) -> None:
            super().__init__(states)
            self.view = {OTHER: object()}
            self.transport = self
            self.asked: list[int] = []
            self._after = after

        def shown(self, state: FragmentState) -> Head:
            return Standing.of(state).head()

        def send(self, peer: PeerId, data: bytes) -> None:
            compare = decode(data)
            assert isinstance(compare, Compare)
            self.asked.append(compare.fragment)
            if self.asked.count(0) == 3:
                self.states = (self._after, self.states[1])

    async def story() -> list[str]:
        pair = Pair()
        states, after = await taken_beyond_the_checkpoint(pair)
        port = successor(pair, [None, states[1]])
        square = Lossy(states, after)
        entrance = Entrance(square, port, pair.memory, None, None)  # type: ignore[arg-type]
        first = FirstStates(tuple(states), settled=(0, 0))
        await entrance.go_on_from_checkpoint(square, first)  # type: ignore[arg-type]
        assert square.asked == [0, 1, 0, 0], "of what is settled it is not asked"
        return [name for name, _ in square.told]

    assert run(story()) == []


def test_a_trainer_behind_the_checkpoint_adopts_it() -> None:
    pair = Pair()
    states = run(pair.found())
    newer = moved(states[0], 1.0)
    desk = Desk([newer, states[1]])
    go_on(pair, desk, successor(pair, [None, states[1]]))
    assert np.array_equal(pair.now(0), newer.theta)
    assert not desk.told


class Square(Hall):
    """A place where others try to dial a newcomer, ``dialled_after_s`` from now."""

    until_dialled = Network.until_dialled

    def __init__(self, pair: Pair, *, dialled_after_s: float, others: Sequence[bool]) -> None:
        super().__init__(pair)
        self.live_peers = [PeerView(first_seen=0.0, heard_at=0.0, reachable=e) for e in others]
        self.dialled = asyncio.Event()
        asyncio.get_running_loop().call_later(dialled_after_s, self.dialled.set)
        self.said: list[tuple[float, str, str]] = []

    def enter_phase(self, phase: str, text: str, done: float) -> None:
        super().enter_phase(phase, text, done)
        self.said.append((round(asyncio.get_running_loop().time()), phase, text))


def arrived_at(
    *, held_after_s: float, dialled_after_s: float, others: Sequence[bool]
) -> tuple[float, str]:
    """When a newcomer is in the run, and what it said before.

    ``others``: whether each can be dialled.
    """

    async def main() -> tuple[float, str]:
        pair = Pair()
        square = Square(pair, dialled_after_s=dialled_after_s, others=others)
        square.phase = "fetching"
        entrance = Entrance(square, pair.port, pair.memory, None, None)  # type: ignore[arg-type]
        arriving = asyncio.create_task(entrance.arrive())
        await asyncio.sleep(held_after_s)
        assert square.said == []
        await pair.found()
        await arriving
        *before, (at, phase, _) = square.said
        assert phase == "ready"
        return at, before[-1][2] if before else ""

    return run(main())


def test_a_newcomer_fetches_while_others_try_to_dial_it() -> None:
    """It waited 3 to 10 s for the outcome, and only then began to download the state."""
    homes = [False, False]
    assert arrived_at(held_after_s=5.0, dialled_after_s=3.0, others=homes) == (5.0, "")
    assert arrived_at(held_after_s=3.0, dialled_after_s=5.0, others=homes) == (5.0, UNTESTED)
    assert arrived_at(held_after_s=3.0, dialled_after_s=900.0, others=homes) == (13.0, UNTESTED)


@pytest.mark.parametrize("others", [[], [True], [False, True]])
def test_a_newcomer_is_in_the_run_at_once_beside_one_that_can_lead(others: list[bool]) -> None:
    """A home waited 10 s for the word that nobody can dial it, and made steps all the while."""
    assert arrived_at(held_after_s=3.0, dialled_after_s=900.0, others=others) == (3.0, "")


class Street(Lobby):
    """The answers that a peer gets which looks for its run."""

    def __init__(self, answers: list[PeerStatus], silent: Sequence[Member]) -> None:
        super().__init__(holders_until=0.0)
        self.answers = answers
        self.silent = silent
        self.layout = SimpleNamespace(hash=bytes.fromhex("aa"))
        self.description = SimpleNamespace(frozen_hash="")
        self.ending = Ending(fragments=2, learns=True)
        self.presence = SimpleNamespace(misfits={})
        self.me, self.run_id, self.directory = (
            PeerId("12D3KooWMe"),
            RunFile().run_id,
            Path("/nowhere"),
        )
        self.phases: list[tuple[float, str, str]] = []
        self.followed = ""

    def live_members(self) -> list[Member]:
        answering = (replace(member(), peer=PeerId(each.peer)) for each in self.answers)
        return [*answering, *self.silent]

    async def statuses(
        self, peers: Sequence[PeerId], *, enough: Callable[[Sequence[PeerStatus]], bool]
    ) -> list[PeerStatus]:
        self.enough = enough
        return self.answers

    def follow(self, founding: str) -> None:
        self.followed = founding

    def enter_phase(self, phase: str, text: str, done: float) -> None:
        self.phases.append((round(asyncio.get_running_loop().time(), 1), phase, text))


def search(
    answers: list[PeerStatus],
    *,
    found_after_s: float | None,
    seconds: float,
    silent: Sequence[Member] = (),
) -> tuple[bool | None, Street]:
    """Let a peer look for its run: whether somebody has a state, or ``None`` if it still looks.

    ``silent``: members that do not answer.
    """

    async def main() -> tuple[bool | None, Street]:
        street = Street(answers, silent)
        begin = SimpleNamespace(
            found_after_s=found_after_s, settings=PeerSettings(), allow_frozen_differences=True
        )
        entrance = Entrance(street, None, None, None, begin)  # type: ignore[arg-type]
        try:
            return await asyncio.wait_for(entrance._somebody_has_a_state(), seconds), street
        except TimeoutError:
            return None, street

    return run(main())


def test_a_peer_that_does_not_found_waits_for_ever_and_says_so_ever_more_seldom() -> None:
    found, street = search([], found_after_s=None, seconds=7200.0)
    assert found is None
    told = [at for at, phase, _ in street.phases]
    assert {phase for _, phase, _ in street.phases} == {"waiting"}
    assert told[0] == pytest.approx(10.0, abs=0.5)
    assert 8 <= len(told) <= 12 and told == sorted(told)
    text = street.phases[0][2]
    assert "nobody of this run is here (never seen from this machine; there is no address" in text
    assert "still looking after 0:10" in text


def test_what_the_usual_folder_knows_of_a_run_is_told_to_a_peer_with_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "never seen from this machine" where this machine had trained half an hour before."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    seen = LastSeen(run=RunFile().canonical().decode(), at=0.0, names=("anna",))
    save_last_seen(default_directory(RunFile().run_id), seen)
    _, street = search([], found_after_s=None, seconds=20.0)
    assert (
        "(last seen here on 1970-01-01 00:00 UTC, with anna; there is no address"
        in street.phases[0][2]
    )


def test_a_founder_does_not_leave_founding_to_those_who_wait_for_one() -> None:
    waiting = a_status(peer="12D3KooWAnna", versions=(), phase="waiting")
    assert search([waiting], found_after_s=5.0, seconds=10.0)[0] is False
    rival = a_status(peer="12D3KooWAnna", versions=(), phase="connecting")
    assert search([rival], found_after_s=5.0, seconds=10.0)[0] is None


def test_a_run_whose_peers_do_not_answer_is_not_founded_again_at_once() -> None:
    """The founder was behind a router, and had no place at a relay yet, or was busy."""
    founder = member(versions=pack_versions((3, 4)))
    assert search([], found_after_s=5.0, seconds=60.0, silent=[founder])[0] is None
    assert search([], found_after_s=5.0, seconds=70.0, silent=[founder])[0] is False


def test_a_newcomer_waits_for_the_word_of_others_in_sight_before_it_founds_the_run() -> None:
    """It said that nobody else was here, knowing one that had founded the run a second before."""
    assert search([], found_after_s=5.0, seconds=14.0, silent=[member()])[0] is None
    assert search([], found_after_s=5.0, seconds=16.0, silent=[member()])[0] is False


def test_a_newcomer_follows_one_founding_and_refuses_a_run_that_is_over() -> None:
    light = a_status(layout="aa", founding="light", global_tokens=10)
    heavy = a_status(layout="aa", founding="heavy", global_tokens=20)
    found, street = search([light, heavy], found_after_s=None, seconds=10.0)
    assert found is True and street.followed == "heavy"
    over = a_status(layout="aa", ended_at=0.0, global_tokens=RunFile().end.tokens)
    with pytest.raises(RunOver, match="has ended on 1970-01-01 00:00 UTC at 100,000,000 tokens"):
        search([over], found_after_s=None, seconds=10.0)


def test_a_newcomer_does_not_wait_for_the_answer_of_one_that_is_gone() -> None:
    """One that had just been killed kept every newcomer waiting for 5 s."""
    first, second = (a_status(peer=f"12D3KooW{name}", layout="aa", founding="a") for name in "AB")
    _, street = search([first, second], found_after_s=5.0, seconds=10.0, silent=[member()])
    assert street.enough([first, second]) and not street.enough([first])
    apart = msgspec.structs.replace(second, founding="b")
    assert not street.enough([first, apart]), "the third one decides"
    others = [msgspec.structs.replace(each, layout="bb") for each in (first, second)]
    assert not street.enough(others), "the third one may have this model"


def test_a_newcomer_of_a_run_that_its_owner_or_its_date_has_ended_does_not_wait_for_it() -> None:
    """It was told of the order first, by a peer without a state, and then looked for ever."""

    async def looks(text: str, orders: Orders, silent: Sequence[Member] = ()) -> None:
        street = Street([], silent)
        street.run_file, street.orders = parse(text), orders
        begin = SimpleNamespace(
            found_after_s=None, settings=PeerSettings(), allow_frozen_differences=True
        )
        entrance = Entrance(street, None, None, None, begin)  # type: ignore[arg-type]
        await asyncio.wait_for(entrance._somebody_has_a_state(), 60.0)

    ordered = Orders(end=End(version=12))
    with pytest.raises(Declined, match="'new' was ended by its owner, at version 12, and no peer"):
        run(looks('name = "new"', ordered))
    dated = 'name = "old"\n[end]\ndate = 2020-03-31T12:00:00Z\n'
    with pytest.raises(Declined, match="'old' ended at 2020-03-31 12:00 UTC, and no peer"):
        run(looks(dated, NONE))
    holder = member(versions=pack_versions((3, 4)))
    with pytest.raises(TimeoutError):
        run(looks('name = "new"', ordered, [holder]))
    with pytest.raises(TimeoutError):
        run(looks('name = "new"', NONE))
