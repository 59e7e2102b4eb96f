"""Opening the parts of a run: from what ``join`` was given to everything that training needs.

``open_parts`` opens in this order: folder, progress file, shared memory, the other processes of
this learner, learner, agent process. Its ``ExitStack`` closes them in reverse order. ``arrive``
then exchanges until this peer has the parameters of the run.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from averaging.numbers.layout import Layout
from dht.identity import Identity, PeerId
from peer.bridge.agent_process import AgentProcess
from peer.bridge.messages import Begin, Phase
from peer.bridge.shared_memory import SharedTensors
from peer.data.feed import Feed
from peer.description import tensors_of
from peer.errors import LeftEarly, RunUnreachable, explained, remade
from peer.events.names import printable
from peer.joining.link import FoundRun, find_run
from peer.run_file.schedule import Rates
from peer.run_file.sections import RunFile
from peer.storage.address import LOOKS_FIRST_S, met_here, with_own_peers
from peer.storage.credentials import own_credential
from peer.storage.earlier import load_last_seen, look_at_files
from peer.storage.home import KEY, PEERS, occupied, occupied_free, peer_folder
from peer.storage.inner_saves import InnerSaves
from peer.storage.progress import ProgressFile
from peer.trainer.learner import BUDGET_S, Learner
from peer.trainer.news import News
from peer.trainer.pacing import Pacer, SynchronousRounds
from peer.trainer.parameters import (
    check_layout,
    check_program,
    check_statistics,
    exchanged_tensors,
    frozen_parameters,
    is_coarse,
    model_layout,
    statistics_of,
)
from peer.trainer.rank import Plan, RankParts
from peer.trainer.settings import JoinSettings

STARTS_MAX = 4
"""Number of agents that may die without a word before no further one is started."""

FOUND_AFTER_S = 30.0
END_AGENT_WITHIN_S = 20.0
LINK_WITHIN_S = 5.0
SAID_AFTER_S = 3.0
"""Time in a run's entrance from which on it is said what is waited for."""

LOOK_EVERY_S = 0.02
"""Between looks whether the agent has arrived, which takes seconds. With 2 ms they took 4.5% of a
core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts(RankParts):
    """Everything that the process with the agent needs to train in a run, open and running."""

    progress: ProgressFile
    memory: SharedTensors
    agent: AgentProcess
    learner: Learner
    pacer: Pacer
    synchronous: SynchronousRounds | None
    """The rounds that a synchronous run waits for."""


Asked: TypeAlias = Callable[[], bool]
"""A question with a yes or a no: is this peer's part in the run over, or is it to leave?"""


@dataclass(frozen=True, slots=True)
class _Home:
    """The folder of this peer in this run, locked for this process."""

    directory: Path
    data_directory: Path
    peer_id: PeerId
    credential: bytes
    progress: ProgressFile


def open_parts(plan: Plan, news: News, stack: ExitStack, *, over: Asked, leaving: Asked) -> Parts:
    """Open all parts; ``stack`` closes them. The agent is running when this returns.

    Raises ``NotAdmitted`` before anything is started if the run does not admit this peer.
    """
    settings, found_run = plan.settings, _find(plan.where, plan.settings)
    run = found_run.run
    check_program(run, plan.model)
    buffers = run.outer.buffers
    parameters = exchanged_tensors(plan.model, buffers)
    layout = model_layout(plan.model, run.outer.fragments, buffers=buffers)
    check_layout(layout, run)
    check_statistics(statistics_of(plan.model, buffers))
    home = _open_home(settings, found_run, stack)
    here = met_here(run.run_id, home.directory, stopped=leaving)
    if here:
        news.add("joins_here", {"directory": str(here[0]), "peers": len(here)})
        found_run = replace(found_run, seeds=with_own_peers(run.run_id, found_run.seeds))
    memory = SharedTensors.create(
        [fragment.size for fragment in layout.fragments],
        layout=layout.hash,
        incarnation=home.progress.now.incarnation,
        coarse=is_coarse(parameters),
    )
    stack.callback(memory.close)
    begin = _first_message(plan, found_run, home, layout, is_here=bool(here))
    agent = _agent(settings, begin, memory, home, news)
    pieces = None
    if plan.ranks is not None:
        pieces = plan.ranks.begin(
            run, home.peer_id, layout, parameters, data_dir=home.data_directory
        )
        stack.callback(plan.ranks.end, None)
    learner = Learner(
        memory,
        layout,
        parameters,
        ring=agent.ring,
        # Synchronous runs are exact: an offer is of one step.
        budget_s=math.inf if run.synchronous else BUDGET_S,
        pieces=pieces,
    )
    stack.callback(learner.close)
    agent.start()
    stack.callback(_end_agent, agent)
    synchronous = None
    if run.synchronous:
        synchronous = SynchronousRounds(
            run,
            len(layout.fragments),
            learner=learner,
            agent=agent,
            news=news,
            leaving=leaving,
        )
    return Parts(
        run_file=run,
        peer_id=home.peer_id,
        directory=home.directory,
        progress=home.progress,
        memory=memory,
        agent=agent,
        learner=learner,
        feed=_feed(run, home, news, over=lambda: over() or leaving()),
        rates=Rates(run),
        inner=_inner_saves(plan, run, home, news),
        pacer=Pacer(pace_s=settings.pace_s, device=next(iter(parameters.values())).device),
        synchronous=synchronous,
    )


