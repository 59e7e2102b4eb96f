"""Quantities with units, as people type them."""

from __future__ import annotations

import pytest
import typer

from examples.paper.typed import bits_per_second


@pytest.mark.parametrize("text", ["20furlong", "-1Mbit", "inf", ""])
def test_an_invalid_rate_is_bad_usage(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not a rate such as 20Mbit or 1Gbit"):
        bits_per_second(text)
