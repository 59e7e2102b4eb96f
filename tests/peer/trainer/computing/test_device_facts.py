"""Facts that torch reports of this machine's device."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from peer.trainer.computing.device_facts import choose_device, cpu_has_bf16, facts_of, temperature_c


@pytest.mark.parametrize(
    ("capabilities", "has"),
    [
        ({"architecture": "x86_64", "avx2": True, "avx512_f": True}, False),
        ({"architecture": "x86_64", "avx512_bf16": True}, True),
        ({"architecture": "x86_64", "amx_bf16": True}, True),
        ({"architecture": "arm64", "neon": True, "bf16": False}, False),
        ({"architecture": "arm64", "neon": True, "bf16": True}, True),
    ],
)
def test_a_processor_prefers_bf16_where_it_multiplies_it_in_hardware(
    monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, object], has: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert cpu_has_bf16() == has
    assert facts_of(torch.device("cpu")).fast == (("bf16", "fp32") if has else ("fp32",))


def test_an_older_torch_is_asked_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    for has in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda has=has: has)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False, raising=False)
        assert cpu_has_bf16() == has


def test_a_device_that_does_not_tell_its_temperature_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The errors of the driver's library are no ``RuntimeError``."""

    class NVMLError(Exception): ...

    def refuse(device: torch.device) -> int:
        raise NVMLError("Not Supported")

    device = torch.device("cuda", 1)
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NVMLError))
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 40 + device.index)
    assert temperature_c(device) == 41.0
    assert temperature_c(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "temperature", refuse)
    assert temperature_c(device) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert temperature_c(device) is None


def test_a_device_that_is_not_there_is_refused_by_name() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    for wish in ("cuda:99", "toaster"):
        with pytest.raises(ValueError, match=wish):
            choose_device(wish)
