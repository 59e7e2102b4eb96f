"""Learners of ``tests.swarms.learner_process`` as processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.processes import Processes, said
from tests.swarms import learner_process
from tests.swarms.commands import Command


class Learner(Command):
    """A process of ``learner_process``, or of another module, and its output so far."""

    def __init__(
        self,
        processes: Processes,
        directory: Path,
        *,
        environment: Mapping[str, str] | None = None,
        module: str = "tests.swarms.learner_process",
        **settings: Any,
    ) -> None:
        self.directory = directory
        given = {"directory": str(directory), "run": learner_process.text(), **settings}
        super().__init__(processes, [json.dumps(given)], module=module, environment=environment)

    def said(self, kind: str) -> list[dict[str, Any]]:
        return said(self.output, kind)

    def ready(self) -> dict[str, Any]:
        self._processes.wait_for_line(self.process, "step", timeout_s=120)
        return self.said("ready")[0]

    def last(self) -> dict[str, Any]:
        return self.said("step")[-1]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.said("event") if event["event"] == name]

    def merges(self) -> list[dict[str, Any]]:
        """Rounds that merged this learner's work."""
        return [event for event in self.events("round") if event["contributed"]]

    def own_rounds(self) -> int:
        return len(self.merges())

    def end(self, *, timeout_s: float = 90.0) -> dict[str, Any]:
        self._processes.wait_for_line(self.process, "end", timeout_s=timeout_s)
        assert self.wait(timeout_s=30) == 0, self.output[-2000:]
        return self.said("end")[0]


def seed_of(learner: Learner) -> str:
    link: str = learner.ready()["link"]
    return link.partition("seed=")[2].split("&")[0]
