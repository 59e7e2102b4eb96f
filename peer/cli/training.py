"""Training as ``shoal start`` and ``join`` do it: in this process, or in one process per device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peer.cli.application import can_draw, complain, reported, say, start_logging
from peer.cli.learner_options import Options
from peer.errors import ExitCode
from peer.installed import extras
from peer.run_file.sections import RunFile
from peer.storage.home import data_home, default_directory

if TYPE_CHECKING:
    from peer.bridge.messages import Fields
    from peer.island.ranks import RankPlace
    from peer.trainer.computing.fitting import Fit, Remembered
    from peer.trainer.loop import Outcome, Stop, TrainerSettings
    from peer.trainer.preflight import Preflight
    from peer.trainer.session import Run
    from peer.trainer.settings import JoinSettings
    from peer.views.watch import Reporter

STEPS_TO_REMEMBER = 20
"""Number of steps after which their median time replaces what was measured before joining."""


def look_at(
    run: RunFile, settings: TrainerSettings, *, devices: int, pace_s: float, directory: Path
) -> Preflight:
    """``peer.trainer.preflight.examine``, in a process of its own if several devices will train."""
    if devices == 1:
        return _examine(run, settings, devices, pace_s, directory, keep=True)
    # This process will only wait: it must not hold a model on the first device.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        work = partial(_examine, run, settings, devices, pace_s, directory, keep=False)
        return process.submit(work).result()


def _examine(
    run: RunFile,
    settings: TrainerSettings,
    devices: int,
    pace_s: float,
    directory: Path,
    *,
    keep: bool,
) -> Preflight:
    from peer.trainer.computing.compiling import defer_compiler
    from peer.trainer.preflight import examine

    defer_compiler()
    checked = examine(
        run,
        settings,
        pace_s=pace_s,
        directory=directory,
        remembered=_measurements(),
        devices=devices,
    )
    return checked if keep else replace(checked, engine=None)


def _measurements() -> Remembered:
    from peer.trainer.computing.fitting import Remembered

    return Remembered(data_home(os.environ) / "measured.json")


@dataclass(frozen=True, slots=True)
class Training:
    """A learner that is about to train."""

    own: JoinSettings
    options: Options
    settings: TrainerSettings
    look: Preflight

    def here(self) -> int:
        """Train in this process. Returns the exit code."""
        from peer.trainer.loop import train

        def work(
            stop: Stop, on_event: Callable[[Fields], None], on_step: Callable[[Run], None]
        ) -> Outcome:
            outcome = train(
                self.look.run,
                own=self.own,
                settings=self.settings,
                stop=stop,
                on_event=on_event,
                on_step=on_step,
                engine=self.look.engine,
            )
            if not self.own.pace_s and outcome.status.steps >= STEPS_TO_REMEMBER:
                # Steps of training say more than the few passes before it.
                sequence_s = outcome.status.step_time_s / self.look.run.inner.batch_size
                _measurements().put_speed(self.look.key, sequence_s)
            return outcome

        return self._watched(work)

    def on_devices(self, devices: tuple[str, ...]) -> int:
        """Train in one process per device, which are one peer. Returns the exit code."""
        from peer.island.ranks import run_island

        return run_island(devices, self.rank, logs=self._folder, tell=complain)

    def rank(self, place: RankPlace) -> int:
        """The work of one of several processes. Only the first one has a screen."""
        from peer.island import join
        from peer.island.training import open_rank
        from peer.trainer.computing.compiling import defer_compiler
        from peer.trainer.loop import Stop as NeverAsked
        from peer.trainer.loop import make_steps

        start_logging()
        defer_compiler()

        def keep(found: Fit) -> None:
            if place.rank == 0:
                _measurements().put(self.look.key, found)

        def work(
            stop: Stop,
            on_event: Callable[[Fields], None] = lambda fields: None,
            on_step: Callable[[Run], None] = lambda run: None,
        ) -> Outcome | None:
            run, own = self.look.run, self.own
            engine = open_rank(run, self.settings, self.look.goal, place, keep=keep)
            joined = join(
                run, model=engine.model, optimizer=engine.optimizer, auto=False, settings=own
            )
            return make_steps(
                joined,
                engine,
                stop=stop,
                steps_max=self.settings.steps_max,
                on_event=on_event,
                on_step=on_step,
            )

        if place.rank == 0:
            return reported(lambda: self._watched(work))
        return reported(lambda: work(NeverAsked()))

    @property
    def _folder(self) -> Path:
        return self.own.directory or default_directory(self.look.run.run_id)

    def _watched(
        self,
        work: Callable[[Stop, Callable[[Fields], None], Callable[[Run], None]], Outcome | None],
    ) -> int:
        """Do the work with a screen, curves, and signals that ask it to leave."""
        from peer.trainer.loop import Stop

        folder = self._folder
        with (
            _curves(self.options, name=self.own.name or folder.name, directory=folder) as curves,
            _reporter(self.options) as reporter,
            Stop(heard=reporter.interrupted).on_signals() as stop,
        ):

            def on_step(run: Run) -> None:
                stop.insisted = partial(_cut_short, run, reporter)
                reporter.on_step(run)
                for each in curves if run.rest is None else ():
                    each.on_step(run)

            outcome = work(stop, reporter.on_event, on_step)
            assert outcome is not None, "the process with the screen has an outcome"
            reporter.done(outcome)
        if outcome.lost is not None:
            raise outcome.lost
        return ExitCode.INTERRUPTED if outcome.stopped and not outcome.finished else 0


@contextmanager
def _curves(options: Options, *, name: str, directory: Path) -> Iterator[list[Any]]:
    """The curves that were asked for, where that part is installed."""
    asked = {"tensorboard": options.tensorboard, "wandb_project": options.wandb}
    with ExitStack() as stack:
        opened = (
            part.open_curves(**asked, name=name, directory=directory) for part in extras("curves")
        )
        yield [stack.enter_context(curves) for curves in opened]


def _cut_short(run: Run, reporter: Reporter) -> None:
    run.cut_short()
    reporter.cut_short(run)


def _reporter(options: Options) -> Reporter:
    from peer.views.watch import JsonReporter, PlainReporter, ScreenReporter

    if options.as_json:
        return JsonReporter(say)
    if options.plain or not can_draw(sys.stdout):
        return PlainReporter(say)
    return ScreenReporter()
