"""Limits of a machine: parsing, decisions, and their file."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peer import cli
from peer.guest import enforcement
from peer.guest.enforcement import (
    Guest,
    read_limits,
    trim_log,
    used_this_month,
    write_limits,
)
from peer.rules.limits import (
    FULL_SCREEN,
    BadLimitsFile,
    DiskShares,
    Limits,
    Manners,
    MonthlyVolume,
    OthersBusy,
    Peak,
    Sensed,
    check_wish,
    choose_place,
    manners,
    parse_hours,
    parse_rate,
    parse_share,
    parse_size,
    parse_threads,
    pause_after_step_s,
    why_rest,
)
from peer.run_file.sections import RunFile
from peer.storage.home import IN_USE, folder_bytes, occupied


def at(hour: int, minute: int = 0) -> datetime:
    return datetime(2026, 11, 21, hour, minute)


def verdict_of(
    limits: Limits,
    *,
    now: datetime | None = None,
    used: float = 0,
    others: OthersBusy | None = None,
    sensed: Sensed | None = None,
) -> str | None:
    busy, seen = others or OthersBusy(), sensed or Sensed()
    return why_rest(limits, now=now or at(1), month_used_bytes=used, others=busy, sensed=seen)


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
def test_hours_may_span_midnight(hours: str, now: datetime, may: bool) -> None:
    verdict = verdict_of(Limits(hours=parse_hours(hours)), now=now)
    assert (verdict is None) == may


def test_a_used_volume_of_the_month_is_a_reason_to_rest() -> None:
    limits = Limits(month_bytes=2e9)
    assert verdict_of(limits, used=2e9 - 1) is None
    assert verdict_of(limits, used=2e9) == "the volume of this month is used: 2 of 2 GB"


def test_the_reserve_for_last_offers_is_at_most_half_of_the_volume() -> None:
    limits, others = Limits(month_bytes=10e9), OthersBusy()

    def rests(used: float, last: float) -> bool:
        verdict = why_rest(
            limits, now=at(1), month_used_bytes=used, last_offers_bytes=last, others=others
        )
        return verdict is not None

    assert not rests(9.9e9 - 1, 0.1e9)
    assert rests(9.9e9, 0.1e9)
    assert not rests(5e9 - 1, 100e9)
    assert rests(5e9, 100e9)


@pytest.mark.parametrize(
    ("limits", "sensed", "reason"),
    [
        (Limits(not_while=("steam",)), Sensed(programs=frozenset({"bash"})), None),
        (Limits(not_while=("blender", "steam")), Sensed(programs=frozenset({"steam"})), "program"),
        (Limits(not_while=("steam",)), Sensed(programs=frozenset({FULL_SCREEN})), None),
        (Limits(not_while=(FULL_SCREEN,)), Sensed(programs=frozenset({FULL_SCREEN})), "program"),
        (Limits(battery_above=0.5), Sensed(), None),
        (Limits(battery_above=0.5), Sensed(battery=0.51), None),
        (Limits(battery_above=0.5), Sensed(battery=0.5), "on battery, which holds 50%"),
        (Limits(battery_above=1.0), Sensed(battery=1.0), "on battery"),
        (Limits(celsius_below=80), Sensed(), None),
        (Limits(celsius_below=80), Sensed(celsius=79.9), None),
        (Limits(celsius_below=80), Sensed(celsius=80.0), "too hot: 80 degrees"),
        (Limits(), Sensed(programs=frozenset({"steam"}), battery=0.1, celsius=99.0), None),
    ],
)
def test_a_program_a_battery_and_heat_are_reasons_to_rest_where_there_is_a_limit(
    limits: Limits, sensed: Sensed, reason: str | None
) -> None:
    verdict = verdict_of(limits, sensed=sensed)
    assert verdict is None if reason is None else reason in (verdict or "")


def test_other_peers_are_not_told_which_programs_run_here() -> None:
    limits = Limits(not_while=("steam",))
    verdict = verdict_of(limits, sensed=Sensed(programs=frozenset({"steam"})))
    assert verdict is not None
    assert "steam" not in verdict + " ".join(limits.words())


def test_a_machine_that_was_hot_counts_as_hot_for_a_minute() -> None:
    heat = Peak()
    assert heat.note(None, now=0.0) is None
    assert heat.note(85.0, now=5.0) == 85.0
    assert heat.note(60.0, now=64.9) == 85.0
    assert heat.note(None, now=65.0) == 60.0


def busy(*shares: float, every_s: float = 5.0) -> OthersBusy:
    """Samples of the use of processors by other programs."""
    others = OthersBusy()
    for number, share in enumerate(shares):
        others.note(share, now=number * every_s)
        others.above(0.25)
    return others


@pytest.mark.parametrize(
    ("shares", "rests"),
    [
        ([], False),
        ([0.24, 0.24, 0.24], False),
        ([0.25, 0.25, 0.25], True),
        ([0.0, 0.0, 0.7], False),
        ([0.0, 0.0, 0.76], True),
        ([1.0] * 3 + [0.0] * 8, True),
        ([1.0] * 3 + [0.0] * 11, False),
        ([1.0] * 3 + [0.0, 0.3] * 20, False),
        ([1.0] * 3 + [0.2, 0.6] * 20, True),
    ],
)
def test_a_peer_rests_soon_when_others_are_busy_and_resumes_after_a_longer_silence(
    shares: list[float], rests: bool
) -> None:
    verdict = verdict_of(Limits(idle_below=0.25), others=busy(*shares))
    reason = "other programs use 25% of the processors or of an accelerator, or more"
    assert verdict == (reason if rests else None)
    assert verdict_of(Limits(), others=busy(1.0)) is None, "nobody asked for it"


def test_the_parts_of_the_disk_limit_do_not_exceed_it_together() -> None:
    shares = DiskShares.of(Limits(disk_bytes=10e9), trains=True)
    assert (shares.outer, shares.inner, shares.logs) == (4.5e9, 4.5e9, 1e9)
    assert DiskShares.of(Limits(disk_bytes=10e9), trains=False).outer == 9e9
    assert DiskShares.of(Limits(), trains=True) == DiskShares()
    shares = DiskShares.of(Limits(disk_bytes=10e9), trains=True, keeps_state=True)
    assert (shares.outer, shares.inner, shares.logs, shares.state) == (3.25e9, 3.25e9, 1e9, 2.5e9)


def test_on_a_desktop_a_core_is_free_and_the_priority_low() -> None:
    assert manners(desktop=True, cores=8) == Manners(10, 7)
    assert manners(desktop=True, cores=1).threads == 1
    assert manners(desktop=False, cores=8) == Manners(0, None)


def test_a_container_has_as_many_threads_as_it_has_processors() -> None:
    assert manners(desktop=False, cores=32, container=4) == Manners(0, 4)
    assert manners(desktop=False, cores=4, container=4) == Manners(0, None)
    assert manners(desktop=False, cores=2, container=4) == Manners(0, None)
    assert manners(desktop=True, cores=8, container=2) == Manners(10, 2)
    assert manners(desktop=True, cores=8, container=8) == Manners(10, 7)


def test_with_an_accelerator_both_shares_apply() -> None:
    limits = Limits(cpu_share=0.5, gpu_share=0.25)
    assert limits.share(accelerated=False) == 0.5
    assert limits.share(accelerated=True) == 0.25
    assert Limits(cpu_share=0.5).share(accelerated=True) == 0.5


def test_a_pause_is_obeyed() -> None:
    paused = verdict_of(Limits(paused=True))
    assert paused is not None and "shoal resume" in paused


def test_half_of_the_time_means_equal_pauses_and_steps() -> None:
    assert pause_after_step_s(0.5, 2.0) == 2.0
    assert pause_after_step_s(0.25, 1.0) == 3.0
    assert pause_after_step_s(1.0, 1.0) == 0.0


def test_sizes_rates_hours_and_shares_are_parsed() -> None:
    assert parse_size("--quota", "200G") == 200e9
    assert parse_size("--quota", "1.5 tb".replace(" ", "")) == 1.5e12
    assert parse_rate("--up", "500K/s") == 500_000
    assert parse_share("--cpu", "50%") == 0.5
    assert parse_threads("4") == 4


def test_the_words_of_limits_have_the_used_part() -> None:
    limits = Limits(month_bytes=2e11, disk_bytes=5e8, threads=1, idle_below=0.25, gpu_share=0.5)
    assert limits.words(month_used_bytes=1.2345e10, disk_used_bytes=12_345_678) == [
        "12.3 GB of 200 GB a month",
        "50% of the accelerator's time",
        "1 thread",
        "only while other programs use less than 25%",
        "12.3 MB of 0.5 GB of disk",
    ]
    assert Limits(relay_bytes_s=2e6).words() == ["relays 2 MB/s for others"]


def test_a_trimmed_log_keeps_its_end(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    trim_log(path, 100)  # nothing there yet
    with path.open("ab", buffering=0) as log:
        log.write(b"a" * 30 + b"b" * 50)
        trim_log(path, 200)
        assert path.stat().st_size == 80
        trim_log(path, 100)
        log.write(b"c")
    assert path.read_bytes() == b"c"
    assert (tmp_path / "agent.log.1").read_bytes() == b"b" * 50
    assert folder_bytes(tmp_path) == 51


def test_limits_survive_the_file(tmp_path: Path) -> None:
    limits = Limits(paused=True, up_bytes_s=1e6, month_bytes=2e11, hours=(1320, 420), cpu_share=0.5)
    write_limits(tmp_path, limits)
    assert read_limits(tmp_path) == limits
    assert limits.words() == ["paused", "up 1 MB/s", "200 GB a month", "from 22:00 to 7:00",
                              "training 50% of the time"]  # fmt: skip
    for bad in (b"", b"[]", b'{"cpu_share": 0}', b'{"colour": 1}', b'{"hours": [1, 1440]}'):
        (tmp_path / "limits.json").write_bytes(bad)
        with pytest.raises(BadLimitsFile, match=r"limits\.json is not a valid file of limits"):
            read_limits(tmp_path)


def test_a_running_peer_reads_changed_limits_and_keeps_the_old_if_they_are_invalid(
    tmp_path: Path,
) -> None:
    guest = Guest(tmp_path)

    async def look() -> str | None:
        return guest.look()

    assert asyncio.run(look()) is None
    write_limits(tmp_path, Limits(paused=True, up_bytes_s=250_000))
    assert asyncio.run(look()) is not None
    assert guest.up.rate == 250_000
    assert guest.down.rate is None
    (tmp_path / "limits.json").write_text("nonsense")
    assert asyncio.run(look()) is not None
    write_limits(tmp_path, Limits())
    assert asyncio.run(look()) is None
    assert guest.up.rate is None


def test_what_a_peer_shows_as_sent_and_received_is_what_its_volume_counts(tmp_path: Path) -> None:
    """The screen showed the bytes of rounds, and not the state that a newcomer had downloaded."""
    guest = Guest(tmp_path)

    async def download_and_upload() -> None:
        await guest.down.pass_through(6_700_000)
        await guest.up.pass_through(940_000)
        await guest.meter_relayed(1000)

    asyncio.run(download_and_upload())
    assert (guest.sent_bytes, guest.received_bytes) == (941_000, 6_701_000)
    assert guest.month_bytes == guest.sent_bytes + guest.received_bytes


def test_the_line_is_as_fast_as_the_lower_of_both_limits(tmp_path: Path) -> None:
    guest = Guest(tmp_path)

    async def look() -> str | None:
        return guest.look()

    asyncio.run(look())
    assert guest.line_max() == math.inf

    for limits in (
        Limits(up_bytes_s=250_000),
        Limits(down_bytes_s=250_000),
        Limits(up_bytes_s=250_000, down_bytes_s=1e6),
    ):
        write_limits(tmp_path, limits)
        asyncio.run(look())
        assert guest.line_max() == 250_000


def test_the_volume_is_counted_over_restarts_and_reset_each_month(tmp_path: Path) -> None:
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


def test_a_peer_that_runs_sees_a_changed_time_zone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process keeps the time zone of its start until it looks at it again."""
    write_limits(tmp_path, Limits(hours=parse_hours("22-7")))
    guest = Guest(tmp_path)

    async def verdicts() -> set[bool]:
        found = set()
        for hours in range(-11, 13):
            monkeypatch.setenv("TZ", f"<test>{hours}")
            found.add(guest.look() is None)
        return found

    assert asyncio.run(verdicts()) == {True, False}
    monkeypatch.undo()
    guest.look()


