"""``peer.join``: take part in a run from an own training loop.

::

    with peer.join("my.run.toml", model=model, optimizer=optimizer) as run:
        for batch in run.data(dataset):
            loss = model(batch).loss
            loss.backward()
            run.log(loss=loss, tokens=batch.numel())
            optimizer.step()
            optimizer.zero_grad()

The loop stays the caller's. A hook after ``optimizer.step`` is the safe point at which
fragments are offered and adopted; parameters change nowhere else. Gradient accumulation
needs nothing: a step is an optimizer step. A step that a ``GradScaler`` skips does not count.

Here the parts are put together and taken apart again in reverse order: progress file,
shared memory, learner, agent process. The network is the agent's; if it dies, the loop goes on.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from multiaddr import Multiaddr
from torch.nn import Parameter

from averaging.numbers.layout import Layout
from dht import addresses
from dht.identity import Identity, PeerId, RunId
from dht.libp2p.lane import parse_lane
from dht.records import name_problem, site_problem
from peer.bridge.agent_link import (
    AgentProcess,
    Begin,
    Due,
    Facts,
    FromAgent,
    Happened,
    LineSettings,
    Measure,
    Measured,
    Other,
    Over,
    Phase,
    Tensor,
    Value,
)
from peer.bridge.shared_memory import SharedTensors
from peer.data.feed import Feed
from peer.data.sequences import Data
from peer.errors import INTERRUPTED, LeftEarly, PeerError
from peer.joining import link as links
from peer.joining.find import ask_peers
from peer.joining.nickname import default_name
from peer.model.recipes import embedding_names, head_names
from peer.rules.limits import pause_after_step_s
from peer.run_file.schedule import Rates
from peer.run_file.sections import RunFile
from peer.storage.home import default_directory, only_process, peer_folder
from peer.storage.inner_saves import InnerSaves
from peer.storage.inner_state import Optimizers, several
from peer.storage.progress import ProgressFile
from peer.trainer.learner import (
    BUDGET_S,
    BlockedTime,
    Learner,
    Piece,
    check_layout,
    is_coarse,
    model_layout,
    specs_of,
)
from peer.trainer.learner import trained_parameters as trained

logger = logging.getLogger(__name__)

Fields = Mapping[str, Value]

ASK_AFTER_S = 0.25
ASK_AGAIN_S = 2.0
"""A synchronous trainer that waits for a round in vain asks its agent for it, again and again."""

REST_LOOK_S = 0.02
STILL_HERE_S = 10.0
"""While it rests, the other processes of a learner hear of it so often."""

SLEEP_MAX_S = 60.0
"""A wish for a small share must not make a trainer look dead."""

STARTS_MAX = 4
"""Agents that die before they say a word; then there is no point in another one."""

EVENTS_MAX = 1000
"""Events wait for the next safe point; beyond so many the oldest are dropped."""


class RunUnreachable(PeerError):
    """This peer could not get into the run."""

    def __init__(self, run: str, reason: str, exit_code: int = 3) -> None:
        super().__init__(run, reason, exit_code)
        self.run = run
        self.reason = reason
        self.exit_code = exit_code  # type: ignore[misc]

    def __str__(self) -> str:
        return f"could not join the run {self.run!r}: {self.reason}"


class RunLost(RunUnreachable):
    """This peer was in the run, and cannot go on in it."""

    def __str__(self) -> str:
        return f"cannot go on in the run {self.run!r}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """What is this peer's own affair. Everything else comes from the run file."""

    directory: Path | None = None
    """For key, checkpoints and logs of this peer; unset: the user's data folder, one per run."""
    data_directory: Path | None = None
    """Where the patterns of the ``text`` recipe begin; unset: the folder of a local run file, else
    ``data`` in ``directory``: what comes over the network names no files of yours, such as the key
    that lies beside it."""
    name: str | None = None
    """What others see; unset: made up from the peer id."""
    site: str | None = None
    """Peers that say the same name are near each other: they reduce among themselves first, and one
    of them crosses the slow link for all. Up to 16 characters."""
    seeds: tuple[str, ...] = ()
    """Addresses to try besides those of the run file."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    lane: str = "auto"
    """Direct connections for what is large, beside the daemon: the TCP port to listen at for them
    (PORT, or PORT:OUTER_PORT behind a router), ``auto``: any, or ``off``."""
    found_after_s: float | None = None
    """Having met nobody for so long, go on as the run's founder. Unset: 30 s; at once without any
    seed."""
    page: str | None = None
    """Serve a local page at HOST:PORT, or ``auto``: on this machine, from port 7777 on."""
    pace_s: float = 0.0
    """Least time per step, so that several learners on one machine behave like several machines."""
    start_timeout_s: float = 900.0
    """For getting any further into the run: connecting, and each piece of its state. A slow line
    may take as long as it takes."""
    drain_s: float = 30.0
    """For finishing what is under way when the block ends."""
    save_every_s: float = 60.0
    """Between two checkpoints of the optimizer; more where copying its state takes long."""
    started_at: float = field(default_factory=time.time)
    """By the wall clock. Who was asked before to leave (``shoal leave``) was another one."""
    line: LineSettings = field(default_factory=LineSettings)
    agent_command: tuple[str, ...] | None = None
    """How an agent is started. For tests."""

    def __post_init__(self) -> None:
        if not (self.pace_s >= 0.0 and math.isfinite(self.pace_s)):
            raise ValueError(f"pace_s is {self.pace_s}; it is the least time of a step, in seconds")
        if self.name is not None and (problem := name_problem(self.name)) is not None:
            raise ValueError(problem)
        if self.site is not None and (problem := site_problem(self.site)) is not None:
            raise ValueError(problem)
        parse_lane(self.lane)
        for seed in self.seeds:
            addresses.parse_seed(seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What this peer did, as of now."""

    steps: int
    tokens: int
    """Both since the program started."""
    step_time_s: float
    blocked: BlockedTime
    agent_restarts: int
    rounds: int
    rounds_missed: int
    """Rounds of this peer's fragments that closed without its work in them."""
    bytes_sent: int
    bytes_received: int
    fates: Mapping[str, float]
    """Of all tokens ever: processed = merged + pending + discarded (DESIGN 3.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What all processes of one learner go by until their next safe point."""

    over: bool = False
    finished: bool = False
    global_tokens: int = 0
    peers: int = 1
    measure: bool = False
    """Now is the time to measure the held-out loss."""


