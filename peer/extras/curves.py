"""Curves in TensorBoard, in Weights & Biases and in Kubeflow Trainer. Off unless asked for.

A sink gets a few figures at growing intervals, over the run's tokens: a run of a month writes a few
thousand points. A sink that fails is logged once and gets no more points; training goes on.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from peer.errors import ExtraMissing, Unusable
from peer.installed import check_installed, needed

if TYPE_CHECKING:
    from peer.trainer.session import Run

logger = logging.getLogger(__name__)

EVERY_S = 5.0
OF_ELAPSED = 1 / 1000
"""Interval between points, as a part of the time since the first: 3900 in a day, 7300 a month."""

WANDB_START_S = 30.0
WANDB_END_S = 20.0
"""Time to send the last points: a network that is down must not keep a peer from leaving."""


class Sink(Protocol):
    """A destination of curves."""

    def write(self, figures: Mapping[str, float], *, tokens: int) -> None:
        """Add one point to every curve. Must not wait for a network."""
        ...

    def close(self) -> None:
        """Write what is left, for a bounded time."""
        ...


class Curves:
    """Gives points to sinks, at intervals that grow with the time."""

    def __init__(
        self, sinks: Sequence[Sink], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._sinks = list(sinks)
        self._clock = clock
        self._began = clock()
        self._due_at = self._began

    def on_step(self, run: Run) -> None:
        if self._sinks and self.is_due():
            self.write(run.status.numbers(), tokens=run.global_tokens)

    def is_due(self) -> bool:
        """``True`` if a point is due, in which case the time of the next one is set."""
        now = self._clock()
        if now < self._due_at:
            return False
        self._due_at = now + max(EVERY_S, OF_ELAPSED * (now - self._began))
        return True

    def write(self, found: Mapping[str, float], *, tokens: int) -> None:
        """Give a point to every sink. A sink that fails gets no more points."""
        for sink in list(self._sinks):
            try:
                sink.write(found, tokens=tokens)
            except (OSError, RuntimeError, ValueError) as error:
                self._sinks.remove(sink)
                logger.warning("curve_ends sink=%s reason=%s", type(sink).__name__, error)


def check_curves(*, tensorboard: Path | None, wandb_project: str | None) -> None:
    """Check early that the packages of the sinks asked for are there. Raises ``ExtraMissing``."""
    if tensorboard is not None:
        check_installed("tensorboard", "--tensorboard", extra="tensorboard")
    if wandb_project is not None:
        check_installed("wandb", "--wandb", extra="wandb")


@contextmanager
def open_curves(
    *, tensorboard: Path | None, wandb_project: str | None, name: str, directory: Path
) -> Iterator[Curves]:
    """Open the sinks asked for and that of a TrainJob for the block. Raises ``Unusable``."""
    sinks: list[Sink] = []
    try:
        if tensorboard is not None:
            sinks.append(TensorBoard(tensorboard))
        if wandb_project is not None:
            sinks.append(Wandb(wandb_project, name=name, directory=directory))
        if os.environ.get(KUBEFLOW_URL):
            sinks.append(of_train_job(os.environ))
        yield Curves(sinks)
    finally:
        for sink in sinks:
            sink.close()


def of_train_job(variables: Mapping[str, str]) -> Sink:
    """The sink of the TrainJob that this process is part of."""
    try:
        return Kubeflow(variables)
    except (OSError, KeyError) as error:
        raise _failed(KUBEFLOW_URL, str(error), "set all three of its variables") from error


def _failed(option: str, reason: str, remedy: str) -> Unusable:
    text = f"{option} cannot be used: {reason}; {remedy}, or omit the option"
    return Unusable(text, section="sink-failed")


class TensorBoard:
    """Event files in a folder, for ``tensorboard --logdir``."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ExtraMissing("--tensorboard", "tensorboard", "tensorboard") from error
        try:
            self._writer = SummaryWriter(str(folder), flush_secs=30)
        except OSError as error:
            reason = f"{folder}: {error.strerror or error}"
            raise _failed("--tensorboard", reason, "choose a folder that is writable") from error

    def write(self, figures: Mapping[str, float], *, tokens: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(f"shoal/{name}", value, global_step=tokens)

    def close(self) -> None:
        try:
            self._writer.close()
        except OSError as error:
            logger.warning("curve_cut_short sink=TensorBoard reason=%s", error)


class Wandb:
    """A run in a project of Weights & Biases, or in a folder with WANDB_MODE=offline."""

    def __init__(self, project: str, *, name: str, directory: Path) -> None:
        wandb = needed("wandb", "--wandb", extra="wandb")
        directory.mkdir(parents=True, exist_ok=True)
        try:
            self._run: Any = wandb.init(
                project=project,
                name=name,
                dir=str(directory),
                settings=wandb.Settings(init_timeout=WANDB_START_S, console="off", silent=True),
            )
        except (wandb.errors.Error, OSError, ValueError) as error:
            remedy = "run `wandb login`, or set WANDB_MODE=offline"
            raise _failed("--wandb", str(error).splitlines()[0], remedy) from error
        self._end_service: Callable[[], None] = wandb.teardown
        self._run.define_metric("*", step_metric="global_tokens")

    def write(self, figures: Mapping[str, float], *, tokens: int) -> None:
        self._run.log({**figures, "global_tokens": tokens})

    def close(self) -> None:
        def end() -> None:
            self._run.finish()
            self._end_service()  # a process that would otherwise live as long as this one

        ending = threading.Thread(target=end, name="wandb", daemon=True)
        ending.start()
        ending.join(WANDB_END_S)
        if ending.is_alive():
            logger.warning("curve_cut_short sink=Wandb seconds=%.0f", WANDB_END_S)


KUBEFLOW_URL = "KUBEFLOW_TRAINER_SERVER_URL"
KUBEFLOW_CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
KUBEFLOW_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"

ANSWER_S = 5.0
LAST_S = 6.0
"""Time to send the last point: longer than the wait for an answer, short of any grace."""

SEPARATE = {"percent": "progressPercentage", "time_left_s": "estimatedRemainingSeconds"}
"""Figures that Trainer has fields for; all others are metrics."""


def train_job_report(figures: Mapping[str, float], *, at: datetime) -> dict[str, Any]:
    """The body of a request."""
    fields = {field: int(figures[name]) for name, field in SEPARATE.items() if name in figures}
    metrics = [
        {"name": name, "value": f"{value:.10g}"}
        for name, value in sorted(figures.items())
        if name not in SEPARATE
    ]
    stamp = at.astimezone(UTC).isoformat(timespec="seconds")
    return {"trainerStatus": {**fields, "metrics": metrics, "lastUpdatedTime": stamp}}


class Kubeflow:
    """The progress in Kubeflow Trainer, which shows it with the TrainJob.

    Trainer tells the containers of a TrainJob where to report by three variables. Each report is
    one request; a controller that does not answer costs a point, and never a step. While one is
    under way, of those that come the last one waits.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._url = variables[KUBEFLOW_URL]
        self._token = Path(variables[KUBEFLOW_TOKEN])
        self._context = ssl.create_default_context(cafile=variables[KUBEFLOW_CA_CERT])
        self._changed = threading.Condition()
        self._waiting: Mapping[str, float] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._send_all, name="kubeflow", daemon=True)
        self._thread.start()

    def write(self, figures: Mapping[str, float], *, tokens: int) -> None:
        with self._changed:
            self._waiting = dict(figures)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(LAST_S)

    def _send_all(self) -> None:
        failed = ""
        while (figures := self._next()) is not None:
            failure = self._failure_of(figures)
            if failure and failure != failed:
                logger.warning("progress_not_taken sink=Kubeflow reason=%s", failure)
            failed = failure

    def _next(self) -> Mapping[str, float] | None:
        """The next point; ``None`` when there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._waiting is not None)
            figures, self._waiting = self._waiting, None
            return figures

    def _failure_of(self, figures: Mapping[str, float]) -> str:
        """Send a point. Why it was not taken, or nothing."""
        try:
            token = self._token.read_text(encoding="utf-8").strip()  # it is replaced every hour
            request = urllib.request.Request(
                self._url,
                data=json.dumps(train_job_report(figures, at=datetime.now(UTC))).encode(),
                headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=ANSWER_S, context=self._context):
                return ""
        except (OSError, ValueError, http.client.HTTPException) as error:
            return str(error) or type(error).__name__
