"""Names of the figures that agents and bootstrap peers serve under /metrics."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from peer.views import agent_page
from tests.peer.statuses import a_status

ROOT = Path(__file__).parents[3]


def names(text: str) -> set[str]:
    return set(re.findall(r"\bshoal_[a-z_]+", text))


def served_by_agents() -> set[str]:
    class Figures:
        def collect(self) -> object:
            return agent_page.figures(a_status())

    registry = CollectorRegistry()
    registry.register(Figures())  # type: ignore[arg-type]
    return names(generate_latest(registry).decode())


def served_by_bootstrap_peers() -> set[str]:
    source = (ROOT / "peer" / "hosting" / "bootstrap.py").read_text()
    found = set()
    for kind, name in re.findall(r'(_gauge|ounter\w*)\(\s*"(shoal_\w+)"', source):
        found.add(name if kind == "_gauge" else f"{name}_total")
    return found