def test_a_clock_set_back_over_the_begin_of_a_month_does_not_reset_the_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime(2026, 11, 30, 23)
    monkeypatch.setattr(enforcement, "_local_time", lambda: now)

    async def use(count: int) -> int:
        guest = Guest(tmp_path)
        guest.look()
        await guest.up.pass_through(count)
        guest.save()
        return used_this_month(tmp_path)

    assert asyncio.run(use(1000)) == 1000
    now = datetime(2026, 12, 1, 0, 30)
    assert asyncio.run(use(50)) == 50
    now = datetime(2026, 11, 30, 23, 30)
    assert asyncio.run(use(1)) == 1051
    now = datetime(2026, 12, 1)
    assert asyncio.run(use(0)) == 50


def test_leave_concerns_only_peers_that_were_running(tmp_path: Path) -> None:
    write_limits(tmp_path, Limits(leave_at=1000.0))

    def leaves(started_at: float) -> bool:
        guest = Guest(tmp_path, started_at=started_at)

        async def look() -> None:
            guest.look()

        asyncio.run(look())
        return guest.must_leave

    assert leaves(999.9), "whatever became of its agent since"
    assert not leaves(1000.0)


def test_limits_that_cannot_be_looked_at_stay_as_they_were(tmp_path: Path) -> None:
    """The error ended the agent, and each one after it."""
    write_limits(tmp_path, Limits(up_bytes_s=1e6))
    guest = Guest(tmp_path)
    (tmp_path / "limits.json").unlink()
    (tmp_path / "limits.json").symlink_to("limits.json")

    async def look() -> None:
        guest.look()

    asyncio.run(look())
    assert guest.limits == Limits(up_bytes_s=1e6)
    assert Guest(tmp_path).limits == Limits()


