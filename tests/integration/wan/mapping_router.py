"""A home's router that maps ports: ``mapping_router OWN_ADDRESS``, started in its namespace.

Answers requests of the computers inside, for TCP only, with a rule for nftables in the table of
``tests.swarms.topology``: with NAT-PMP (RFC 6886), or over UPnP if ``upnp PORT`` follows
the address. With NAT-PMP the outer port is ``SHIFT`` above the one inside, over UPnP the outer port
of this number leads to another computer: a peer which tells its own port is not reached. Prints
each mapping and each removal.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import cast

from tests.processes import say

PORT = 5351
SHIFT = 1000
_REQUEST = struct.Struct("!BBHHHI")
DEVICE = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
SERVICE = "urn:schemas-upnp-org:service:WANIPConnection:1"
GROUP = "239.255.255.250"
SEARCH_PORT = 1900
EXTERNAL = "203.0.113.7"

DESCRIPTION = f"""\
<?xml version="1.0"?>
<root xmlns="urn:schemas-upnp-org:device-1-0">
<specVersion><major>1</major><minor>0</minor></specVersion>
<device><deviceType>{DEVICE}</deviceType><friendlyName>router</friendlyName><UDN>uuid:1</UDN>
<serviceList><service>
<serviceType>urn:schemas-upnp-org:service:Layer3Forwarding:1</serviceType>
<serviceId>urn:upnp-org:serviceId:L3Forwarding1</serviceId><controlURL>/ctl/L3F</controlURL>
<eventSubURL>/evt/L3F</eventSubURL><SCPDURL>/L3F.xml</SCPDURL></service></serviceList>
<deviceList><device><deviceType>urn:schemas-upnp-org:device:WANDevice:1</deviceType>
<UDN>uuid:2</UDN><deviceList><device>
<deviceType>urn:schemas-upnp-org:device:WANConnectionDevice:1</deviceType><UDN>uuid:3</UDN>
<serviceList><service><serviceType>{SERVICE}</serviceType>
<serviceId>urn:upnp-org:serviceId:WANIPConn1</serviceId><controlURL>/ctl/IPConn</controlURL>
<eventSubURL>/evt/IPConn</eventSubURL><SCPDURL>/IPConn.xml</SCPDURL></service></serviceList>
</device></deviceList></device></deviceList></device></root>
"""

_ENVELOPE = (
    '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"'
    ' s:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>{}</s:Body></s:Envelope>'
)
_FAULT = (
    "<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail>"
    '<UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>{}</errorCode>'
    "<errorDescription>refused</errorDescription></UPnPError></detail></s:Fault>"
)


class GatewayDevice(asyncio.DatagramProtocol):
    """One router, until its process ends."""

    def __init__(
        self,
        address: str,
        *,
        added: Callable[[str, int, int, int], None] = lambda *_: None,
        removed: Callable[[str, int, int], None] = lambda *_: None,
    ) -> None:
        """``added`` receives the address inside, both ports and the lease, ``removed`` no lease."""
        self.address = address
        self.mapped: dict[int, tuple[str, int, int]] = {}
        """Address and port inside, and the lease, by outer port."""

        self._added = added
        self._removed = removed

    async def open(self) -> None:
        listening = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        listening.setblocking(False)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        membership = socket.inet_aton(GROUP) + socket.inet_aton(self.address)
        listening.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
        # Packets for the group come only to a socket that is bound to no address of its own.
        listening.bind(("0.0.0.0", SEARCH_PORT))
        loop = asyncio.get_running_loop()
        await loop.create_datagram_endpoint(lambda: self, sock=listening)
        server = await asyncio.start_server(self._serve, self.address, 0)
        self.port: int = server.sockets[0].getsockname()[1]
        self._open = server

    def answer(self, device: str = DEVICE) -> bytes:
        """The gateway's answer to a search."""
        lines = (
            "HTTP/1.1 200 OK",
            "CACHE-CONTROL: max-age=120",
            f"ST: {device}",
            f"USN: uuid:1::{device}",
            "EXT:",
            f"LOCATION: http://{self.address}:{self.port}/root.xml",
        )
        return "\r\n".join([*lines, "", ""]).encode()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._searched = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        wanted = re.search(r"^ST: *(\S+)", data.decode(), re.MULTILINE | re.IGNORECASE)
        searched = data.startswith(b"M-SEARCH * HTTP/1.1\r\n") and b'"ssdp:discover"' in data
        if searched and wanted is not None and wanted[1] == DEVICE:
            self._searched.sendto(self.answer(), addr)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"^Content-Length: *(\d+)", head, re.MULTILINE | re.IGNORECASE)
            body = (await reader.readexactly(int(length[1]) if length else 0)).decode()
            method, _, _ = head.split(" ", 2)
            if method == "GET":
                status, content = 200, DESCRIPTION.encode()
            else:
                status, content = self._call(head, body, writer.get_extra_info("peername")[0])
            start = f"HTTP/1.1 {status} OK\r\nContent-Type: text/xml\r\nConnection: close\r\n"
            writer.write(start.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content)
            await writer.drain()
        except (EOFError, OSError):
            pass
        finally:
            writer.close()

    def _call(self, head: str, body: str, caller: str) -> tuple[int, bytes]:
        called = re.search(r'^SOAPAction: *"([^"#]+)#(\w+)"', head, re.MULTILINE | re.IGNORECASE)
        assert called is not None, head
        service, action = called.groups()
        arguments = dict(re.findall(r"<(New\w+)>([^<]*)</", body))
        code, result = self._carry_out(action, arguments, caller)
        if service != SERVICE or code is not None:
            return 500, _ENVELOPE.format(_FAULT.format(code or 401)).encode()
        told = f'<u:{action}Response xmlns:u="{service}">{result}</u:{action}Response>'
        return 200, _ENVELOPE.format(told).encode()

    def _carry_out(
        self, action: str, arguments: dict[str, str], caller: str
    ) -> tuple[int | None, str]:
        """An error code, or the arguments of the response."""
        match action:
            case "GetExternalIPAddress":
                return None, f"<NewExternalIPAddress>{EXTERNAL}</NewExternalIPAddress>"
            case "GetStatusInfo":
                return None, (
                    "<NewConnectionStatus>Connected</NewConnectionStatus>"
                    "<NewLastConnectionError>ERROR_NONE</NewLastConnectionError>"
                    "<NewUptime>60</NewUptime>"
                )
            case "AddPortMapping" if arguments["NewProtocol"] == "TCP":
                client, lease_s = arguments["NewInternalClient"], int(arguments["NewLeaseDuration"])
                inner, outer = int(arguments["NewInternalPort"]), int(arguments["NewExternalPort"])
                taken = outer in self.mapped and self.mapped[outer][:2] != (client, inner)
                if taken or client != caller:
                    return 718 if taken else 606, ""
                self.mapped[outer] = client, inner, lease_s
                self._added(client, inner, outer, lease_s)
                return None, ""
            case "DeletePortMapping":
                found = self.mapped.pop(int(arguments["NewExternalPort"]), None)
                if found is None:
                    return 714, ""
                self._removed(*found[:2], int(arguments["NewExternalPort"]))
                return None, ""
        return 401, ""


