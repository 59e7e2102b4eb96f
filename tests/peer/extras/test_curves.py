"""Curves for other tools: off by default, few points, and no failure that stops training."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from peer.errors import ExtraMissing, Unusable
from peer.extras import curves
from peer.extras.curves import Curves, TensorBoard, Wandb, open_curves
from tests.peer.certificates import tls_contexts

HOUR_S = 3600.0


class Noted:
    """A sink that keeps its points and fails after some of them."""

    def __init__(self, fails_after: int = 1_000_000) -> None:
        self.points: list[int] = []
        self.closed = False
        self._fails_after = fails_after

    def write(self, figures: Mapping[str, float], *, tokens: int) -> None:
        if len(self.points) == self._fails_after:
            raise OSError(28, "No space left on device")
        self.points.append(tokens)

    def close(self) -> None:
        self.closed = True


def points_in(hours: float, *, step_s: float = 1.0) -> int:
    now = 0.0
    curves = Curves([], clock=lambda: now)
    count = 0
    while now < hours * HOUR_S:
        count += curves.is_due()
        now += step_s
    return count


def test_points_come_at_growing_intervals() -> None:
    assert points_in(0.1) == 72
    assert 3500 < points_in(24.0) < 4100
    assert points_in(30 * 24.0, step_s=10.0) < 8000


def test_a_sink_that_fails_gets_no_more_points_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, sound = Noted(fails_after=1), Noted()
    curves = Curves([broken, sound])
    with caplog.at_level(logging.WARNING):
        for tokens in range(4):
            curves.write({"loss": 1.0}, tokens=tokens)
    assert (broken.points, sound.points) == ([0], [0, 1, 2, 3])
    assert len(caplog.records) == 1 and "No space left" in caplog.text


def test_there_are_no_sinks_by_default(tmp_path: Path) -> None:
    where = tmp_path / "peer"
    with open_curves(tensorboard=None, wandb_project=None, name="x", directory=where) as curves:
        curves.write({"loss": 1.0}, tokens=1)
    assert not where.exists()


@pytest.mark.parametrize("module", ["wandb", "torch.utils.tensorboard"])
def test_a_missing_package_is_named_with_its_extra(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    extra = module.rpartition(".")[2]
    with pytest.raises(ExtraMissing, match=rf"pip install 'shoal\[{extra}\]'") as caught:
        if extra == "wandb":
            Wandb("project", name="anna", directory=tmp_path)
        else:
            TensorBoard(tmp_path)
    assert caught.value.exit_code == 2


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="shoal[tensorboard]"
    )
    folder = tmp_path / "curves"
    with open_curves(
        tensorboard=folder, wandb_project=None, name="anna", directory=tmp_path
    ) as curves:
        for step in range(3):
            curves.write({"loss": 3.0 - step, "peers": 4.0}, tokens=1000 * step)
    read = accumulator.EventAccumulator(str(folder))
    read.Reload()
    losses = [(point.step, point.value) for point in read.Scalars("shoal/loss")]
    assert losses == [(0, 3.0), (1000, 2.0), (2000, 1.0)]
    assert read.Tags()["scalars"] == ["shoal/loss", "shoal/peers"]


def test_a_folder_that_is_not_writable_is_an_error_of_one_line(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="shoal[tensorboard]")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Unusable, match="omit the option"):
        TensorBoard(tmp_path / "file" / "curves")


@pytest.mark.slow
def test_weights_and_biases_keeps_a_run_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="shoal[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with open_curves(
        tensorboard=None, wandb_project="shoal-test", name="anna", directory=tmp_path
    ) as curves:
        curves.write({"loss": 2.0}, tokens=1000)
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


AT = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)


def test_a_report_has_the_fields_of_trainer_and_the_rest_as_metrics() -> None:
    figures = {"percent": 12.7, "time_left_s": 90.4, "loss": 2.5, "global_tokens": 1234567890.0}
    assert curves.train_job_report(figures, at=AT) == {
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
    status = curves.train_job_report({"loss": 2.5}, at=AT)["trainerStatus"]
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
            curves.KUBEFLOW_URL: f"https://127.0.0.1:{self.server.server_port}/status",
            curves.KUBEFLOW_CA_CERT: str(folder / "cert.pem"),
            curves.KUBEFLOW_TOKEN: str(self.token),
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
    sink = curves.Kubeflow(controller.variables)
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
    monkeypatch.setenv(curves.KUBEFLOW_URL, "https://127.0.0.1:1/status")
    for name in (curves.KUBEFLOW_TOKEN, curves.KUBEFLOW_CA_CERT):
        monkeypatch.delenv(name, raising=False)
    with (
        pytest.raises(Unusable, match="all three"),
        open_curves(tensorboard=None, wandb_project=None, name="x", directory=tmp_path),
    ):
        pass
