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
