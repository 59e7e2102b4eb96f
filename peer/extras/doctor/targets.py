"""Targets of an examination: links, run files and addresses, read from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from multiaddr import Multiaddr

from dht import addresses
from dht.errors import AddressError
from dht.identity import RunId
from peer.errors import PeerError


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Folder, port, seeds and run to examine."""

    data_directory: Path
    port: int = 0
    seeds: tuple[Multiaddr, ...] = ()
    run: RunId | None = None
    """Id of the run, if a link or run file was given."""


class TargetError(PeerError):
    """A target is neither a link, nor a run file, nor an address of a peer."""

    exit_code = 2
    target: str
    reason: str
    message = "{target!r} cannot be examined: {reason}"


def plan_of(targets: Sequence[str], *, port: int, data_directory: Path) -> Plan:
    """The plan for some targets. Raises ``TargetError`` and what ``find_run`` raises."""
    from peer.joining.link import find_run, parse_link

    if not 0 <= port < 65536:
        raise TargetError(f"--port {port}", "ports go from 1 to 65535; 0 means any")
    seeds: list[Multiaddr] = []
    run: RunId | None = None
    for target in targets:
        if target.strip().lower().startswith("shoal://"):
            link = parse_link(target)
            run, found = link.run_id, link.seeds
        elif target.lower().startswith("https://") or Path(target).is_file():
            there = find_run(target, ask_peers=_nobody)
            run, found = there.run.run_id, there.seeds
        else:
            found = (_seed(target),)
        seeds.extend(address for address in found if address not in seeds)
    return Plan(data_directory=data_directory, port=port, seeds=tuple(seeds), run=run)


def _seed(text: str) -> Multiaddr:
    try:
        address = addresses.parse(text)
    except AddressError as error:
        if text.startswith("/"):
            raise
        raise TargetError(
            text,
            "it is neither a link (shoal://...), nor a run file, nor the address of a "
            "peer (/ip4/203.0.113.7/tcp/7700/p2p/12D3Koo...)",
        ) from error
    if addresses.peer_of(address) is None:
        raise TargetError(
            text,
            "the peer id is missing: it has to end in /p2p/12D3Koo..., "
            "as `shoal bootstrap` prints it",
        )
    return address


def _nobody(link: object) -> bytes:
    raise AssertionError("a file or https address was given, which needs no peers")
