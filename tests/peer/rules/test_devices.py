"""Names of devices are judged before torch is loaded."""

from __future__ import annotations

import pytest

from peer.rules.devices import DeviceWish, wished_devices


@pytest.mark.parametrize(
    ("device", "devices", "wish"),
    [
        ("auto", "auto", DeviceWish()),
        ("cuda:1", "auto", DeviceWish("cuda:1")),
        ("cpu", "2", DeviceWish("cpu", count=2)),
        ("auto", "1024", DeviceWish(count=1024)),
        ("auto", "cuda, cuda:2", DeviceWish(names=("cuda:0", "cuda:2"))),
    ],
)
def test_devices_are_one_or_several_of_a_kind(device: str, devices: str, wish: DeviceWish) -> None:
    assert wished_devices(device, devices) == wish


@pytest.mark.parametrize(
    "device", ["tpu", "cuda:", "cuda:-1", "cuda:01", "CPU", "", "cuda:0,cuda:1"]
)
def test_a_device_of_another_kind_is_refused_with_those_that_there_are(device: str) -> None:
    with pytest.raises(ValueError, match=r"^--device is '.*'; it is auto, cpu, cuda, .* or mps$"):
        wished_devices(device, "auto")


@pytest.mark.parametrize(
    "devices",
    [
        *("0", "1025", "-1", "9" * 5000, "", "two"),
        *("cuda:0,", "cuda:0,tpu"),
        *("cpu,cpu:0", "cuda:0,cuda", "cuda:1,cuda:1"),  # two ranks on one GPU
        "cpu:0,cuda:0",
    ],
)
def test_devices_that_are_not_different_ones_of_a_kind_are_refused(devices: str) -> None:
    with pytest.raises(ValueError, match=r"^--devices is .* different devices of one kind"):
        wished_devices("auto", devices)


def test_one_device_is_not_named_beside_several() -> None:
    with pytest.raises(ValueError, match=r"--device cuda:0 names one .* pass one of them"):
        wished_devices("cuda:0", "cuda:1")
    with pytest.raises(ValueError, match="for --device cpu or cuda, not for mps"):
        wished_devices("mps", "2")