def nft(command: str) -> str:
    done = subprocess.run(["nft", *command.split()], check=True, capture_output=True, text=True)
    return done.stdout


def forward(ip: str, inner: int, outer: int) -> None:
    nft(f"add rule ip router arriving iifname outer tcp dport {outer} dnat to {ip}:{inner}")


def stop_forwarding(ip: str, inner: int) -> None:
    rules = nft("-a list chain ip router arriving")
    for handle in re.findall(rf"dnat to {re.escape(ip)}:{inner} # handle (\d+)", rules):
        nft(f"delete rule ip router arriving handle {handle}")


def answer_nat_pmp(address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind((address, PORT))
        say("router", PORT)
        while True:
            data, asking = listening.recvfrom(100)
            if len(data) != _REQUEST.size or data[:2] != b"\x00\x02":
                continue
            *_, inner, _, life_s = _REQUEST.unpack(data)
            stop_forwarding(asking[0], inner)
            outer = inner + SHIFT if life_s else 0
            if life_s:
                forward(asking[0], inner, outer)
            passed_s = int(time.monotonic())
            answer = struct.pack("!BBHIHHI", 0, 130, 0, passed_s, inner, outer, life_s)
            listening.sendto(answer, asking)
            say("mapped" if life_s else "removed", inner, outer)


async def answer_upnp(address: str, taken: int) -> None:
    """``taken``: an outer port that leads elsewhere already."""

    def added(ip: str, inner: int, outer: int, life_s: int) -> None:
        stop_forwarding(ip, inner)
        forward(ip, inner, outer)
        say("mapped", inner, outer)

    def removed(ip: str, inner: int, outer: int) -> None:
        stop_forwarding(ip, inner)
        say("removed", inner, outer)

    device = GatewayDevice(address, added=added, removed=removed)
    device.mapped[taken] = "192.168.1.200", taken, 0
    await device.open()
    say("router", device.port)
    await asyncio.Event().wait()


def main() -> None:
    address, *words = sys.argv[1:]
    if words:
        asyncio.run(answer_upnp(address, int(words[1])))
    else:
        answer_nat_pmp(address)


if __name__ == "__main__":
    main()
