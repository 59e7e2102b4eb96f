"""A protocol number that no build speaks yet, for tests of how a run goes over to it."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from averaging import messages
from averaging.messages import Call, Join, Suspected
from dht import protocol
from dht.protocol import NEWEST, Range

NEXT = NEWEST + 1

BEFORE: Range = (NEWEST, NEWEST)
"""The numbers that this build speaks."""
SPOKEN: Range = (NEWEST, NEXT)
"""Those that the next one does."""


@pytest.fixture
def next_protocol(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The build is the next one: two fields and a message of it are as if they came with it."""
    monkeypatch.setattr(protocol, "NEWEST", NEXT)
    leaves = (("leaves", NEXT),)
    messages.decode_commit.cache_clear()
    with (
        patch.dict(messages.FIELDS_SINCE, {Join: leaves, Call: leaves}),
        patch.dict(messages.MESSAGES_SINCE, {Suspected: NEXT}),
    ):
        yield
    messages.decode_commit.cache_clear()
