"""Choices of the user of a peer: one value from the options to the agent.

Who chooses no name gets one that is made of the peer id.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, fields

from dht import addresses
from dht.identity import PeerId
from dht.libp2p.lane.connection import parse_lane
from dht.records import name_problem, site_problem
from peer.rules.limits import check_wish


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """Settings of a learner or keeper that are not part of the run. ``ValueError`` for bad ones."""

    name: str | None = None
    """Name that others see; unset: made up from the peer id."""
    site: str | None = None
    """Label of this peer's location, up to 16 characters, which only peers there should know. They
    reduce among themselves first, and one of them uses the slow link for all."""
    seeds: tuple[str, ...] = ()
    """Addresses to try besides those of the run file."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    lane: str = "auto"
    """TCP port for direct bulk transfers (PORT, or PORT:OUTER_PORT behind a router); ``auto``: any
    port, ``off``: none."""
    state_on_disk: str = "auto"
    """``on``: the agent keeps the run's state in files of ``directory``, and little of it in
    memory; ``off``: all in memory; ``auto``: in files if it is more than a quarter of the memory.
    """
    page: str | None = "auto"
    """HOST:PORT of a local page; ``auto``: this machine, from port 7777 on; ``None``: no page."""

    def __post_init__(self) -> None:
        if self.name is not None and (problem := name_problem(self.name)) is not None:
            raise ValueError(problem)
        if self.site is not None and (problem := site_problem(self.site)) is not None:
            raise ValueError(problem)
        parse_lane(self.lane)
        check_wish(self.state_on_disk)
        for seed in self.seeds:
            addresses.parse_seed(seed)
        for address in (*self.listen, *self.announce):
            addresses.parse(address)

    def with_seeds(self, seeds: Sequence[str]) -> PeerSettings:
        """These settings alone, for the agent, with the addresses that it tries."""
        own = {each.name: getattr(self, each.name) for each in fields(PeerSettings)}
        return PeerSettings(**{**own, "seeds": tuple(seeds)})


_NAMES = (
    "bold bright brisk calm clear eager early fair fleet gentle glad keen kind light lively loyal",
    "bream carp crab dace eel gar goby gull heron ibis koi loach minnow otter perch pike plaice",
)


def default_name(peer_id: PeerId) -> str:
    """A legible name made of the peer id and the host name."""
    machine = re.sub(r"[^a-z0-9]", "", socket.gethostname().lower())[:8]
    return _words_for(peer_id) + (f"-{machine}" if machine else "")


def is_default(name: str, peer_id: PeerId) -> bool:
    """Return whether nobody chose this name, on whatever machine it was made."""
    words = _words_for(peer_id)
    return name == words or name.startswith(f"{words}-")


def _words_for(peer_id: PeerId) -> str:
    number = int.from_bytes(peer_id.encode()[-6:], "big")
    adjectives, animals = (words.split() for words in _NAMES)
    adjective = adjectives[number % len(adjectives)]
    animal = animals[number // len(adjectives) % len(animals)]
    return f"{adjective}-{animal}"
