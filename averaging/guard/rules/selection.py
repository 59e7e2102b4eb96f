"""The pieces of a round that a member audits: nobody else can know them beforehand.

A member draws pieces by their number in a slice, and audits those with this number in all slices
that it did not make itself: it asks each member once for all of them. It draws by a hash of its own
signature under the new lineage. The lineage hashes the commit, the seal and the merged slices, so
it is known only when all of them are sent; and nobody but the member can compute the signature. A
draw by the round's certificate alone would be known to the reducers before they answer: a liar
would lie in the slices that nobody audits, or change a bit until nobody does.

The chance is set so that a piece is audited as often as the run's rate says, by all members
together. Auditing a piece costs the uploads of that piece, and uploads are half of what a round
moves: a rate of a tenth costs a twentieth. A reducer that lies in one piece of each round is found
after ten rounds on average in a group of two, after ten and a half in one of 16, where two members
may draw the same piece; one that lies in all of a slice of k pieces is found k times as soon.

Each draw is made anew, whatever was drawn before: one liar in twenty at a rate of a tenth lies in
more than 28 rounds. A chance that grows with the merges of a reducer that were not audited would
find one that lies always after half as many. But at the same number of audits it is below the rate
just after each of them, and a reducer knows of them, because it is asked: one that lies only then
is found later than now. A draw that all members know of, such as one by the lineage, could leave
out what another has drawn. Its author is the reducer, where one merges the whole fragment.
"""

from __future__ import annotations

from collections.abc import Mapping

import blake3

_SCALE = float(1 << 64)


def ticket_text(lineage: bytes) -> bytes:
    """Return what a member signs to draw the pieces of the round that made a lineage."""
    return b"shoal audit 1 " + lineage


def chance(rate: float, auditors: int) -> float:
    """Return the chance with which each auditor draws a piece: so many audits at this rate."""
    return rate / max(1, auditors)


def drawn(
    ticket: bytes, pieces: Mapping[int, int], *, chance: float
) -> list[tuple[int, tuple[int, ...]]]:
    """Return the numbers of the pieces that the owner of a ticket audits, and in which slices.

    ``ticket``: its signature under ``ticket_text``. ``pieces``: how many each slice has.
    """
    found = []
    for piece in range(max(pieces.values(), default=0)):
        number = blake3.blake3(ticket + piece.to_bytes(4, "big")).digest(8)
        if int.from_bytes(number, "big") < chance * _SCALE:
            found.append(
                (piece, tuple(sorted(at for at, count in pieces.items() if count > piece)))
            )
    return found
