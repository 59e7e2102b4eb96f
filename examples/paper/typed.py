"""Quantities with units, as people type them for an option. Raises ``typer.BadParameter``."""

from __future__ import annotations

import math

import typer

_TIME_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_RATE_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def seconds(text: str, *, option: str) -> float:
    example = "a time such as 90s, 4m, 9h or 2d"
    try:
        return _quantity(text, _TIME_UNITS, example)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{option} {error}") from error


def count(text: str) -> int:
    try:
        return int(float(text))
    except (ValueError, OverflowError) as error:
        raise typer.BadParameter(f"{text!r} is not a number such as 30e6") from error


def speed(text: str) -> float:
    """A number of Mbit/s."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise typer.BadParameter(f"{text!r} is not a speed in Mbit/s, such as 50 or 0.5")
    return value


def milliseconds(text: str) -> float:
    return _quantity(f"{text.strip()}s", _TIME_UNITS, "a time in milliseconds") / 1e3


def bits_per_second(text: str) -> float:
    return _quantity(text.removesuffix("/s"), _RATE_UNITS, "a rate such as 20Mbit or 1Gbit")


def _quantity(text: str, units: dict[str, float], example: str) -> float:
    number = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = units.get(text[len(number) :].lower())
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if unit is None or not 0.0 < value * unit < math.inf:
        raise typer.BadParameter(f"{text!r} is not {example}")
    return value * unit
