from __future__ import annotations

import time
from pathlib import Path

import pytest

from peer.storage.progress import Processed, ProgressFile, read_progress
from tests.processes import Child

NOW = 1_800_000_000.5


def test_the_first_incarnation_starts_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "progress"
    assert read_progress(path) is None
    with ProgressFile(path, wall_time_s=NOW) as progress:
        assert progress.previous is None
        assert read_progress(path) == Processed(1_800_000_000, 0, 0, 0)


def test_a_record_can_be_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    with ProgressFile(path, wall_time_s=NOW) as progress:
        for step in range(1, 6):
            progress.record(step=step, tokens=step * 512)
            assert read_progress(path) == Processed(1_800_000_000, step, step * 512, 0)


def test_incarnations_grow_and_tokens_add_up(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    with ProgressFile(path, wall_time_s=NOW) as progress:
        progress.record(step=3, tokens=300)
    with ProgressFile(path, wall_time_s=NOW + 60) as progress:
        assert progress.previous == Processed(1_800_000_000, 3, 300, 0)
        assert progress.now == Processed(1_800_000_060, 0, 0, 300)
        progress.record(step=1, tokens=7)
        assert progress.now.total_tokens == 307
    with ProgressFile(path, wall_time_s=5.0) as progress:  # the clock was set back
        assert progress.now == Processed(1_800_000_061, 0, 0, 307)


def test_an_end_is_clean_and_a_close_is_not(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    progress = ProgressFile(path, wall_time_s=NOW)
    progress.record(step=1, tokens=5)
    progress.close()
    assert read_progress(path) == Processed(1_800_000_000, 1, 5, 0, clean=False)
    progress = ProgressFile(path, wall_time_s=NOW)
    progress.end()
    assert read_progress(path) == Processed(1_800_000_001, 0, 0, 5, clean=True)


def test_a_peer_that_leaves_ends_cleanly_also_if_it_is_killed_in_its_last_step(
    tmp_path: Path,
) -> None:
    path = tmp_path / "progress"
    progress = ProgressFile(path, wall_time_s=NOW)
    progress.leaves()
    progress.record(step=1, tokens=5)
    assert read_progress(path) == Processed(1_800_000_000, 1, 5, 0, clean=True)
    progress.end()
    progress.leaves()


def test_counts_never_decrease(tmp_path: Path) -> None:
    with ProgressFile(tmp_path / "p", wall_time_s=NOW) as progress:
        progress.record(step=2, tokens=20)
        with pytest.raises(ValueError, match="less than"):
            progress.record(step=1, tokens=20)
        with pytest.raises(ValueError, match="less than"):
            progress.record(step=2, tokens=19)


@pytest.mark.parametrize("content", [b"", b"x", b"\0" * 48, b"rubbish!" * 6, b"y" * 500])
def test_a_file_of_another_format_has_no_progress_and_is_replaced(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "p"
    path.write_bytes(content)
    assert read_progress(path) is None
    with ProgressFile(path, wall_time_s=NOW) as progress:
        assert progress.previous is None
        assert read_progress(path) == progress.now


WRITER = """
import sys, itertools
from pathlib import Path
from peer.storage.progress import ProgressFile
progress = ProgressFile(Path(sys.argv[1]), wall_time_s=1.0)
for step in itertools.count(1):
    progress.record(step=step, tokens=3 * step)
    if step % 1000 == 0:
        print(step, flush=True)
"""


def test_no_step_before_a_kill_is_lost_and_no_reader_sees_a_torn_number(tmp_path: Path) -> None:
    path = tmp_path / "p"
    total = 0
    for _ in range(3):
        with Child("-c", WRITER, str(path)) as writer:
            last, seen = 0, 0
            until = time.monotonic() + 0.2
            while time.monotonic() < until:
                last = int(writer.line())
                read = read_progress(path)
                assert read is not None
                assert read.tokens >= 3 * read.step, "tokens are written first"
                assert read.step >= max(last, seen)
                seen = read.step
            writer.kill()
        read = read_progress(path)
        assert read is not None
        assert read.step >= seen
        assert not read.clean
        assert read.earlier_tokens == total
        total = read.total_tokens
