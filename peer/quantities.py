"""Numbers of bytes, seconds and tokens as short texts for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DISCARDED = "discarded."
"""Beginning of the names of fates that say why tokens were discarded."""

_WHY_DISCARDED = {
    "stale": "too old",
    "lost": "overwritten",
    "apart": "on a side that was given up",
    "left": "left too early",
}


def bytes_text(count: float) -> str:
    """``1.2 MB``: three digits at most, decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration_text(seconds: float) -> str:
    """``2:05`` or ``1:02:05``."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def count_text(count: float) -> str:
    """``1.23 M``: for tokens."""
    for unit in ("", " k", " M", " G"):
        if abs(count) < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} T"


def loss_at(loss: float, tokens: int) -> str:
    """``1.932 at 1.07 M tokens``: a held-out loss, and the run's tokens when it was measured."""
    return f"{loss:.3f} at {count_text(tokens)} tokens"


def bar_text(share: float) -> str:
    """``[####      ] 42%``, for a share from 0 to 1."""
    full = int(10 * share)
    return f"[{'#' * full}{' ' * (10 - full)}] {share:.0%}"


def plural(count: int, noun: str) -> str:
    """``1 peer`` or ``2 peers``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def peers_text(count: int) -> str:
    return plural(count, "peer")


def listed(names: Sequence[str], *, most: int | None = None) -> str:
    """``0, 1 and 3``. Of more than ``most`` names, the first ones: ``0, 1 and 12 more``."""
    shown = list(names)
    if most is not None and len(names) > most:
        shown[most - 1 :] = [f"{len(names) - most + 1} more"]
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def rounded_shares(amounts: Sequence[float], *, whole: int = 100) -> list[int]:
    """Shares in ``amounts`` as whole numbers whose sum is ``whole``, by the largest remainders.

    All are 0 if there is nothing to share.
    """
    total = sum(amounts)
    if total <= 0:
        return [0] * len(amounts)
    exact = [amount / total * whole for amount in amounts]
    shares = [int(value) for value in exact]
    by_remainder = sorted(
        range(len(exact)), key=lambda index: (shares[index] - exact[index], index)
    )
    for index in by_remainder[: whole - sum(shares)]:
        shares[index] += 1
    return shares


def fates_text(fates: Mapping[str, float]) -> str:
    """Tokens by their fate: ``92 k trained: 68 k merged, 20 k pending, 4 k discarded (stale)``."""
    lost = {
        _WHY_DISCARDED.get(reason := name.removeprefix(DISCARDED), reason): count
        for name, count in fates.items()
        if name.startswith(DISCARDED) and count
    }
    reasons = f" ({', '.join(lost)})" if lost else ""
    return (
        f"{count_text(fates.get('processed', 0.0))} trained: "
        f"{count_text(fates.get('merged', 0.0))} merged, "
        f"{count_text(fates.get('pending', 0.0))} pending, "
        f"{count_text(sum(lost.values()))} discarded{reasons}"
    )


def tokens_left(tokens: float, seconds: float) -> str:
    """``handing over 43 k tokens, about 20 s``."""
    return f"handing over {count_text(tokens)} tokens, about {max(1, round(seconds))} s"
