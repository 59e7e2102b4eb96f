"""A peer's folder: created when it is needed, of one run, and used by one process at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from dht.identity import Identity
from peer import cli
from peer.errors import (
    FolderInUse,
    FolderOfAnotherRun,
    Unusable,
)
from peer.guest.enforcement import read_limits
from peer.run_file.sections import RunFile
from peer.storage.earlier import KeptState, save_state
from peer.storage.home import (
    check_folder,
    data_home,
    default_directory,
    free_directory,
    is_in_use,
    occupant_of,
    occupied,
    occupied_free,
    peer_folder,
    running_peers,
)
from tests.processes import killed_beside_its_child


def run_named(name: str) -> RunFile:
    return RunFile(name=name)


@pytest.fixture(autouse=True)
def _own_data_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path_factory.mktemp("home")))


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    unknown = 2_000_000_000  # no account has this number
    monkeypatch.setattr(os, "getuid", lambda: unknown)
    with pytest.raises(Unusable, match="set HOME, or XDG_DATA_HOME"):
        data_home({})
    assert data_home({"XDG_DATA_HOME": "/srv"}) == Path("/srv/shoal")


def test_a_data_home_that_is_no_absolute_path_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Keys and checkpoints were in another folder for every folder that a command began in."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("", "data", "./data", "~/data"):
        assert data_home({"XDG_DATA_HOME": relative}) == tmp_path / ".local" / "share" / "shoal"
    assert data_home({"XDG_DATA_HOME": str(tmp_path)}) == tmp_path / "shoal"


def test_a_folder_is_created_with_its_parents(tmp_path: Path) -> None:
    with peer_folder(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()


def test_an_unusable_folder_is_reported_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    message = r"file.* cannot be used: .*--directory"
    with pytest.raises(Unusable, match=message), peer_folder(tmp_path / "file"):
        pass
    with pytest.raises(Unusable, match="Is a directory"), peer_folder(tmp_path):
        tmp_path.write_text("a folder is no file")


def test_a_second_peer_in_one_folder_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    in_use = pytest.raises(FolderInUse, match="--directory")
    run = run_named("one")
    with occupied(tmp_path, run, "learner"), in_use, occupied(tmp_path, run, "learner"):
        pass
    with occupied(tmp_path, run, "learner"):
        pass


FORKS = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from peer.run_file.sections import RunFile
from peer.storage.home import occupied
with occupied(Path(sys.argv[1]), RunFile(), "learner"):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    child.start()
    print(child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_folder_is_free_when_its_peer_was_killed_and_a_forked_child_lives_on(
    tmp_path: Path,
) -> None:
    """Workers of torch's ``DataLoader`` are such children. They had copies of the lock."""
    with killed_beside_its_child(FORKS, tmp_path):
        deadline = time.monotonic() + 20  # the child may just begin
        while is_in_use(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_in_use(tmp_path)


@pytest.mark.parametrize("name", [".git", "pyproject.toml", "notes.txt"])
def test_a_folder_with_other_files_is_refused_and_stays_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    refused = pytest.raises(Unusable, match=f"{name}.*--directory")
    with refused, occupied(tmp_path, run_named("one"), "learner"):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_a_folder_that_holds_data_or_a_key_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a" / "data").mkdir(parents=True)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "identity.key").write_bytes(b"")
    (tmp_path / "b" / "more").write_bytes(b"")
    for each in ("a", "b", "new"):
        with occupied(tmp_path / each, run_named("one"), "learner"):
            assert (tmp_path / each / "in_use").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from dht.whole_files import new_file
with new_file(Path(sys.argv[1])) as temporary:
    temporary.write_text("half of a model")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_peer_had_not_finished_is_removed_at_the_next_start(tmp_path: Path) -> None:
    """An export that was cut off kept the space of a model for ever."""
    run = run_named("one")
    with occupied(tmp_path, run, "learner"):
        pass
    mine = tmp_path / ".mine.txt"
    mine.touch()
    before = set(tmp_path.iterdir())
    subprocess.run([sys.executable, "-c", KILLED, tmp_path / "model.safetensors"], check=False)
    assert len(set(tmp_path.iterdir()) - before) == 1
    with occupied(tmp_path, run, "learner"):
        assert set(tmp_path.iterdir()) == before


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "peer"
    for _ in range(2):
        with occupied(folder, run_named("one"), "learner"):
            pass
    refused = pytest.raises(FolderOfAnotherRun, match=r"is 'one' .*this is 'other'")
    with refused, occupied(folder, run_named("other"), "learner"):
        pass


def test_running_peers_are_found_until_they_end_or_are_killed(tmp_path: Path) -> None:
    assert running_peers() == {}
    with occupied(tmp_path / "a", run_named("one"), "learner"):
        with occupied(tmp_path / "b", run_named("two"), "keeper"):
            found = running_peers()
            assert {folder.name: o.run_name for folder, o in found.items()} == {
                "a": "one",
                "b": "two",
            }
            assert found[tmp_path / "b"].role == "keeper"
            assert found[tmp_path / "b"].pid == os.getpid()
        assert list(running_peers()) == [tmp_path / "a"]
        # A process that is killed leaves its link behind, and no lock.
        home = Path(os.environ["XDG_DATA_HOME"]) / "shoal" / "running"
        (home / "killed").symlink_to(tmp_path / "b")
        assert list(running_peers()) == [tmp_path / "a"]
        assert not (home / "killed").is_symlink()


def test_running_peers_are_sorted_by_their_folders(tmp_path: Path) -> None:
    """Names of their links are digests: `status` listed them in another order than `pause`."""
    with ExitStack() as stack:
        for name in "dbca":
            stack.enter_context(occupied(tmp_path / name, run_named(name), "learner"))
        assert [folder.name for folder in running_peers()] == [*"abcd"]


def test_commands_without_a_folder_act_on_all_running_peers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("pause", "resume", "leave"):
        assert cli.run([command]) == 2
        assert "none of your peers is running" in capsys.readouterr().err
    assert cli.run(["status"]) == 0
    assert "none of your peers" in capsys.readouterr().out
    with (
        occupied(tmp_path / "a", run_named("one"), "learner"),
        occupied(tmp_path / "b", run_named("two"), "keeper"),
    ):
        assert cli.run(["pause"]) == 0
        told = capsys.readouterr().out.splitlines()
        assert told == [
            f"one, learner, {tmp_path / 'a'}: paused",
            f"two, keeper, {tmp_path / 'b'}: paused",
        ]
        assert read_limits(tmp_path / "a").paused and read_limits(tmp_path / "b").paused
        assert cli.run(["status", "--json"]) == 0
        peers = json.loads(capsys.readouterr().out)["peers"]
        assert {each["run"]: each["role"] for each in peers} == {"one": "learner", "two": "keeper"}
        assert [each["peer"] for each in peers] == [None, None], "their keys are not there yet"
        me = Identity.load_or_create(tmp_path / "b" / "identity.key").peer_id
        assert cli.run(["status", "--json"]) == 0
        peers = json.loads(capsys.readouterr().out)["peers"]
        assert {each["run"]: each["peer"] for each in peers} == {"one": None, "two": me}
        text = "resting: paused; continue with `shoal resume`"
        save_state(tmp_path / "a", KeptState("ready", text, time.time()))
        assert cli.run(["status"]) == 0
        listed = capsys.readouterr().out
        one, two = listed.split(f"{tmp_path / 'a'}")
        assert f"as process {os.getpid()}: {text}" in one and ": starting" in two
        assert cli.run(["limits", "--up", "2M"]) == 0
        assert read_limits(tmp_path / "b").up_bytes_s == 2e6
    assert cli.run(["pause"]) == 2


def test_one_more_learner_of_a_run_on_a_machine_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    run = RunFile(name="a")
    first = default_directory(run.run_id)
    assert free_directory(run.run_id) == first
    with occupied(first, run, "learner"):
        second = free_directory(run.run_id)
        assert second.name == f"{first.name}-2"
        with occupied(second, run, "learner"):
            assert free_directory(run.run_id).name == f"{first.name}-3"
        assert free_directory(run.run_id) == second
    assert free_directory(run.run_id) == first


def test_to_look_whether_a_folder_is_in_use_keeps_nobody_from_it(tmp_path: Path) -> None:
    """``shoal watch`` looks again and again. Earlier, every sixth start beside it failed."""
    run, ended = run_named("one"), threading.Event()
    with occupied(tmp_path, run, "learner"):
        pass

    def look() -> None:
        while not ended.is_set():
            is_in_use(tmp_path)

    with ThreadPoolExecutor(1) as others:
        looking = others.submit(look)
        try:
            for _ in range(100):
                with occupied(tmp_path, run, "learner"):
                    pass
        finally:
            ended.set()
        looking.result()


def test_learners_that_start_at_the_same_moment_have_different_folders() -> None:
    run, count = run_named("one"), 6
    together, held = threading.Barrier(count), threading.Barrier(count)

    def start() -> Path:
        together.wait(30)
        with occupied_free(run) as folder:
            held.wait(30)
        return folder

    with ThreadPoolExecutor(count) as threads:
        folders = [each.result() for each in [threads.submit(start) for _ in range(count)]]
    assert len(set(folders)) == count


def test_peers_that_end_meanwhile_or_are_not_to_be_read_are_no_running_peers(
    tmp_path: Path,
) -> None:
    registry = Path(os.environ["XDG_DATA_HOME"]) / "shoal" / "running"
    with occupied(tmp_path / "a", run_named("one"), "learner"):
        (registry / "no-link").write_text("of another program")
        (registry / "loop").symlink_to(registry / "loop")
        assert list(running_peers()) == [tmp_path / "a"]


def test_limits_may_be_set_before_the_peer_starts(tmp_path: Path) -> None:
    (tmp_path / "limits.json").touch()
    check_folder(tmp_path, RunFile())
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(Unusable, match=r"thesis\.tex"):
        check_folder(tmp_path, RunFile())


def test_the_mark_of_a_folder_that_is_not_text_names_no_run(tmp_path: Path) -> None:
    (tmp_path / "in_use").write_bytes(b'{"run_id": "\xff"}')
    assert occupant_of(tmp_path) is None
