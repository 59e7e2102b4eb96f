"""The namespaces behave like the routers, distances and lines that they stand for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.swarms.hurt_internet import hurt_internet, socket_in
from tests.swarms.namespaces import reaches
from tests.swarms.topology import Internet, Nat, Site

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

OUR_PORT, FIRST_PORT, SECOND_PORT = 5000, 6000, 6001


def bound(namespace: str, port: int) -> socket.socket:
    made = socket_in(namespace)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.settimeout(1.0)
    made.bind(("0.0.0.0", port))
    return made


def listening(namespace: str, port: int) -> socket.socket:
    made = bound(namespace, port)
    made.listen()
    return made


def next_caller(listener: socket.socket) -> tuple[str, int]:
    """The address of the next connection, which is closed."""
    accepted, (ip, port) = listener.accept()
    accepted.close()
    return ip, port


def gets_in(namespace: str, port: int, address: tuple[str, int]) -> bool:
    """Try to connect to an address from a port."""
    with bound(namespace, port) as dialling:
        try:
            dialling.connect(address)
        except (TimeoutError, ConnectionRefusedError):
            return False
        return True


def seconds(act: Callable[[], object]) -> float:
    began = time.monotonic()
    act()
    return time.monotonic() - began


def send_all(one: socket.socket, other: socket.socket, *, size: int) -> None:
    """Send bytes from one end of a connection, and read them all at the other."""

    def act() -> None:
        one.sendall(bytes(size))
        one.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=act)
    sender.start()
    while other.recv(1 << 16):
        pass
    sender.join()


@pytest.fixture(params=list(Nat))
def home(request: pytest.FixtureRequest) -> Iterator[tuple[Nat, Internet]]:
    sites = [Site("anna"), Site("boris"), Site("home", request.param)]
    with hurt_internet(sites) as built:
        yield request.param, built


def test_a_router_lets_in_whom_its_kind_lets_in(home: tuple[Nat, Internet]) -> None:
    nat, net = home
    anna, boris, inside = net.edge("anna"), net.edge("boris"), net.computer("home")
    with (
        listening(anna, FIRST_PORT) as first,
        listening(boris, SECOND_PORT) as second,
        listening(inside, OUR_PORT),
    ):
        assert not gets_in(anna, FIRST_PORT, (net.address("home"), OUR_PORT)), "nobody asked"
        with bound(inside, OUR_PORT) as asking:
            asking.connect((net.address("anna"), FIRST_PORT))
            seen = next_caller(first)
            assert seen[0] == net.address("home")
            if nat is not Nat.SYMMETRIC:
                assert seen[1] == OUR_PORT
            other_port = gets_in(anna, SECOND_PORT, seen)
            other_host = gets_in(boris, FIRST_PORT, seen)
            assert (other_port, other_host) == {
                Nat.FULL_CONE: (True, True),
                Nat.ADDRESS_RESTRICTED: (True, False),
                Nat.PORT_RESTRICTED: (False, False),
                Nat.SYMMETRIC: (False, False),
            }[nat]
            with bound(inside, OUR_PORT) as again:
                again.connect((net.address("boris"), SECOND_PORT))
                assert (next_caller(second) == seen) == (nat is not Nat.SYMMETRIC)


def test_distances_rates_and_faults_are_as_asked() -> None:
    sites = [
        Site("near", one_way_ms=10),
        Site("far", one_way_ms=40),
        Site("home", Nat.PORT_RESTRICTED, computers=2, one_way_ms=20, up_mbit=8, down_mbit=40),
    ]
    with hurt_internet(sites) as net, listening(net.edge("near"), FIRST_PORT) as near:
        near.settimeout(5.0)
        at_near = (net.address("near"), FIRST_PORT)

        with bound(net.edge("far"), 0) as own:
            assert 0.1 <= seconds(lambda: own.connect(at_near)) < 0.2
        next_caller(near)
        with bound(net.computer("home", 1), 0) as own:
            own.settimeout(20.0)
            assert 0.06 <= seconds(lambda: own.connect(at_near)) < 0.15
            with near.accept()[0] as other:
                rate_mbit = 16 / seconds(lambda: send_all(own, other, size=2_000_000))
            assert 5.0 < rate_mbit < 9.0

        home, far = net.computer("home"), net.computer("far")
        end = net.cut("home")
        assert not reaches(home, at_near[0])
        assert reaches(far, at_near[0])
        end()
        assert reaches(home, at_near[0])
        end = net.split(["near", "home"])
        assert reaches(home, at_near[0])
        assert not reaches(far, at_near[0])
        end()
        assert reaches(far, at_near[0])

        with bound(home, OUR_PORT) as own, bound(home, 0) as later:
            own.connect(at_near)
            with near.accept()[0] as other:
                net.forget("home")
                other.sendall(b"lost")
                with pytest.raises(TimeoutError):
                    own.recv(4)
            later.connect(at_near)
            next_caller(near)

        before = net.address("home")
        net.readdress("home")
        with bound(home, 0) as dialling:
            dialling.connect(at_near)
            seen = next_caller(near)
        assert seen[0] == net.address("home") != before