def _agent(
    settings: JoinSettings, begin: Begin, memory: SharedTensors, home: _Home, news: News
) -> AgentProcess:
    return AgentProcess(
        begin,
        memory,
        log_path=home.directory / "agent.log",
        hear=news.hear,
        died=news.agent_died,
        settings=settings.line,
        command=settings.agent_command,
    )


def _feed(run: RunFile, home: _Home, news: News, *, over: Asked) -> Feed:
    return Feed(
        run,
        home.peer_id,
        data_dir=home.data_directory,
        over=over,
        fetching=partial(_tell_fetching, news),
    )


def _inner_saves(plan: Plan, run: RunFile, home: _Home, news: News) -> InnerSaves:
    return InnerSaves(
        home.directory / "inner",
        plan.model,
        plan.optimizers,
        run_id=run.run_id,
        every_s=plan.settings.save_every_s,
        tell=news.add,
        allowed_bytes=lambda: news.report.inner_bytes,
    )


def _tell_fetching(news: News, name: str, share: float) -> None:
    """Tell how much of a file of the data is there, while training waits for it."""
    text = f"downloading {name}"
    news.add("phase", {"name": "fetching", "text": text, "done": share})
    news.deliver()


def _find(where: str | Path | RunFile, settings: JoinSettings) -> FoundRun:
    if isinstance(where, RunFile):
        return FoundRun(where, where.seed_addresses)

    def tell(reason: str) -> None:
        _say_meanwhile(settings, f"no run file yet: {reason}")

    return find_run(str(where), tell)


def _say_meanwhile(settings: JoinSettings, text: str) -> None:
    """Say what entering the run waits for, in a program that shows nothing else."""
    if not settings.quiet:
        sys.stderr.write(f"shoal: {printable(text)}\n")
        sys.stderr.flush()


def _open_home(settings: JoinSettings, found: FoundRun, stack: ExitStack) -> _Home:
    if settings.directory is None:
        directory = stack.enter_context(occupied_free(found.run))
    else:
        directory = settings.directory
        stack.enter_context(occupied(directory, found.run, "learner"))
    if not settings.quiet:
        for text in look_at_files(directory).told:
            warnings.warn(explained(text, "checkpoint-damaged"), stacklevel=2)
    with peer_folder(directory):
        identity = Identity.load_or_create(directory / KEY)
        credential = own_credential(
            directory, identity, found.run, role="learner", invite=settings.invite or found.invite
        )
        progress = stack.enter_context(
            ProgressFile(directory / "progress", wall_time_s=time.time())
        )
    data_directory = settings.data_directory or found.folder or directory / "data"
    return _Home(directory, data_directory, identity.peer_id, credential, progress)


