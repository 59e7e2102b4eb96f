"""Asking a router for a port over UPnP, with a library that stands in for ``miniupnpc``.

``tests/integration/wan/test_port_mapping.py`` asks a router with the library itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from dht.libp2p.lane import port_mapping
from dht.libp2p.lane.port_mapping import (
    LIFE_S,
    OTHER_PORTS,
    PORTS_TRIED_MAX,
    SEARCH_MS,
    TAKEN,
    Mapped,
    NotMapped,
    Upnp,
    ask,
)
from tests.dht.libp2p.lane_ends import HERE

PORT = 7710
ELSEWHERE = "192.168.1.9"


class Router:
    """The library, and the one router that it finds."""

    lanaddr = HERE
    control = f"http://{HERE}:5000/ctl/IPConn"
    mapped: ClassVar[dict[int, tuple[str, int, int]]] = {}
    """Address and port inside, and the lease, by outer port."""

    refuses = ""
    asked = 0

    def __init__(self, multicastif: str, discoverdelay: int) -> None:
        assert (multicastif, discoverdelay) == (HERE, SEARCH_MS)

    def discover(self) -> int:
        return 1

    def selectigd(self) -> str:
        return self.control

    def addportmapping(
        self, outer: int, kind: str, client: str, port: int, what: str, remote: str, lease_s: int
    ) -> None:
        Router.asked += 1
        assert (kind, what, remote) == ("TCP", "shoal", "")
        taken = outer in self.mapped and self.mapped[outer][:2] != (client, port)
        if refusal := self.refuses or TAKEN * taken:
            raise Exception(refusal)  # as the library does
        self.mapped[outer] = client, port, lease_s

    def deleteportmapping(self, outer: int, kind: str) -> None:
        assert kind == "TCP"
        del self.mapped[outer]


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> type[Router]:
    library = ModuleType("miniupnpc")
    library.UPnP = Router  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "miniupnpc", library)
    monkeypatch.setattr(Router, "mapped", {})
    monkeypatch.setattr(Router, "asked", 0)
    return Router


def test_a_port_is_mapped_with_a_lease_and_the_mapping_removed(router: type[Router]) -> None:
    assert ask(HERE, "map", PORT, PORT) == PORT
    assert router.mapped == {PORT: (HERE, PORT, LIFE_S)}
    ask(HERE, "remove", PORT, PORT)
    assert router.mapped == {}


def test_a_port_that_leads_elsewhere_already_is_left_to_its_owner(router: type[Router]) -> None:
    router.mapped[PORT] = theirs = ELSEWHERE, PORT, 0
    other = ask(HERE, "map", PORT, PORT)
    assert other in OTHER_PORTS
    assert router.mapped == {PORT: theirs, other: (HERE, PORT, LIFE_S)}


@pytest.mark.parametrize("refusal", [TAKEN, "OnlyPermanentLeasesSupported"])
def test_a_refusal_is_told_after_a_few_requests(
    router: type[Router], monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    monkeypatch.setattr(Router, "refuses", refusal)
    with pytest.raises(Exception, match=refusal):
        ask(HERE, "map", PORT, PORT)
    assert router.asked == (PORTS_TRIED_MAX if refusal == TAKEN else 1)


@pytest.mark.parametrize(
    "control", [f"http://{ELSEWHERE}:5000/ctl", f"http://{HERE}.example.org/", "", "file:///x"]
)
def test_a_control_point_that_is_not_on_the_router_is_not_asked(
    router: type[Router], monkeypatch: pytest.MonkeyPatch, control: str
) -> None:
    monkeypatch.setattr(Router, "control", control)
    with pytest.raises(NotMapped, match="not on the router"):
        ask(HERE, "map", PORT, PORT)
    assert not router.asked


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Writes the library for the process that is started."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    def write(text: str) -> None:
        (tmp_path / "miniupnpc.py").write_text(text)

    return write


async def test_the_library_is_asked_in_a_process_of_its_own(library: Callable[[str], None]) -> None:
    library(
        "class UPnP:\n"
        "    lanaddr = 'here'\n"
        "    def __init__(self, **_): pass\n"
        "    def discover(self): return 1\n"
        f"    def selectigd(self): return 'http://{HERE}/'\n"
        "    def addportmapping(self, *said):\n"
        f"        assert said == ({PORT}, 'TCP', 'here', {PORT}, 'shoal', '', {LIFE_S})\n"
        "    def deleteportmapping(self, *said): raise Exception('NoSuchEntryInArray')\n"
    )
    assert await Upnp(HERE).map(PORT, outer_port=PORT) == Mapped(PORT, LIFE_S)
    assert "miniupnpc" not in sys.modules
    with pytest.raises(NotMapped, match="over UPnP: NoSuchEntryInArray"):
        await Upnp(HERE).remove(PORT, outer_port=PORT)


@pytest.mark.parametrize(
    ("does", "said"),
    [("os.abort()", "ended with status -6"), ("raise OSError('no lo')", "over UPnP: no lo")],
)
async def test_a_library_that_crashes_costs_a_mapping_and_nothing_else(
    library: Callable[[str], None], does: str, said: str
) -> None:
    library(f"import os; {does}")
    with pytest.raises(NotMapped, match=said):
        await Upnp(HERE).map(PORT, outer_port=PORT)


async def test_a_router_that_never_answers_is_given_up(
    library: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port_mapping, "WITHIN_S", 1.0)
    library("import signal; signal.pause()")
    with pytest.raises(TimeoutError):
        await Upnp(HERE).map(PORT, outer_port=PORT)


async def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapping, "LIBRARY", "a_library_that_nobody_has")
    with pytest.raises(NotMapped, match=r"shoal\[upnp\]"):
        await Upnp(HERE).map(PORT, outer_port=PORT)
