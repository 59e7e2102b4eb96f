"""Names of peers in place of their ids, as events and member records give them."""

from __future__ import annotations

from collections.abc import Mapping

from peer.errors import Unusable

NAMES_MAX = 4096
"""Peers whose names are kept; a swarm of months meets many."""

CANDIDATES_MAX = 16
"""Peers that an error names."""

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

    def find(self, wanted: str) -> str:
        """The id of the one peer with this name or partial id. Raises ``Unusable``."""
        fits = [peer for peer, name in self._names.items() if wanted in (peer, name)]
        if not fits:
            fits = [
                peer
                for peer, name in self._names.items()
                if peer.startswith(wanted) or peer.endswith(wanted) or name.startswith(wanted)
            ]
        if len(fits) != 1:
            known = sorted((self._names[peer], peer) for peer in fits or self._names)
            candidates = [f"{name} -> {peer}" for name, peer in known[:CANDIDATES_MAX]]
            if fits:
                raise Unusable(
                    f"{wanted!r} may be one of {', '.join(candidates)}; name one by its id",
                    section="no-such-peer",
                )
            known_here = ", ".join(candidates) or "nobody"
            raise Unusable(
                f"no peer {wanted!r} is known here; known are {known_here}",
                section="no-such-peer",
            )
        return fits[0]

    def all(self) -> list[str]:
        return sorted(self._names.values())


def short(peer: str) -> str:
    """The last characters of a peer id; other strings unchanged."""
    return peer[-6:] if peer.startswith("12D3") else peer


def printable(text: str) -> str:
    """``text`` with control characters replaced, for texts of other peers."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)
