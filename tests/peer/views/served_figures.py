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
    return set(re.findall(r"\bshoal_[a-z_0-9]+", text))


def served_by_agents() -> set[str]:
    class Figures:
        def collect(self) -> object:
            return agent_page.metrics(a_status())

    registry = CollectorRegistry()
    registry.register(Figures())  # type: ignore[arg-type]
    return names(generate_latest(registry).decode())


def served_by_bootstrap_peers() -> set[str]:
    source = (ROOT / "peer/extras/hosting/bootstrap.py").read_text()
    tables = re.findall(r"(gauges|counters): [^=]+= \{(.*?)\n        \}", source, re.DOTALL)
    rows = [(kind, n) for kind, rows in tables for n in re.findall(r'^ {12}"(\w+)"', rows, re.M)]
    rows += re.findall(r'(?<!\.)(gauges|counters)\["(\w+)"\]', source)
    found = {f"shoal_{name}" if kind == "gauges" else f"shoal_{name}_total" for kind, name in rows}
    families = re.findall(r'CounterMetricFamily\(\s*"(shoal_\w+)"', source)
    return found | {f"{name}_total" for name in families}
