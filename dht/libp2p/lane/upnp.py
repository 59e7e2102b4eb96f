"""UPnP: asks a router for a TCP port as an Internet Gateway Device.

Three steps: a search by UDP (SSDP) names the address of the device's description, the description
names the address of its control, and SOAP calls there add and remove the mapping. All three are
kept to the default gateway: an answer to the search from another address is passed over, and so is
an address elsewhere that the gateway's answer or its description names. Every step has a limit in
bytes and in time.

Mappings have a lease, so that one ends by itself after a crash. Routers that grant permanent ones
only are left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import socket
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit
from xml.parsers import expat

from dht.libp2p.lane.port_lease import LIFE_S, Mapped, NotMapped
from dht.libp2p.lane.punching import own_address_towards

SEARCH_GROUP = "239.255.255.250"
SEARCH_PORT = 1900
DEVICES = tuple(f"urn:schemas-upnp-org:device:InternetGatewayDevice:{n}" for n in (1, 2))
SERVICES = (
    "urn:schemas-upnp-org:service:WANIPConnection:2",
    "urn:schemas-upnp-org:service:WANIPConnection:1",
    "urn:schemas-upnp-org:service:WANPPPConnection:1",
)
"""The services that map ports, best first."""

ANSWER_S = 1.5
TRIES = 2
"""Number of searches, each of which is waited for that long."""

REQUEST_S = 5.0
"""Time limit of one HTTP request, with its answer."""

DOCUMENT_MAX_BYTES = 64 << 10
LINE_MAX_BYTES = 4096
HEADERS_MAX = 64
ADDRESS_MAX = 512

OTHER_PORTS = range(49152, 65536)
"""Outer ports to choose from when the wanted one is taken, as by another computer at home."""

PORTS_TRIED_MAX = 4
TAKEN = 718
"""Error of a router where the outer port leads elsewhere already."""

_PRINTABLE = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class Place:
    """A document of the router: where its web server listens, and the path there."""

    port: int
    path: str


@dataclass(frozen=True, slots=True)
class Control:
    """The control of one service of the router."""

    place: Place
    service: str


class Refused(NotMapped):
    """The router answered a call with an error."""

    def __init__(self, action: str, status: int, code: int | None) -> None:
        super().__init__(action, status, code)
        self.action = action
        self.status = status
        self.code = code

    def __str__(self) -> str:
        return f"the router refused {self.action}: status {self.status}, error {self.code}"


# --- what is read ------------------------------------------------------------------------------


def place_at(router: str, address: str, base: str = "") -> Place:
    """The place that an address names. Raises ``NotMapped`` if it is not on the router.

    ``base``: where the address was found, for one that is relative to it.
    """
    try:
        address = urljoin(base, address)
        parts = urlsplit(address)
        port = parts.port or 80
    except ValueError:
        raise NotMapped(f"the router names the address {address[:ADDRESS_MAX]!r}") from None
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    fits = len(address) <= ADDRESS_MAX and _PRINTABLE.fullmatch(path)
    if parts.scheme != "http" or parts.hostname != router or not fits:
        raise NotMapped(f"the address {address[:ADDRESS_MAX]!r} is not on the router {router}")
    return Place(port, path)


def search(device: str) -> bytes:
    """A search for devices of this type."""
    lines = (
        "M-SEARCH * HTTP/1.1",
        f"HOST: {SEARCH_GROUP}:{SEARCH_PORT}",
        'MAN: "ssdp:discover"',
        "MX: 1",
        f"ST: {device}",
    )
    return "\r\n".join([*lines, "", ""]).encode()


def read_answer(data: bytes) -> str | None:
    """The address of a description, from an answer to a search; ``None`` if it is none."""
    lines = data.decode("latin-1").split("\r\n")
    if not re.match(r"HTTP/1\.[01] 200\b", lines[0]):
        return None
    headers = _headers(lines[1:])
    return headers.get("location") if headers.get("st") in DEVICES else None


def read_description(data: bytes) -> dict[str, str]:
    """Control addresses by service, and the address to which they are relative under ``""``.

    Raises ``NotMapped`` if it cannot be read.
    """
    found: dict[str, str] = {}
    service: dict[str, str] = {}
    text: list[str] = []

    def refuse(*_: object) -> None:
        raise NotMapped("the router's description declares a document type")

    def begin(name: str, _: object) -> None:
        text.clear()
        if name.endswith(" service"):
            service.clear()

    def end(name: str) -> None:
        kind = name.rpartition(" ")[2]
        if kind in ("serviceType", "controlURL"):
            service[kind] = "".join(text).strip()
        elif kind == "URLBase":
            found[""] = "".join(text).strip()
        elif kind == "service" and len(service) == 2:
            found.setdefault(service["serviceType"], service["controlURL"])
        text.clear()

    parser = expat.ParserCreate(namespace_separator=" ")
    parser.StartDoctypeDeclHandler = refuse  # no entities that grow
    parser.StartElementHandler = begin
    parser.EndElementHandler = end
    parser.CharacterDataHandler = text.append
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, LookupError, ValueError) as error:  # encodings: unknown, or refused
        raise NotMapped(f"the router's description cannot be read: {error}") from None
    return found


def control_of(router: str, location: str, description: bytes) -> Control:
    """The best service of a description. Raises ``NotMapped`` if it has none on the router."""
    found = read_description(description)
    base = found.get("") or location
    for service in SERVICES:
        if service in found:
            return Control(place_at(router, found[service], base), service)
    raise NotMapped("the router describes no service that maps ports")


def call(service: str, action: str, arguments: dict[str, str | int]) -> bytes:
    given = "".join(f"<{name}>{value}</{name}>" for name, value in arguments.items())
    return (
        '<?xml version="1.0"?>\n'
        '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"'
        ' s:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
        f'<u:{action} xmlns:u="{service}">{given}</u:{action}></s:Body></s:Envelope>\r\n'
    ).encode()


def _headers(lines: list[str]) -> dict[str, str]:
    split = (line.partition(":") for line in lines[:HEADERS_MAX])
    return {name.strip().lower(): value.strip() for name, _, value in split}


# --- the router --------------------------------------------------------------------------------


class _Answers(asyncio.DatagramProtocol):
    """Answers to a search, with the addresses that they come from. Failures to send are nothing:
    there may be no route to the group."""

    def __init__(self) -> None:
        self.received: asyncio.Queue[tuple[bytes, str]] = asyncio.Queue(64)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        with contextlib.suppress(asyncio.QueueFull):
            self.received.put_nowait((data, addr[0]))


class Upnp:
    """One router, asked over UPnP."""

    name = "UPnP"

    def __init__(self, router: str) -> None:
        self._router = router
        self._control: Control | None = None

    async def map(self, port: int, *, outer_port: int) -> Mapped:
        """Ask for a mapping, from another outer port if that one is taken.

        Raises ``NotMapped`` or ``OSError``.
        """
        here = self._own_address()
        known = self._control
        try:
            return await self._add(known or await self._find(here), here, port, outer_port)
        except (NotMapped, OSError):
            if known is None:
                raise
            self._control = None  # it may have been started again, with another control address
        return await self._add(await self._find(here), here, port, outer_port)

    async def remove(self, port: int, *, outer_port: int) -> None:
        if self._control is not None:
            await self._call(self._control, "DeletePortMapping", _of(outer_port))

    def _own_address(self) -> str:
        """The address of this machine at which the router sees it."""
        if not (address := own_address_towards(self._router)):
            raise OSError(f"there is no route to the router {self._router}")
        return address

    async def _add(self, control: Control, here: str, port: int, outer_port: int) -> Mapped:
        for tries_left in reversed(range(PORTS_TRIED_MAX)):
            arguments: dict[str, str | int] = {
                **_of(outer_port),
                "NewInternalPort": port,
                "NewInternalClient": here,
                "NewEnabled": 1,
                "NewPortMappingDescription": "shoal",
                "NewLeaseDuration": LIFE_S,
            }
            try:
                await self._call(control, "AddPortMapping", arguments)
            except Refused as error:
                if error.code != TAKEN or not tries_left:
                    raise
                outer_port = secrets.choice(OTHER_PORTS)
            else:
                self._control = control
                return Mapped(outer_port, LIFE_S)
        raise AssertionError("the last try returns or raises")

    async def _find(self, here: str) -> Control:
        location = await self._search(here)
        status, description = await self._request("GET", place_at(self._router, location))
        if status != 200:
            raise NotMapped(f"the router does not show its description: status {status}")
        return control_of(self._router, location, description)

    async def _search(self, here: str) -> str:
        """The address of the router's description."""
        asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            asking.setblocking(False)
            asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(here))
            asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 2)
            asking.bind((here, 0))
            loop = asyncio.get_running_loop()
            transport, answers = await loop.create_datagram_endpoint(_Answers, sock=asking)
        except BaseException:
            asking.close()
            raise
        try:
            for _ in range(TRIES):
                for device in DEVICES:
                    for at in (SEARCH_GROUP, self._router):  # some answer to one of them only
                        transport.sendto(search(device), (at, SEARCH_PORT))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(ANSWER_S):
                        while True:
                            data, source = await answers.received.get()
                            location = read_answer(data)
                            if location is not None and source == self._router:
                                return location
        finally:
            transport.close()
        raise NotMapped("the router does not answer UPnP")

    async def _call(self, control: Control, action: str, arguments: dict[str, str | int]) -> None:
        """Call an action. Raises ``Refused``, ``NotMapped`` or ``OSError``."""
        body = call(control.service, action, arguments)
        headers = (
            'Content-Type: text/xml; charset="utf-8"',
            f'SOAPAction: "{control.service}#{action}"',
        )
        status, answer = await self._request("POST", control.place, *headers, body=body)
        if status != 200:
            code = re.search(rb"<errorCode>\s*(\d{1,6})\s*</errorCode>", answer)
            raise Refused(action, status, int(code[1]) if code else None)

    async def _request(
        self, method: str, place: Place, *headers: str, body: bytes = b""
    ) -> tuple[int, bytes]:
        """Status and content of the answer. Raises ``NotMapped`` or ``OSError``."""
        lines = (
            f"{method} {place.path} HTTP/1.1",
            f"Host: {self._router}:{place.port}",
            *headers,
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        async with asyncio.timeout(REQUEST_S):
            reader, writer = await asyncio.open_connection(
                self._router, place.port, limit=LINE_MAX_BYTES
            )
            try:
                writer.write("\r\n".join([*lines, "", ""]).encode() + body)
                return await _read_response(reader)
            except (ValueError, EOFError) as error:
                raise NotMapped(f"the router's answer cannot be read: {error}") from None
            finally:
                writer.close()


def _of(outer_port: int) -> dict[str, str | int]:
    """The arguments that name a mapping."""
    return {"NewRemoteHost": "", "NewExternalPort": outer_port, "NewProtocol": "TCP"}


async def _read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and content. Raises ``ValueError`` or ``EOFError`` if they cannot be read."""
    status = re.match(r"HTTP/1\.[01] (\d{3})\b", await _line(reader))
    if status is None:
        raise ValueError("it is not HTTP")
    lines: list[str] = []
    while line := await _line(reader):
        lines.append(line)
        if len(lines) > HEADERS_MAX:
            raise ValueError(f"it has over {HEADERS_MAX} headers")
    headers = _headers(lines)
    if "chunked" in headers.get("transfer-encoding", "").lower():
        content = b""
        while size := _size(await _line(reader), 16, DOCUMENT_MAX_BYTES - len(content)):
            content += await reader.readexactly(size)
            await _line(reader)
    elif "content-length" in headers:
        content = await reader.readexactly(_size(headers["content-length"], 10, DOCUMENT_MAX_BYTES))
    else:
        content = b""
        while piece := await reader.read(LINE_MAX_BYTES):
            content += piece
            _size(str(len(content)), 10, DOCUMENT_MAX_BYTES)
    return int(status[1]), content


async def _line(reader: asyncio.StreamReader) -> str:
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise EOFError("it ends early")
    return line.decode("latin-1").strip()


def _size(text: str, base: int, most: int) -> int:
    digits = text.partition(";")[0].strip()
    if not re.fullmatch(r"[0-9a-fA-F]{1,8}", digits):
        raise ValueError(f"its length is {text[:20]!r}")
    size = int(digits, base)
    if size > most:
        raise ValueError(f"it has over {DOCUMENT_MAX_BYTES} bytes")
    return size
