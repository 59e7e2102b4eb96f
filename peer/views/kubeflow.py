"""The progress of a learner in Kubeflow Trainer, which shows it with the TrainJob.

Trainer tells the containers of a TrainJob where to report by three variables. Each report is one
request; a controller that does not answer costs a point, and never a step.
"""

from __future__ import annotations

import http.client
import json
import logging
import ssl
import threading
import urllib.request
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

URL = "KUBEFLOW_TRAINER_SERVER_URL"
CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"

ANSWER_S = 5.0
LAST_S = 6.0
"""Time to send the last point: longer than the wait for an answer, short of any grace."""

SEPARATE = {"percent": "progressPercentage", "time_left_s": "estimatedRemainingSeconds"}
"""Figures that Trainer has fields for; all others are metrics."""


def report(figures: Mapping[str, float], *, at: datetime) -> dict[str, Any]:
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
    """Sends points as reports. While one is under way, of those that come the last one waits."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._url = variables[URL]
        self._token = Path(variables[TOKEN])
        self._context = ssl.create_default_context(cafile=variables[CA_CERT])
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
                data=json.dumps(report(figures, at=datetime.now(UTC))).encode(),
                headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=ANSWER_S, context=self._context):
                return ""
        except (OSError, ValueError, http.client.HTTPException) as error:
            return str(error) or type(error).__name__
