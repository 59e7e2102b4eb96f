"""The owner's name in a run file."""

from __future__ import annotations

import pytest

from peer.extras.orders.directives import with_owner
from peer.run_file.presets import starting
from peer.run_file.reading import parse
from peer.run_file.writing import to_toml

OWNER = "12D3KooWC5mVdyoGeyBP9WU6nAFGbDLfFfsYbZwbZJRmLYeNSJwB"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "schema = 1",
        'name = "x"  # [policy]\n',
        '[policy]\nadmission = "invited"\n',
        '[policy] # who\r\nadmission = "invited"',
        '  [policy]\nadmission = "open"\n[end]\ntokens = 50000000\n',
        'policy.admission = "invited"\n[end]\ntokens = 50000000\n',
        to_toml(starting("my-run")),
    ],
)
def test_an_owner_is_written_into_any_run_file(text: str) -> None:
    signed = with_owner(text, OWNER)
    assert parse(signed).policy.owner == OWNER
    kept = iter(signed.splitlines())
    assert all(line in kept for line in text.splitlines()), "a line is gone or has moved"


def test_an_owner_that_cannot_be_written_is_left_to_the_user() -> None:
    for text in ('policy = { admission = "invited" }\n', f'[policy]\nowner = "{OWNER}"\n'):
        with pytest.raises(ValueError, match=f'yourself: owner = "{OWNER}"'):
            with_owner(text, OWNER)
