"""Battery and temperature, as recorded from machines that have such sensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from peer.guest import sensors


def degrees(*current: float | None) -> list[Any]:
    return [SimpleNamespace(current=each) for each in current]


@pytest.mark.parametrize(
    ("told", "held"),
    [
        (None, None),
        (SimpleNamespace(percent=40, power_plugged=False), 0.4),
        (SimpleNamespace(percent=40, power_plugged=True), None),
        (SimpleNamespace(percent=40, power_plugged=None), None),  # it does not know
    ],
)
def test_a_battery_counts_while_it_is_used(
    told: object, held: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "sensors_battery", lambda: told, raising=False)
    assert sensors.battery() == held


def test_the_hottest_processor_counts_and_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"coretemp": degrees(61.0, 70.0, None), "nvme": degrees(88.0), "k10temp": degrees(55.0)}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: told, raising=False)
    assert sensors.celsius() == 70.0


def test_a_machine_without_sensors_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sensors_battery", "sensors_temperatures"):
        monkeypatch.delattr(psutil, name, raising=False)
    assert sensors.battery() is None and sensors.celsius() is None
