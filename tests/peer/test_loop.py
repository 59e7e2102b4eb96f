"""Signals: the first one asks, the second one insists."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from peer.loop import run_until_stopped, unless_stopped


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_to_stop_in_good_order(number: signal.Signals) -> None:
    async def main(stop: asyncio.Event) -> str:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 5)
        await asyncio.sleep(0.01)
        return "in good order"

    assert run_until_stopped(main) == "in good order"


def test_the_second_signal_ends_it_and_still_cleans_up() -> None:
    cleaned: list[bool] = []

    async def main(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(stop.wait(), 5)
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_until_stopped(main)
    assert cleaned == [True]


def test_what_it_raises_comes_out() -> None:
    async def main(stop: asyncio.Event) -> None:
        raise ValueError("as it is")

    with pytest.raises(ValueError, match="as it is"):
        run_until_stopped(main)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_where_there_is_nothing_to_finish_the_first_signal_ends_it() -> None:
    cleaned: list[bool] = []

    async def look() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_until_stopped(lambda stop: unless_stopped(stop, look()))
    assert cleaned == [True]


def test_what_is_found_before_anybody_asks_to_stop_comes_out() -> None:
    async def look() -> str:
        return "found"

    assert run_until_stopped(lambda stop: unless_stopped(stop, look())) == "found"
