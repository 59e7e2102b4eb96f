"""Rented containers: from a provider's variables to the addresses at which a peer is dialled."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from peer.rules.rented import Container, PublicPorts, container_of, public_ports

RUNPOD = {
    "RUNPOD_PUBLIC_IP": "203.0.113.7",
    "RUNPOD_TCP_PORT_22": "40022",
    "RUNPOD_TCP_PORT_7702": "40002",
    "RUNPOD_TCP_PORT_7701": "40001",
}
ANY = ("/ip4/0.0.0.0/tcp/0",)
TEXT = "RunPod leads 203.0.113.7:40001 to port 7701"
BULK = "203.0.113.7:40002 to port 7702 for bulk data"


@pytest.mark.parametrize(
    ("environment", "container"),
    [
        ({}, None),
        (
            RUNPOD,
            Container("RunPod", "203.0.113.7", {22: 40022, 7701: 40001, 7702: 40002}),
        ),
        (
            {
                "PUBLIC_IPADDR": "198.51.100.9",
                "VAST_TCP_PORT_7701": "31007",
                "VAST_UDP_PORT_1": "2",
            },
            Container("Vast.ai", "198.51.100.9", {7701: 31007}),
        ),
        # A port above all ports is the same inside and outside.
        (
            {"PUBLIC_IPADDR": "198.51.100.9", "VAST_TCP_PORT_70000": "31008"},
            Container("Vast.ai", "198.51.100.9", {31008: 31008}),
        ),
        ({"PUBLIC_IPADDR": "198.51.100.9"}, Container("Vast.ai", "198.51.100.9", {})),
        # Behind the router of a carrier, a name, nonsense: nobody can dial that.
        ({**RUNPOD, "RUNPOD_PUBLIC_IP": "100.65.3.4"}, None),
        ({**RUNPOD, "RUNPOD_PUBLIC_IP": "pod.example.org"}, None),
        (
            {
                "RUNPOD_PUBLIC_IP": "203.0.113.7",
                "RUNPOD_TCP_PORT_7701": "99999",
                "RUNPOD_TCP_PORT_x": "1",
                "RUNPOD_TCP_PORT_1": "-1",
            },
            Container("RunPod", "203.0.113.7", {}),
        ),
    ],
)
def test_a_providers_variables_tell_the_public_ports(
    environment: Mapping[str, str], container: Container | None
) -> None:
    assert container_of(environment) == container


@pytest.mark.parametrize(
    ("listen", "lane", "taken", "ports"),
    [
        (ANY, "auto", (), (7701, 40001, "7702:40002", f"{TEXT}, {BULK}")),
        (ANY, "off", (), (7701, 40001, "off", TEXT)),
        (("/ip4/0.0.0.0/tcp/7701",), "7702", (), (7701, 40001, "7702:40002", f"{TEXT}, {BULK}")),
        # The lane has the lower one: the other one is left.
        (
            ANY,
            "7701",
            (),
            (
                7702,
                40002,
                "7701:40001",
                "RunPod leads 203.0.113.7:40002 to port 7702, "
                "203.0.113.7:40001 to port 7701 for bulk data",
            ),
        ),
        # Another program, such as a second peer, has one of them.
        (
            ANY,
            "auto",
            (7701,),
            (7702, 40002, "auto", "RunPod leads 203.0.113.7:40002 to port 7702"),
        ),
        (("/ip4/0.0.0.0/tcp/7701",), "7702:443", (), (7701, 40001, "7702:443", TEXT)),
    ],
)
def test_a_peer_listens_at_public_ports_and_says_so(
    listen: tuple[str, ...], lane: str, taken: tuple[int, ...], ports: tuple[int, int, str, str]
) -> None:
    container = container_of(RUNPOD)
    assert container is not None
    found = public_ports(
        container, listen=listen, announce=(), lane=lane, is_free=lambda port: port not in taken
    )
    inner, outer, lane, text = ports
    assert found == PublicPorts(
        listen=(f"/ip4/0.0.0.0/tcp/{inner}",),
        announce=(f"/ip4/203.0.113.7/tcp/{outer}",),
        lane=lane,
        text=f"{text}: others dial this peer there",
    )


@pytest.mark.parametrize(
    ("environment", "listen", "announce"),
    [
        (RUNPOD, ANY, ("/dns4/pod.example.org/tcp/7701",)),  # as it is told
        (RUNPOD, ("/ip4/0.0.0.0/tcp/9000",), ()),  # no public port leads there
        ({"RUNPOD_PUBLIC_IP": "203.0.113.7", "RUNPOD_TCP_PORT_22": "40022"}, ANY, ()),
    ],
)
def test_settings_stay_where_no_public_port_leads(
    environment: Mapping[str, str], listen: tuple[str, ...], announce: tuple[str, ...]
) -> None:
    container = container_of(environment)
    assert container is not None
    assert (
        public_ports(
            container, listen=listen, announce=announce, lane="off", is_free=lambda port: True
        )
        is None
    )
