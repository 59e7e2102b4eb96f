"""The default name of a peer."""

from __future__ import annotations

import re
import socket

from dht.identity import PeerId

_NAMES = (
    "bold bright brisk calm clear eager early fair fleet gentle glad keen kind light lively loyal",
    "bream carp crab dace eel gar goby gull heron ibis koi loach minnow otter perch pike plaice",
)


def default_name(peer_id: PeerId) -> str:
    """A legible name made of the peer id and the host name."""
    number = int.from_bytes(peer_id.encode()[-6:], "big")
    machine = re.sub(r"[^a-z0-9]", "", socket.gethostname().lower())[:8]
    adjectives, animals = (words.split() for words in _NAMES)
    adjective = adjectives[number % len(adjectives)]
    animal = animals[number // len(adjectives) % len(animals)]
    return f"{adjective}-{animal}" + (f"-{machine}" if machine else "")
