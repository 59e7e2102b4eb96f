"""A pause that an event ends early."""

from __future__ import annotations

import asyncio
import contextlib


async def pause(event: asyncio.Event, pause_s: float) -> None:
    """Wait until the event is set or the pause is over, and clear the event."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(pause_s):
            await event.wait()
    event.clear()
