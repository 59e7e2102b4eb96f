"""Reports to Kubeflow Trainer: what they say, and that no failure of them stops training."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from peer.views import kubeflow
from peer.views.sinks import SinkFailed, open_curves
from tests.peer.certificates import tls_contexts

AT = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)


def test_a_report_has_the_fields_of_trainer_and_the_rest_as_metrics() -> None:
    figures = {"percent": 12.7, "time_left_s": 90.4, "loss": 2.5, "global_tokens": 1234567890.0}
    assert kubeflow.report(figures, at=AT) == {
        "trainerStatus": {
            "progressPercentage": 12,
            "estimatedRemainingSeconds": 90,
            "metrics": [
                {"name": "global_tokens", "value": "1234567890"},
                {"name": "loss", "value": "2.5"},
            ],
            "lastUpdatedTime": "2026-11-28T12:00:00+00:00",
        }
    }


def test_a_run_that_ends_by_date_reports_no_percentage() -> None:
    status = kubeflow.report({"loss": 2.5}, at=AT)["trainerStatus"]
    assert status.keys() == {"metrics", "lastUpdatedTime"}


class Controller:
    """The controller of Trainer: takes reports with the right token."""

    def __init__(self, folder: Path) -> None:
        self.reports: list[dict[str, object]] = []
        self.refused = threading.Event()
        self.taken = threading.Event()
        controller = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                is_known = self.headers["Authorization"] == "Bearer right"
                if is_known:
                    controller.reports.append(json.loads(body)["trainerStatus"])
                self.send_response(200 if is_known else 401)
                self.end_headers()
                (controller.taken if is_known else controller.refused).set()

            def log_message(self, *_: object) -> None:
                pass

        server_context, _ = tls_contexts(folder)
        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.server.socket = server_context.wrap_socket(self.server.socket, server_side=True)
        self.token = folder / "token"
        self.token.write_text("right\n")
        self.variables = {
            kubeflow.URL: f"https://127.0.0.1:{self.server.server_port}/status",
            kubeflow.CA_CERT: str(folder / "cert.pem"),
            kubeflow.TOKEN: str(self.token),
        }


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    running = Controller(tmp_path)
    thread = threading.Thread(target=running.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.server.shutdown()
    thread.join()
    running.server.server_close()


def test_a_learner_of_a_train_job_reports_its_last_point_before_it_ends(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in controller.variables.items():
        monkeypatch.setenv(name, value)
    with open_curves(tensorboard=None, wandb_project=None, name="x", directory=tmp_path) as curves:
        curves.write({"loss": 1.5, "percent": 50.0}, tokens=10)
    assert controller.reports[-1]["progressPercentage"] == 50
    assert controller.reports[-1]["metrics"] == [{"name": "loss", "value": "1.5"}]


def test_a_token_that_is_replaced_is_read_anew_and_a_refusal_is_said_once(
    controller: Controller, caplog: pytest.LogCaptureFixture
) -> None:
    controller.token.write_text("old")
    sink = kubeflow.Kubeflow(controller.variables)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            controller.refused.clear()
            sink.write({"loss": 1.5}, tokens=10)
            assert controller.refused.wait(10)
        controller.token.write_text("right")
        sink.write({"loss": 1.25}, tokens=20)
        sink.close()
    assert controller.reports[0]["metrics"] == [{"name": "loss", "value": "1.25"}]
    assert len(caplog.records) == 1 and "401" in caplog.text


def test_a_variable_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(kubeflow.URL, "https://127.0.0.1:1/status")
    for name in (kubeflow.TOKEN, kubeflow.CA_CERT):
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(SinkFailed, match="all three"),
        open_curves(tensorboard=None, wandb_project=None, name="x", directory=tmp_path),
    ):
        pass