class Others(Protocol):
    """The other processes of this learner, where it is made of several (``peer.island``)."""

    def begin(
        self,
        run: RunFile,
        peer_id: PeerId,
        layout: Layout,
        parameters: Mapping[str, Parameter],
        *,
        data_dir: Path,
    ) -> Sequence[Sequence[Piece]]:
        """Tell them what run this is. Returns the units of each fragment, wherever they are."""
        ...

    def total(self, tokens: int) -> int:
        """At the beginning of a safe point: with the tokens of the others."""
        ...

    def wait(self) -> None:
        """The safe point is not over for a while. To be said again within a minute."""
        ...

    def go(self, agreed: Agreed) -> None:
        """The safe point is over."""
        ...

    def end(self, failure: str | None) -> None:
        """There is no further safe point; because of a failure, or in peace. Only once."""
        ...

    def abandon(self) -> None:
        """They cannot be counted upon any more: say and wait for nothing."""
        ...


def join(
    run: str | Path | RunFile,
    *,
    model: torch.nn.Module,
    optimizer: Optimizers,
    auto: bool = True,
    settings: JoinSettings | None = None,
    **own: Any,
) -> Run:
    """Take part in a run: a file, an ``https`` address or a ``shoal://`` link.

    ``auto``: exchange after each ``optimizer.step()``, of several optimizers after the last one's;
    otherwise call ``run.step(tokens=...)``.
    Further keywords are fields of ``JoinSettings``. Entering the block returns once this peer
    has the run's current parameters; leaving it finishes what is under way and says goodbye.
    """
    chosen = settings_from(settings, own)
    return Run(run, model=model, optimizer=optimizer, auto=auto, settings=chosen)