def test_leave_is_followed_when_the_clock_was_set_back_since_the_start(tmp_path: Path) -> None:
    """As where a clock shows local time until it is set: it was ignored for hours."""
    write_limits(tmp_path, Limits(leave_at=1000.0))
    guest = Guest(tmp_path, started_at=30_000.0)

    async def leaves() -> bool:
        guest.look()
        return guest.must_leave

    assert not asyncio.run(leaves())
    write_limits(tmp_path, Limits(leave_at=1200.0))
    assert asyncio.run(leaves())


def test_the_commands_write_what_the_peer_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ["--directory", str(tmp_path)]
    assert cli.run(["limits", *folder, "--up", "2M", "--hours", "22-7", "--cpu", "50%"]) == 0
    assert "up 2 MB/s, from 22:00 to 7:00, training 50% of the time" in capsys.readouterr().out
    (tmp_path / IN_USE).touch()
    assert cli.run(["pause", *folder]) == 0
    assert read_limits(tmp_path) == Limits(
        paused=True, up_bytes_s=2e6, hours=(1320, 420), cpu_share=0.5
    )
    assert cli.run(["resume", *folder]) == 0
    assert "training 50% of the time, not paused" in capsys.readouterr().out
    assert cli.run(["limits", *folder, "--up", "off", "--hours", "off", "--cpu", "off"]) == 0
    assert read_limits(tmp_path) == Limits()
    capsys.readouterr()
    more = ["--threads", "2", "--gpu", "50%", "--idle-only", "25%", "--disk", "1G"]
    more += ["--relay-bulk", "2M", "--not-while", "Steam,Blender.exe", "--battery", "60%"]
    more += ["--celsius", "80", "--free-gpu", "on"]
    assert cli.run(["limits", *folder, *more]) == 0
    assert read_limits(tmp_path) == Limits(
        threads=2,
        gpu_share=0.5,
        idle_below=0.25,
        not_while=("steam", "blender"),
        battery_above=0.6,
        celsius_below=80.0,
        free_gpu=True,
        disk_bytes=1e9,
        relay_bytes_s=2e6,
    )
    said = capsys.readouterr().out
    assert (
        "2 threads, only while other programs use less than 25%, " in said
        and "of 1 GB of disk" in said
    )
    assert cli.run(["limits", *folder, *(w if w[:2] == "--" else "off" for w in more)]) == 0
    assert read_limits(tmp_path) == Limits()
    assert cli.run(["leave", *folder]) == 0
    assert "no peer is running there" in capsys.readouterr().out
    with occupied(tmp_path, RunFile(), "learner"):
        assert cli.run(["leave", *folder]) == 0
    assert "asked to leave" in capsys.readouterr().out
    assert read_limits(tmp_path).leave_at is not None
    capsys.readouterr()
    for command in ("limits", "pause", "resume", "leave"):
        assert cli.run([command, *folder, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)[str(tmp_path)]
        assert told["paused"] is (command == "pause")
        assert told["leave_at"] == read_limits(tmp_path).leave_at
    assert cli.run(["limits", *folder, "--up", "1"]) == 2
    assert cli.run(["pause", "--directory", str(tmp_path / "nothing")]) == 2


NEW_YEARS = datetime(2027, 1, 1)
HOUR, DAY = timedelta(hours=1), timedelta(days=1)


def counted(*looks: tuple[datetime, int]) -> MonthlyVolume:
    """The volume after these looks, each of which finds so many bytes passed since the last."""
    volume = MonthlyVolume()
    for now, passed in looks:
        volume = volume.plus(passed).on(now)
    return volume


def test_a_clock_that_was_wrong_by_months_takes_nothing_from_the_months_to_come() -> None:
    later = datetime(2027, 3, 5)
    wrong = counted((datetime(2026, 11, 20), 3), (later, 0), (later, 50))
    right = wrong.on(datetime(2026, 11, 20, 1))
    assert (right.month, right.bytes) == ("2026-11", 53), "it has passed by now"
    assert right.on(datetime(2026, 12, 1)).bytes == 0
    assert right.on(datetime(2026, 12, 1)).on(datetime(2027, 3, 1)).bytes == 0


def test_a_clock_that_is_not_set_yet_leaves_the_count_as_it_is() -> None:
    before = counted((datetime(2026, 11, 20), 50))
    booted = before.on(datetime(1970, 1, 1)).plus(2)
    assert (booted.month, booted.bytes) == ("2026-11", 52)
    assert booted.on(datetime(2026, 11, 20)).bytes == 52


@given(
    st.lists(st.tuples(st.integers(-60, 120), st.floats(-1, 1), st.integers(0, 40)), max_size=40)
)
def test_however_a_clock_jumps_by_up_to_two_days_no_month_uses_more_than_its_volume(
    steps: Iterable[tuple[int, float, int]],
) -> None:
    """Bytes pass only while the month has some left, as ``limits.why_rest`` sees to."""
    quota, volume, right = 100, MonthlyVolume(), NEW_YEARS
    passed: dict[str, int] = {}
    for hours, wrong_days, wanted in steps:
        right += timedelta(hours=max(hours, 0))
        volume = volume.on(right + timedelta(days=wrong_days))
        wanted = min(wanted, max(0, quota - volume.bytes))
        volume = volume.plus(wanted)
        passed[volume.month] = passed.get(volume.month, 0) + wanted
    assert all(count <= quota for count in passed.values()), passed


MEMORY = 32e9
STATE = 8_000_000_000
"""Bytes of a state of a quarter of that memory."""


@pytest.mark.parametrize(
    ("wish", "size", "on_disk"),
    [
        ("auto", STATE, True),
        ("auto", STATE - 1, False),
        ("on", 1, True),
        ("off", 100 * STATE, False),
    ],
)
def test_the_wish_and_the_share_of_the_memory_decide(wish: str, size: int, on_disk: bool) -> None:
    place = choose_place(wish, size, memory_bytes=MEMORY, free_bytes=1e15, volatile=None)
    assert place.on_disk is on_disk
    assert bool(place.text) is on_disk, "people hear of what is unusual"


@pytest.mark.parametrize(
    ("free_bytes", "volatile", "reason"),
    [(STATE - 1, None, "of disk are free"), (1e15, "tmpfs", "tmpfs")],
)
@pytest.mark.parametrize("wish", ["auto", "on"])
def test_without_room_or_on_a_disk_in_memory_it_stays_in_memory_and_says_why(
    wish: str, free_bytes: float, volatile: str | None, reason: str
) -> None:
    place = choose_place(wish, STATE, memory_bytes=MEMORY, free_bytes=free_bytes, volatile=volatile)
    assert not place.on_disk
    assert reason in place.text


def test_another_wish_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'yes'; it is one of auto, on, off"):
        check_wish("yes")
