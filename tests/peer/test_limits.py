"""What the owner of a machine allows: decided purely, read and written as a file."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from pathlib import Path

import pytest

from peer import cli
from peer.guest import Guest, read_limits, write_limits
from peer.limits import (
    BadLimit,
    Go,
    Limits,
    Rest,
    decide,
    decode,
    encode,
    must_leave,
    parse_hours,
    parse_rate,
    parse_share,
    parse_size,
    pause_after_step_s,
)


def at(hour: int, minute: int = 0) -> datetime:
    return datetime(2026, 11, 21, hour, minute)


@pytest.mark.parametrize(
    ("hours", "now", "may"),
    [
        ("22-7", at(21, 59), False),
        ("22-7", at(22), True),
        ("22-7", at(0), True),
        ("22-7", at(6, 59), True),
        ("22-7", at(7), False),
        ("9:30-17", at(9, 29), False),
        ("9:30-17", at(9, 30), True),
        ("9:30-17", at(17), False),
        ("18-24", at(23, 59), True),
        ("18-24", at(0), False),
    ],
)
def test_hours_hold_also_over_midnight(hours: str, now: datetime, may: bool) -> None:
    verdict = decide(Limits(hours=parse_hours(hours)), now=now, month_used_bytes=0)
    assert isinstance(verdict, Go) == may


def test_a_months_volume_that_is_used_is_a_reason_to_rest() -> None:
    limits = Limits(month_bytes=2e9)
    assert decide(limits, now=at(1), month_used_bytes=2e9 - 1) == Go()
    assert decide(limits, now=at(1), month_used_bytes=2e9) == Rest(
        "this month's volume is used: 2 of 2 GB"
    )


def test_a_wish_to_pause_or_to_leave_is_obeyed() -> None:
    paused = decide(Limits(paused=True), now=at(1), month_used_bytes=0)
    assert isinstance(paused, Rest) and "shoal resume" in paused.reason
    assert must_leave(Limits(leave_at=10.0), started_at=9.0)
    assert not must_leave(Limits(leave_at=10.0), started_at=11.0), "it was started again after it"
    assert not must_leave(Limits(), started_at=9.0)


def test_half_of_the_time_means_to_sleep_as_long_as_to_work() -> None:
    assert pause_after_step_s(0.5, 2.0) == 2.0
    assert pause_after_step_s(0.25, 1.0) == 3.0
    assert pause_after_step_s(1.0, 1.0) == 0.0


def test_quantities_are_read_as_people_write_them() -> None:
    assert parse_size("--quota", "200G") == 200e9
    assert parse_size("--quota", "1.5 tb".replace(" ", "")) == 1.5e12
    assert parse_rate("--up", "500K/s") == 500_000
    assert parse_share("50%") == 0.5


@pytest.mark.parametrize("text", ["", "fast", "-1M", "0", "10X", "99K"])
def test_a_rate_that_cannot_be_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(BadLimit, match="--up"):
        parse_rate("--up", text)


@pytest.mark.parametrize("text", ["", "22", "25-7", "7-7", "0-24", "1:60-3", "-1-5"])
def test_hours_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(BadLimit, match="22-7"):
        parse_hours(text)


@pytest.mark.parametrize("text", ["0%", "101%", "half", ""])
def test_shares_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(BadLimit, match="share"):
        parse_share(text)


def test_limits_survive_the_file() -> None:
    limits = Limits(paused=True, up_bytes_s=1e6, month_bytes=2e11, hours=(1320, 420), cpu_share=0.5)
    assert decode(encode(limits)) == limits
    assert limits.words() == ["paused", "up 1 MB/s", "200 GB a month", "from 22:00 to 7:00",
                              "50% of the time"]  # fmt: skip
    for bad in (b"", b"[]", b'{"cpu_share": 0}', b'{"colour": 1}', b'{"hours": [1, 1440]}'):
        with pytest.raises(BadLimit):
            decode(bad)


def test_a_running_peer_takes_up_what_is_written_and_keeps_to_the_old_if_it_is_nonsense(
    tmp_path: Path,
) -> None:
    guest = Guest(tmp_path)

    async def look() -> Go | Rest:
        return guest.look()

    assert asyncio.run(look()) == Go()
    write_limits(tmp_path, Limits(paused=True, up_bytes_s=250_000))
    assert isinstance(asyncio.run(look()), Rest)
    assert guest.up.bucket.rate == 250_000
    assert guest.down.bucket.rate is None
    (tmp_path / "limits.json").write_text("nonsense")
    assert isinstance(asyncio.run(look()), Rest)
    write_limits(tmp_path, Limits())
    assert asyncio.run(look()) == Go()
    assert guest.up.bucket.rate is None


def test_the_months_volume_is_counted_across_restarts_and_begins_anew(tmp_path: Path) -> None:
    async def use(count: int) -> int:
        guest = Guest(tmp_path)
        guest.look()
        await guest.up.pass_through(count)
        await guest.down.pass_through(count)
        guest.save()
        return guest.month_bytes

    assert asyncio.run(use(1000)) == 2000
    assert asyncio.run(use(500)) == 3000
    saved = json.loads((tmp_path / "volume.json").read_text())
    (tmp_path / "volume.json").write_text(json.dumps({**saved, "month": "2020-01"}))
    assert asyncio.run(use(5)) == 10


def test_the_commands_write_what_the_peer_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--directory", str(tmp_path)]
    assert cli.run(["limits", *folder, "--up", "2M", "--hours", "22-7", "--cpu", "50%"]) == 0
    assert "up 2 MB/s, from 22:00 to 7:00, 50% of the time" in capsys.readouterr().out
    assert cli.run(["pause", *folder]) == 0
    assert read_limits(tmp_path) == Limits(
        paused=True, up_bytes_s=2e6, hours=(1320, 420), cpu_share=0.5
    )
    assert cli.run(["resume", *folder]) == 0
    assert cli.run(["limits", *folder, "--up", "off", "--hours", "off", "--cpu", "off"]) == 0
    assert read_limits(tmp_path) == Limits()
    assert cli.run(["leave", *folder]) == 0
    assert read_limits(tmp_path).leave_at is not None
    capsys.readouterr()
    assert cli.run(["limits", *folder, "--json"]) == 0
    assert "leave_at" in json.loads(capsys.readouterr().out)[str(tmp_path)]
    assert cli.run(["limits", *folder, "--up", "1"]) == 2
    assert cli.run(["pause", "--directory", str(tmp_path / "nothing")]) == 2