def settings_from(settings: JoinSettings | None, own: Mapping[str, Any]) -> JoinSettings:
    """Of whoever may pass them whole, or single fields as keywords. Raises ``ValueError``."""
    if settings is not None and own:
        raise ValueError("pass either settings or single ones of them, not both")
    if isinstance(own.get("directory"), str):
        own = {**own, "directory": Path(own["directory"])}
    return settings or JoinSettings(**own)


class Run:
    """This peer's part in a run. Made by ``join``, used as a context manager."""

    def __init__(
        self,
        run: str | Path | RunFile,
        *,
        model: torch.nn.Module,
        optimizer: Optimizers,
        auto: bool,
        settings: JoinSettings,
        others: Others | None = None,
    ) -> None:
        self._where = run
        self._others = others
        self._agreed = Agreed()
        self._model = model
        self._optimizers = several(optimizer)
        self._auto = auto
        self._settings = settings
        self._open = ExitStack()
        self._handlers: dict[str, list[Callable[[Fields], None]]] = {}
        self._events: deque[tuple[str, Fields]] = deque(maxlen=EVENTS_MAX)
        self._measure: Callable[[], tuple[float, int]] | None = None
        self._to_measure: Measure | None = None
        self._facts: Facts | None = None
        self._phase: Phase | None = None
        self._over: Over | None = None
        self._step_tokens = 0
        self._losses: deque[_Loss] = deque(maxlen=64)
        self._paced_at: float | None = None
        self._worked_from: float | None = None
        """When the step began, where only a share of the time may be used."""
        self._accelerator: torch.device | None = None
        self._own_threads: int | None = None
        """How many torch had before the machine's owner wanted fewer."""
        self._told_no_tokens = False
        self._due: list[int] = []
        self._leaving: Callable[[], bool] = lambda: False
        self._found_in: Path | None = None
        self._entered = False
        # Set by __enter__.
        self.run_file: RunFile
        self.run_id: RunId
        self.peer_id: PeerId
        self.directory: Path
        self._learner: Learner
        self._memory: SharedTensors
        self._agent: AgentProcess
        self._progress: ProgressFile
        self._feed: Feed
        self._rates: Rates
        self._inner: InnerSaves

    def __repr__(self) -> str:
        if not self._entered:
            return f"Run({self._where}, not entered)"
        return f"Run({self.run_file.name}, steps={self._learner.steps}, peers={self.peers})"

    # --- getting in and out ---------------------------------------------------------------------

    def __enter__(self) -> Self:
        assert not self._entered, "a run is entered once"
        self._entered = True
        try:
            self._bring_up()
        except BaseException as error:
            if self._others is not None:
                self._others.end(f"{type(error).__name__}: {error}")
            self._open.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # An error of the caller's is no reason to wait; Ctrl-C means: finish and go.
        calm = kind is None or issubclass(kind, KeyboardInterrupt | LeftEarly)
        if self._others is not None and kind is not None:
            # Nobody knows at which of their steps the others are.
            calm = False
            self._others.abandon()
        try:
            self._drain(self._settings.drain_s if calm else 0.0)
        finally:
            self._open.close()

    def _bring_up(self) -> None:
        run, seeds = self._find()
        self.run_file, self.run_id = run, run.run_id
        parameters = trained(self._model)
        layout = model_layout(self._model, run.outer.fragments)
        check_layout(layout, run.model.layout_hash)
        device = next(iter(parameters.values())).device
        self._accelerator = None if device.type == "cpu" else device
        directory = self._settings.directory or default_directory(self.run_id)
        self.directory = directory
        with peer_folder(directory):
            self._open.enter_context(only_process(directory))
            identity = Identity.load_or_create(directory / "identity.key")
            self._progress = self._open.enter_context(
                ProgressFile.begin(directory / "progress", wall_time_s=time.time())
            )
        self.peer_id = identity.peer_id
        data_dir = self._settings.data_directory or self._found_in or directory / "data"
        self._feed = Feed(
            run, self.peer_id, data_dir=data_dir, over=lambda: self.over or self._leaving()
        )
        self._rates = Rates(run)
        self._inner = InnerSaves(
            directory / "inner",
            self._model,
            self._optimizers,
            run_id=self.run_id,
            every_s=self._settings.save_every_s,
            tell=lambda event, fields: self._events.append((event, fields)),
            allowed_bytes=lambda: None if self._facts is None else self._facts.inner_bytes,
        )
        self._memory = SharedTensors.create(
            [fragment.size for fragment in layout.fragments],
            layout=layout.hash,
            incarnation=self._progress.now.incarnation,
            coarse=is_coarse(parameters),
        )
        self._open.callback(self._memory.close)
        begin = Begin(
            run=run.canonical(),
            seeds=tuple(str(seed) for seed in (*seeds, *self._settings.seeds)),
            directory=str(directory),
            identity=str(directory / "identity.key"),
            name=self._settings.name or default_name(self.peer_id),
            site=self._settings.site,
            tensors=tuple(Tensor(s.name, s.shape, s.dtype) for s in specs_of(parameters)),
            embeddings=tuple(sorted(embedding_names(self._model) & parameters.keys())),
            heads=tuple(sorted(head_names(self._model) & parameters.keys())),
            listen=self._settings.listen,
            announce=self._settings.announce,
            lane=self._settings.lane,
            found_after_s=self._found_after_s(bool(seeds or self._settings.seeds)),
            page=self._settings.page,
            started_at=self._settings.started_at,
            earlier_tokens=self._progress.now.earlier_tokens,
            ended_cleanly=self._progress.previous is None or self._progress.previous.clean,
        )
        command = self._settings.agent_command
        self._agent = AgentProcess(
            begin,
            self._memory,
            log_path=directory / "agent.log",
            hear=self._hear,
            died=self._agent_died,
            settings=self._settings.line,
            **({} if command is None else {"command": command}),
        )
        pieces = None
        if self._others is not None:
            pieces = self._others.begin(run, self.peer_id, layout, parameters, data_dir=data_dir)
            self._open.callback(self._others.end, None)
        self._learner = Learner(
            self._memory,
            layout,
            parameters,
            ring=self._agent.ring,
            # Synchronous runs are exact: an offer is of one step.
            budget_s=math.inf if run.synchronous else BUDGET_S,
            pieces=pieces,
        )
        self._open.callback(self._learner.close)
        self._agent.start()
        self._open.callback(self._end_agent)
        self._wait_for_parameters()
        self._open.callback(self._inner.close)
        if (restored := self._inner.restore()) is not None:
            self._feed.restore(restored.data)
        if run.synchronous:
            cycle, count = run.outer.steps_per_cycle, len(layout.fragments)
            self._due = [max(1, cycle - (index * cycle) // count) for index in range(count)]
        if self._auto:
            hook = self._optimizers[-1].register_step_post_hook(self._after_step)
            self._open.callback(hook.remove)
        self._agree()

    def _find(self) -> tuple[RunFile, tuple[Multiaddr, ...]]:
        if isinstance(self._where, RunFile):
            return self._where, self._where.seed_addresses
        found = links.find_run(str(self._where), ask_peers=ask_peers)
        self._found_in = found.folder
        return found.run, found.seeds

    def _found_after_s(self, has_seeds: bool) -> float:
        if self._settings.found_after_s is not None:
            return self._settings.found_after_s
        return 30.0 if has_seeds else 0.0

    def _wait_for_parameters(self) -> None:
        """Exchange until every fragment has a version of the run's, and how far it is is known."""
        patience = _Patience(self._settings.start_timeout_s, since=time.monotonic())
        while not self._is_in():
            self._learner.exchange()
            if self._over is None:  # else the error has what there is to tell
                self._tell()
            if self._leaving():
                raise LeftEarly(self.run_file.name, f"it was {self._doing()}")
            if self._over is not None:
                if self._over.exit_code == 0 and not self._over.finished:
                    raise LeftEarly(self.run_file.name, self._over.reason, 0)
                raise RunUnreachable(
                    self.run_file.name, self._over.reason, self._over.exit_code or 3
                )
            if self._agent.restarts >= STARTS_MAX and self._phase is None:
                raise RunUnreachable(self.run_file.name, f"its agent fails: {self._last_words()}")
            if patience.is_over(self._phase, now=time.monotonic()):
                raise RunUnreachable(
                    self.run_file.name,
                    f"still {self._doing()}, and no further for "
                    f"{self._settings.start_timeout_s:g} s; "
                    f"see {self.directory / 'agent.log'}",
                )
            time.sleep(0.002)

    def _doing(self) -> str:
        """On the way in, in words."""
        return "starting the agent" if self._phase is None else self._phase.text

    def _is_in(self) -> bool:
        fragments = range(self._memory.fragments)
        held = all(self._memory.base(fragment) is not None for fragment in fragments)
        # The learning rate of the first step follows the run's tokens, too.
        return held and self._facts is not None and bool(self._facts.versions)

    def _last_words(self) -> str:
        """The last line that an agent wrote before it died."""
        log = self.directory / "agent.log"
        lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
        return f"{lines[-1] if lines else 'it said nothing'} (see {log})"

    def _drain(self, timeout_s: float) -> None:
        """Let the agent finish, and take in what it still brings."""
        if timeout_s > 0:
            self._agent.leave(timeout_s)
            self._inner.save(step=self._learner.steps, position=self._feed.state())
            deadline = time.monotonic() + timeout_s + 10.0
            while not self._agent.join(0.005) and time.monotonic() < deadline:
                self._learner.exchange()
                self._tell()
            self._inner.finish()
            self._progress.end()

    def _end_agent(self) -> None:
        self._agent.stop()
        self._agent.join(20.0)

    # --- the loop -------------------------------------------------------------------------------

    def log(self, *, loss: torch.Tensor | float | None = None, tokens: int | None = None) -> None:
        """Tell of a batch before the step that it is for. Tokens of several batches add up.

        A loss on an accelerator is read when it has arrived there, so this waits for nothing.
        """
        if tokens is not None:
            if tokens < 0:
                raise ValueError(f"tokens is {tokens}; a batch has none or some")
            self._step_tokens += tokens
        if loss is not None:
            self._losses.append(_Loss(loss))

    def step(self, *, tokens: int | None = None) -> None:
        """The safe point, for ``auto=False``: call it after each optimizer step."""
        if tokens is not None:
            self.log(tokens=tokens)
        self._safe_point()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> None:
        if was_skipped(optimizer):
            self._step_tokens = 0
        else:
            self._safe_point()

    def _safe_point(self) -> None:
        tokens, self._step_tokens = self._step_tokens, 0
        if self._others is not None:
            tokens = self._others.total(tokens)
        if not tokens and not self._told_no_tokens:
            self._told_no_tokens = True
            logger.warning("no_tokens_logged a step without run.log(tokens=...) weighs nothing")
        while self._losses and (value := self._losses[0].ready()) is not None:
            self._learner.loss = value
            self._losses.popleft()
        self._learner.step(tokens, on_count=self._count)
        if self._due:
            self._synchronize()
        # Before the others go on: they wait here, where nothing has a deadline of its own.
        self._pace()
        self._rest()
        measuring = self._my_turn()
        self._agree(measure=measuring is not None)
        self.set_rates()
        self._tell()
        if measuring is not None:
            self._evaluate(measuring)
        self._inner.maybe_save(step=self._learner.steps, position=self._feed.state)

    def _agree(self, *, measure: bool = False) -> None:
        """Where there are others, news counts from a safe point on, for all alike."""
        if self._others is not None:
            facts = self._facts
            self._agreed = Agreed(
                over=self._over is not None,
                finished=self._over is not None and self._over.finished,
                global_tokens=0 if facts is None else facts.global_tokens,
                peers=1 if facts is None else max(1, facts.peers),
                measure=measure,
            )
            self._others.go(self._agreed)

    def _count(self) -> None:
        # Before a peer can hear of this step, so that a kill -9 leaves it countable.
        self._progress.record(step=self._learner.steps, tokens=self._learner.tokens)

    def _synchronize(self) -> None:
        """tau = 0: stay here until the rounds that are due have been."""
        facts = self._facts
        self._agent.ring()
        for fragment, due in enumerate(self._due):
            if self._learner.steps < due:
                continue
            if facts is not None and facts.synchronous:
                self._settle(fragment)
            self._due[fragment] = self._learner.steps + self.run_file.outer.steps_per_cycle

    def leave_when(self, asked: Callable[[], bool]) -> None:
        """Ask this now and then: once it is true, a synchronous learner waits for nobody more.

        For loops that end at a wish from outside, which they see only between steps. Said before
        the run is entered, entering it ends with ``LeftEarly`` then.
        """
        self._leaving = asked

    def _settle(self, fragment: int) -> None:
        """Wait for one fragment's round, for as long as there is somebody to have it with."""
        limit = time.perf_counter() + self.run_file.rounds.round_deadline_s
        ask_at = time.monotonic() + ASK_AFTER_S

        def wait(seconds: float) -> None:
            # The agent counts from the rounds that it hears of; here is who knows what is due.
            nonlocal ask_at
            if time.monotonic() >= ask_at:
                self._agent.send(Due(fragment))
                ask_at = time.monotonic() + ASK_AGAIN_S
            time.sleep(seconds)

        def somebody_is_there() -> bool:
            return self._facts is not None and self._facts.synchronous

        self._learner.settle(
            fragment,
            deadline=limit,
            pause=wait,
            going_on=somebody_is_there,
            leaving=self._leaving,
        )

    def _rest(self) -> None:
        """Make no steps while the machine's owner wants none. Offers and adopts go on."""
        rested = False
        told_at = time.monotonic()
        while (
            self._facts is not None
            and self._facts.rest is not None
            and self._over is None
            and not self._leaving()
        ):
            rested = True
            if self._others is not None and time.monotonic() - told_at >= STILL_HERE_S:
                self._others.wait()
                told_at = time.monotonic()
            self._learner.exchange()
            self._tell()
            time.sleep(REST_LOOK_S)
        if rested:
            self._paced_at = self._worked_from = None

    def _pace(self) -> None:
        share = 1.0
        if self._facts is not None:
            self._limit_threads(self._facts.threads)
            accelerated = self._accelerator is not None
            share = self._facts.accelerator_share if accelerated else self._facts.cpu_share
        if share < 1.0:
            if self._accelerator is not None:
                # What was only queued there would go on while this thread sleeps.
                torch.accelerator.synchronize(self._accelerator)
            if self._worked_from is not None:
                worked_s = time.monotonic() - self._worked_from
                time.sleep(min(SLEEP_MAX_S, pause_after_step_s(share, worked_s)))
            self._worked_from = time.monotonic()
        else:
            self._worked_from = None
        pace_s = self._settings.pace_s
        if pace_s <= 0:
            return
        now = time.monotonic()
        if self._paced_at is not None and (left := self._paced_at + pace_s - now) > 0:
            time.sleep(left)
            now += left
        self._paced_at = now

    def _limit_threads(self, wanted: int | None) -> None:
        if wanted is not None:
            if self._own_threads is None:
                self._own_threads = torch.get_num_threads()
            if torch.get_num_threads() != (count := min(wanted, self._own_threads)):
                torch.set_num_threads(count)
        elif self._own_threads is not None:
            torch.set_num_threads(self._own_threads)
            self._own_threads = None

    def data(self, dataset: Iterable[Any] | None = None, *, batch_size: int | None = None) -> Any:
        """Batches of this peer's own shard, until the run is over.

        Without a dataset: the run's data recipe, as a tensor of tokens with
        ``sequence_length + 1`` columns. With one that has a length: its items, in this peer's
        own order. With any other iterable: what it yields, again and again.
        """
        return self._feed.batches(dataset, batch_size)

    @property
    def recipe_data(self) -> Data:
        """What the run's data recipe gives this peer: its stream and the held-out part.

        Raises ``LeftEarly`` where this peer is to leave before they can be read.
        """
        recipe = self._feed.recipe
        if recipe is None:
            asked_here = self._over is None
            raise LeftEarly(
                self.run_file.name, "it was reading the data", INTERRUPTED if asked_here else 0
            )
        return recipe

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint of the caller's, beside model and optimizer: this peer's place.

        Plain numbers and texts. What the run itself needs it keeps by itself.
        """
        return {
            "run_id": self.run_id,
            "steps": self._learner.steps,
            "tokens": self._learner.tokens,
            "global_tokens": self.global_tokens,
            "versions": list(self.versions),
            "data": self._feed.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the data where ``state`` was taken. Parameters and counts are the run's."""
        self._feed.resume(state)

    # --- news -----------------------------------------------------------------------------------

    def on(self, event: str, handler: Callable[[Fields], None]) -> None:
        """Call ``handler(fields)`` at the safe point after each ``event``; ``"*"`` for all.

        Among them: phase, adopted, round, round_missed, peer_joined, peer_left, peer_lost,
        agent_died, measured, over. With ``"*"`` the fields have the event's name as ``event``.
        """
        self._handlers.setdefault(event, []).append(handler)

    def schedule(self, optimizer: torch.optim.Optimizer, *, peak: float | None = None) -> None:
        """Let the run's schedule set the learning rate, from the run's global tokens.

        Groups keep the proportions among the rates they were made with. ``peak``: what the first
        one's is at the top of the schedule; unset: the run's ``inner.learning_rate``.
        """
        self._rates.follow(optimizer, peak=peak)
        self.set_rates()

    def measure_with(self, measure: Callable[[], tuple[float, int]]) -> None:
        """How to measure the held-out loss: returns the mean loss and the number of sequences.

        It is called at a safe point, when it is this peer's turn; training waits meanwhile.
        Of several processes that are one learner each calls its own, at the same safe point, so
        that they may compute together; what that of rank 0 returns is published.
        """
        self._measure = measure

    def set_rates(self) -> None:
        """Set the scheduled rates again, after something else has changed them."""
        self._rates.set(self.global_tokens)

    def _my_turn(self) -> Measure | None:
        wanted, self._to_measure = self._to_measure, None
        return None if self._measure is None else wanted

    def _evaluate(self, wanted: Measure) -> None:
        assert self._measure is not None
        loss, sequences = self._measure()
        self._agent.send(Measured(version=wanted.version, loss=loss, sequences=sequences))

    def _tell(self) -> None:
        for fragment, version in self._learner.taken_in():
            self._events.append(("adopted", {"fragment": fragment, "version": version}))
        while self._events:
            name, fields = self._events.popleft()
            for handler in self._handlers.get(name, ()):
                handler(fields)
            for handler in self._handlers.get("*", ()):
                handler({"event": name, **fields})

    def _hear(self, message: FromAgent) -> None:
        """On the line's thread: only note it."""
        if isinstance(message, Facts):
            self._facts = message
        elif isinstance(message, Phase):
            self._phase = message
            fields: Fields = {"name": message.name, "text": message.text, "done": message.done}
            self._events.append(("phase", fields))
        elif isinstance(message, Happened):
            self._events.append((message.name, message.fields))
        elif isinstance(message, Measure):
            self._to_measure = message
        elif isinstance(message, Over):
            self._over = message
            ended: Fields = {"reason": message.reason, "finished": message.finished}
            self._events.append(("over", ended))

    def _agent_died(self, code: int, restart_in_s: float) -> None:
        self._events.append(("agent_died", {"exit_code": code, "restart_in_s": restart_in_s}))

    # --- what is known --------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """The run has ended, or this peer's part in it: stop the loop."""
        return self._over is not None if self._others is None else self._agreed.over

    @property
    def finished(self) -> bool:
        """The run itself reached its end."""
        return self._over is not None and self._over.finished

    @property
    def lost(self) -> RunLost | None:
        """Why this peer cannot go on, where neither the run's end nor somebody's wish is why."""
        if self._over is None or self._over.exit_code == 0:
            return None
        return RunLost(self.run_file.name, self._over.reason, self._over.exit_code)

    @property
    def link(self) -> str | None:
        """What others paste to join; ``None`` until this peer knows where it can be reached."""
        link = None if self._facts is None else self._facts.link
        return link if link is not None and "?" in link else None

    @property
    def global_tokens(self) -> int:
        """Tokens that the whole run has trained on, as far as this peer knows.

        With its own that are still on their way: the learning rate follows these.
        """
        if self._others is not None:
            return self._agreed.global_tokens
        return 0 if self._facts is None else self._facts.global_tokens

    @property
    def merged_tokens(self) -> int:
        """Those of them that are merged, which is what the run's end counts."""
        return 0 if self._facts is None else self._facts.merged_tokens

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment that the parameters grew from."""
        bases = [self._memory.base(fragment) for fragment in range(self._memory.fragments)]
        return tuple(0 if base is None else base.version for base in bases)

    @property
    def peers(self) -> int:
        """Live peers of the run, this one included."""
        return 1 if self._facts is None else max(1, self._facts.peers)

    @property
    def loss(self) -> float | None:
        """The newest training loss of this peer that was logged and has arrived."""
        return self._learner.loss

    @property
    def held_out_loss(self) -> float | None:
        """The newest one that was published."""
        return None if self._facts is None else self._facts.held_out_loss

    @property
    def others(self) -> tuple[Other, ...]:
        """The largest contributors among the other peers, as of a second ago."""
        return () if self._facts is None else self._facts.others

    @property
    def staleness(self) -> int:
        """By how many versions the parameters are behind the run's, at most."""
        return 0 if self._facts is None else self._facts.staleness

    @property
    def in_flight(self) -> tuple[str, ...]:
        """Fragments, and what is done about them just now: ``2 exchanging``."""
        return () if self._facts is None else self._facts.in_flight

    @property
    def last_offer(self) -> str:
        """What became of this peer's last offer, in two words."""
        return "" if self._facts is None else self._facts.last

    @property
    def rest(self) -> str | None:
        """Why the machine's owner wants no steps for now."""
        return None if self._facts is None else self._facts.rest

    @property
    def limits(self) -> tuple[str, ...]:
        """What the machine's owner allows (``shoal limits``), in words."""
        return () if self._facts is None else self._facts.limits

    @property
    def stats(self) -> Stats:
        facts = self._facts
        return Stats(
            steps=self._learner.steps,
            tokens=self._learner.tokens,
            step_time_s=self._learner.step_time_s,
            blocked=self._learner.blocked,
            agent_restarts=self._agent.restarts,
            rounds=facts.rounds if facts else 0,
            rounds_missed=facts.rounds_missed if facts else 0,
            bytes_sent=facts.bytes_sent if facts else 0,
            bytes_received=facts.bytes_received if facts else 0,
            fates=facts.fates if facts else {},
        )


def was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step was none: a fused one skips it inside its kernel, and says so only here."""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, torch.Tensor) and bool(found_inf.item())


@dataclass(slots=True)
class _Patience:
    """How long a peer may get no further on the way in: more of the state than it ever had.

    An agent that dies and begins again and again gets no further, whatever it says.
    """

    limit_s: float
    since: float
    _done: float = 0.0

    def is_over(self, phase: Phase | None, *, now: float) -> bool:
        if phase is not None and phase.name == "fetching" and phase.done > self._done:
            self._done, self.since = phase.done, now
        return now - self.since > self.limit_s


class _Loss:
    """A loss that may still be on its way from the device."""

    def __init__(self, loss: torch.Tensor | float) -> None:
        self._value: torch.Tensor | float = loss
        self._arrived: torch.cuda.Event | None = None
        if isinstance(loss, torch.Tensor):
            self._value = loss.detach()
            if loss.is_cuda:
                on_host = torch.empty((), dtype=torch.float32, pin_memory=True)
                on_host.copy_(self._value.reshape(()), non_blocking=True)
                self._value = on_host
                self._arrived = torch.cuda.current_stream(loss.device).record_event()

    def ready(self) -> float | None:
        if self._arrived is not None and not self._arrived.query():  # type: ignore[no-untyped-call]
            return None
        return float(self._value)
