"""Names of peers in place of their ids, as events and member records give them."""

from __future__ import annotations

from collections.abc import Mapping

NAMES_MAX = 4096
"""Peers whose names are kept; a swarm of months meets many."""

ID_MIN = 17
"""Shorter strings are not replaced in texts: an ordinary word could be one of them."""


class Names:
    """Maps peer ids to names; an unknown id is shortened."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = dict(names)

    def learn(self, peer: str, name: str) -> None:
        """Remember a name, unless there are ``NAMES_MAX`` already."""
        if len(self._names) < NAMES_MAX or peer in self._names:
            self._names[peer] = name

    def __call__(self, peer: str) -> str:
        return self._names.get(peer) or short(peer)

    def within(self, text: str) -> str:
        """``text`` with every known id in it replaced by the name."""
        if "12D3" in text or any(peer in text for peer in self._names if len(peer) >= ID_MIN):
            for peer, name in self._names.items():
                text = text.replace(peer, name) if len(peer) >= ID_MIN else text
        return text


def short(peer: str) -> str:
    """The last characters of a peer id; other strings unchanged."""
    return peer[-6:] if peer.startswith("12D3") else peer


def printable(text: str) -> str:
    """``text`` with control characters replaced, for texts of other peers."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)
