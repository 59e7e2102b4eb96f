"""An agent's local page: is it in the run, and its figures for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from peer.pages import Check
from peer.status import Status


def checks(status: Status) -> Sequence[Check]:
    """What has to be right before this peer is of use to the run."""
    met = status.peers > 1
    return (
        Check(
            "in_the_run",
            status.phase == "ready",
            "it has the run's parameters" if status.phase == "ready" else f"still {status.phase}",
        ),
        Check(
            "peers",
            True,  # a run of one peer is a run
            f"{status.peers - 1} others are live" if met else "nobody else is here; it trains on",
        ),
    )


def figures(status: Status) -> Iterator[Metric]:
    """Everything in ``status`` that is a number, under names that begin with shoal_."""
    for name, value, text in (
        ("peers", status.peers, "Live peers of the run, this one included"),
        ("staleness_versions", status.staleness, "Versions that the trainer is behind, at most"),
        ("step_seconds", status.step_time_s, "Median time of a step"),
        ("loss", status.loss, "The last training loss"),
        ("held_out_loss", None if status.held_out is None else status.held_out.loss, "Newest"),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"shoal_{name}", text, value=float(value))
    for name, count, text in (
        ("steps", status.steps, "Optimizer steps since the trainer started"),
        ("rounds", status.rounds, "Rounds finished"),
        ("rounds_missed", status.rounds_missed, "Rounds that closed without this peer's work"),
        ("sent_bytes", status.bytes_sent, "Bytes of rounds sent"),
        ("received_bytes", status.bytes_received, "Bytes of rounds received"),
        ("blocked_seconds", status.blocked_s, "Time that the trainer was held up"),
        ("global_tokens", status.global_tokens, "Tokens that the run has trained on"),
    ):
        yield CounterMetricFamily(f"shoal_{name}", text, value=float(count))
    versions = GaugeMetricFamily("shoal_version", "Version of each fragment", labels=["fragment"])
    for fragment, version in enumerate(status.versions):
        versions.add_metric([str(fragment)], version)
    yield versions
    tokens = GaugeMetricFamily("shoal_tokens", "This peer's tokens by their fate", labels=["fate"])
    for name, amount in sorted(status.fates.items()):
        tokens.add_metric([name], amount)
    yield tokens