def _first_message(
    plan: Plan,
    found: FoundRun,
    home: _Home,
    layout: Layout,
    *,
    is_here: bool,
) -> Begin:
    settings, progress = plan.settings, home.progress
    seeds = (*map(str, found.seeds), *settings.seeds)
    return Begin(
        run=found.run.canonical(),
        directory=str(home.directory),
        settings=settings.with_seeds(seeds),
        tensors=tensors_of(layout),
        frozen=frozen_parameters(plan.model),
        allow_frozen_differences=settings.allow_frozen_differences,
        credential=home.credential,
        found_after_s=found_after_s(
            settings, found, home.directory, has_seeds=bool(seeds), is_here=is_here
        ),
        started_at=settings.started_at,
        earlier_tokens=progress.now.earlier_tokens,
        ended_cleanly=progress.previous is None or progress.previous.clean,
    )


def found_after_s(
    settings: JoinSettings, found: FoundRun, directory: Path, *, has_seeds: bool, is_here: bool
) -> float | None:
    """Time after which to found the run if nobody has its state; ``None``: never.

    ``is_here``: a peer of this run runs on this machine, so somebody is there to be met.
    """
    founds = settings.found
    if founds is None:
        is_known = found.by_link or load_last_seen(directory, found.run.run_id) is not None
        founds = settings.found_after_s is not None or not is_known
    if not founds:
        return None
    least_s = LOOKS_FIRST_S if is_here else 0.0
    if settings.found_after_s is not None:
        return max(least_s, settings.found_after_s)
    meets = has_seeds or is_here or (directory / PEERS).exists()
    return FOUND_AFTER_S if meets else 0.0


def _end_agent(agent: AgentProcess) -> None:
    agent.stop()
    agent.join(END_AGENT_WITHIN_S)


def arrive(parts: Parts, settings: JoinSettings, news: News, leaving: Asked) -> None:
    """Exchange until every fragment has a version of the run and the run's tokens are known.

    Then wait a moment for the link that others join by. Raises ``RunUnreachable``, one of
    ``errors.REFUSALS``, or ``LeftEarly``.
    """
    run, timeout_s = parts.run_file.name, settings.start_timeout_s
    patience = Patience(timeout_s, since=time.monotonic())
    said, said_from = "", time.monotonic() + SAID_AFTER_S
    while not _has_arrived(parts, news):
        parts.learner.exchange()
        doing = "starting the agent" if news.phase is None else news.phase.text
        if doing != said and time.monotonic() >= said_from:
            _say_meanwhile(settings, said := doing)
        over = news.over
        if over is None:  # otherwise the error says it all
            news.deliver()
        if leaving():
            raise LeftEarly(run, f"the last that it said: {doing}")
        if over is not None:
            if over.exit_code == 0 and not over.finished:
                raise LeftEarly(run, over.reason, 0)
            refusal = remade(over.kind, over.arguments)
            raise refusal or RunUnreachable(run, over.reason, over.exit_code or 3)
        log = parts.directory / "agent.log"
        if parts.agent.restarts >= STARTS_MAX and news.phase is None:
            raise RunUnreachable(run, f"its agent fails: {_last_words(log)}")
        if patience.is_over(news.phase, now=time.monotonic()):
            raise RunUnreachable(
                run, f"still {doing}, and no further for {timeout_s:g} s; see {log}"
            )
        time.sleep(LOOK_EVERY_S)
    deadline = time.monotonic() + LINK_WITHIN_S
    while not (news.report.status.link or news.over or leaving()):
        parts.learner.exchange()
        if time.monotonic() > deadline:
            return  # it has no address at all, and trains all the same
        time.sleep(LOOK_EVERY_S)


def _has_arrived(parts: Parts, news: News) -> bool:
    memory = parts.memory
    held = all(memory.base(fragment) is not None for fragment in range(memory.fragments))
    # The learning rate of the first step follows the run's tokens.
    return held and bool(news.report.status.versions)


def _last_words(log: Path) -> str:
    """The last line that an agent wrote before it died."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return f"{lines[-1] if lines else 'it said nothing'} (see {log})"


@dataclass(slots=True)
class Patience:
    """Time limit for progress on the way into a run.

    Only a larger part of the run's state than ever before counts as progress: an agent that dies
    and begins again and again makes none.
    """

    limit_s: float
    since: float
    _done: float = 0.0

    def is_over(self, phase: Phase | None, *, now: float) -> bool:
        if phase is not None and phase.name == "waiting":
            self.since = now  # a peer that waits for others waits as long as it takes
        elif phase is not None and phase.name == "fetching" and phase.done > self._done:
            self._done, self.since = phase.done, now
        return now - self.since > self.limit_s
