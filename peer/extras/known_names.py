"""Finding the one peer that a person means by a name or a part of an id."""

from __future__ import annotations

from peer.errors import Unusable
from peer.events.names import Names

CANDIDATES_MAX = 16


class KnownNames(Names):
    """The peers among which one is looked for."""

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
