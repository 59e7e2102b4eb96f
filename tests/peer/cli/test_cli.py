"""The command line: what it prints where, and with which code it ends."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from dht.identity import Identity
from peer import cli
from peer.cli import taking_part
from peer.cli.application import progress, report_if_slow, reported
from peer.cli.learner_options import Options
from peer.cli.training import _reporter
from peer.errors import NobodyMet, PeerError, RunRefused
from peer.run_file.sections import RunFile
from peer.storage.home import LIMITS, occupied
from peer.views.watch import PlainReporter, ScreenReporter
from tests.processes import Child

PEER = Identity.from_seed(bytes(32)).peer_id
LINK = f"shoal://{'0' * 64}?seed=/ip4/127.0.0.1/tcp/9/p2p/{PEER}"


def complaint(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command line that must fail in one line on stderr, with nothing on stdout."""
    code = cli.run(arguments)
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("shoal: ")
    assert errors.count("\n") == 1
    return code, errors


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    script = "import sys, peer.cli; print(sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = done.stdout
    assert "'typer'" in loaded
    for heavy in ("torch", "hivemind", "numpy", "aiohttp", "uvloop", "grpc"):
        assert f"'{heavy}'" not in loaded, heavy


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([]) == 0
    output = capsys.readouterr().out
    assert "bootstrap" in output
    assert "doctor" in output


@pytest.mark.parametrize("family", ["run", "data"])
def test_a_group_without_a_command_prints_its_help_and_no_error(
    family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run([family]) == 2
    output, errors = capsys.readouterr()
    assert "Commands" in output
    assert errors == ""


def test_a_library_that_finds_no_memory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Under `ulimit -v 600000` a traceback ended in what the loader said."""

    def load() -> None:
        raise ImportError("libtorch_cpu.so: failed to map segment from shared object")

    assert reported(load) == 1
    assert capsys.readouterr().err == (
        "shoal: libtorch_cpu.so: failed to map segment from shared object; this process may use "
        "too little memory (`ulimit -v`)\n"
    )


def test_a_slow_operation_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with report_if_slow("still looking", after_s=60.0):
        pass
    assert capsys.readouterr().err == ""
    said = ""
    with report_if_slow("still looking", after_s=0.0):
        deadline = time.monotonic() + 30.0
        while not said and time.monotonic() < deadline:
            said = capsys.readouterr().err
    assert said == "shoal: still looking ...\n"


@pytest.mark.parametrize("quiet", [True, False])
def test_progress_that_has_no_bar_is_reported_as_slow(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, quiet: bool
) -> None:
    """`shoal export LINK` said nothing at all while it searched and downloaded in a script."""
    at_once = partial(report_if_slow, after_s=0.0)
    monkeypatch.setattr("peer.cli.application.report_if_slow", at_once)
    said = ""
    with progress("downloading tiny", quiet=quiet) as show:
        show(0.5)
        deadline = time.monotonic() + 30.0
        while not said and time.monotonic() < deadline:
            said = capsys.readouterr().err
    assert said == "shoal: still downloading tiny ...\n"


def test_a_terminal_that_cannot_draw_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TERM=dumb, in editors and consoles, ``shoal start`` said nothing while it trained."""
    keyboard, terminal = os.openpty()
    with os.fdopen(terminal, "w") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        for kind, reporter in (("xterm", ScreenReporter), ("dumb", PlainReporter)):
            monkeypatch.setenv("TERM", kind)
            assert type(_reporter(Options())) is reporter
    os.close(keyboard)


def test_a_closed_terminal_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training hands over what it has then, and says so to nobody (``peer.signals``)."""
    ours, terminal = os.openpty()

    def say_twice(arguments: Sequence[str]) -> int:
        sys.stdout.write("still here\n")
        assert os.read(ours, 100).strip() == b"still here"
        os.close(ours)
        sys.stdout.write("lost\n")
        return 0

    monkeypatch.setattr(cli, "run", say_twice)
    with os.fdopen(terminal, "w") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == 0


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("shoal 0.")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--device", "cuda:77"], "--device: device 'cuda:77' cannot be used here: "),
        (["--device", "cpu", "--precision", "tf32"], "cannot train in tf32; pass --precision auto"),
    ],
)
def test_what_this_machine_cannot_do_is_refused(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, errors = complaint(["start", "examples/tiny_gpt/run.toml", *options, "--yes"], capsys)
    assert code == 2
    assert says in errors


def test_no_public_page_may_be_said_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    """An address that was wrong was answered with `--run-page off`, which was refused, too."""
    code, errors = complaint(["keep", f"shoal://{'0' * 64}", "--run-page", "off", "--yes"], capsys)
    assert code == 3
    assert "no seed" in errors


@pytest.mark.parametrize(
    ("option", "package"), [("--tensorboard", "tensorboard"), ("--wandb", "wandb")]
)
def test_curves_whose_package_is_missing_are_refused_before_anybody_is_looked_for(
    option: str,
    package: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    code, errors = complaint(["join", LINK, option, str(tmp_path)], capsys)
    assert code == 2
    assert f"pip install 'shoal[{package}]'" in errors


def test_unusable_keys_are_an_error_and_are_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt path to the copy of a lost host's key made another key, and a new address."""
    damaged, exposed = tmp_path / "damaged.key", tmp_path / "exposed.key"
    missing = ["bootstrap", "--data-dir", str(tmp_path), "--identity", str(tmp_path / "seed1.key")]
    code, errors = complaint(missing, capsys)
    assert code == 2 and f"there is no key at {tmp_path / 'seed1.key'}: put the copy" in errors
    assert not list(tmp_path.iterdir())
    damaged.write_bytes(b"not a key")
    damaged.chmod(0o600)
    exposed.write_bytes(Identity.from_seed(bytes(32)).to_bytes())
    exposed.chmod(0o644)
    for key, says in ((damaged, "damaged"), (exposed, "chmod 600")):
        before = key.read_bytes()
        arguments = ["bootstrap", "--data-dir", str(tmp_path), "--identity", str(key)]
        code, errors = complaint(arguments, capsys)
        assert code == 2
        assert says in errors
        assert "move it away: a peer then gets a new identity, and an owner's runs" in errors
        assert key.read_bytes() == before


def test_a_data_folder_that_is_a_file_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    code, errors = complaint(["bootstrap", "--data-dir", str(tmp_path / "file")], capsys)
    assert code == 2
    assert "--data-dir" in errors


def test_a_listen_address_of_another_machine_is_reported_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bootstrap", "--data-dir", str(tmp_path), "--listen", "/ip4/192.0.2.77/tcp/7700"]
    code, errors = complaint(arguments, capsys)
    assert code == 2
    assert "--announce" in errors


def test_a_lane_port_in_use_is_reported_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen(1)
        port = other.getsockname()[1]
        code, errors = complaint(["join", "run.toml", "--lane", f"{port}:443"], capsys)
    assert code == 2
    assert f"port {port} is taken" in errors and "--lane" in errors


def test_each_expected_error_has_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dht.errors import HostClosed

    for error, code in (
        (RunRefused("layout", "a", "b"), 4),
        (PeerError("something"), 1),
        (HostClosed("the daemon has ended"), 3),
        (KeyboardInterrupt(), 130),
    ):

        def fail(*args: object, error: BaseException = error, **options: object) -> None:
            raise error

        monkeypatch.setattr(cli, "command", lambda: fail)
        assert cli.run(["x"]) == code
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("command", ["status", "simulate"])
def test_ctrl_c_is_told_and_not_only_an_exit_code(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typer made an exit code of it inside a command, and the terminal showed nothing."""

    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("peer.cli.steering.running_peers", interrupt)
    monkeypatch.setattr("peer.simulate.report.simulate", interrupt)
    assert complaint(command.split(), capsys) == (130, "shoal: interrupted\n")


@pytest.mark.parametrize("stopped_in", ["the search", "the pause after it"])
def test_ctrl_c_while_a_run_file_is_searched_tells_for_what_was_waited(
    stopped_in: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(link: object, tell: Callable[[str], None]) -> bytes:
        if stopped_in == "the search":
            tell("no host answered")
            raise KeyboardInterrupt
        raise NobodyMet("run", "no host answered")

    def interrupt(pause_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("peer.joining.link.ask_peers", search)
    monkeypatch.setattr("peer.cli.finding.time", SimpleNamespace(sleep=interrupt))
    assert cli.run(["join", "--yes", LINK]) == 130
    *_, reason, last = capsys.readouterr().err.splitlines()
    assert "no host answered" in reason and last == "shoal: interrupted"


def test_a_demo_writes_nothing_beside_somebodys_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier, a trial replaced a ``run.toml`` there, and joined its own peers to those of an
    earlier trial."""
    (tmp_path / "run.toml").write_text("mine")
    code, said = complaint(["demo", "--directory", str(tmp_path)], capsys)
    assert code == 2 and "is not empty, 'run.toml' is in it" in said
    assert [each.name for each in tmp_path.iterdir()] == ["run.toml"]


@pytest.mark.parametrize("command", ["demo --directory", "simulate --out"])
def test_a_file_where_a_folder_belongs_is_reported(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    code, said = complaint([*command.split(), str(tmp_path / "file")], capsys)
    assert code == 2 and said.endswith("file: File exists; choose another path\n")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(cli, "command", lambda: fail)
    with pytest.raises(AssertionError, match="a bug"):
        cli.run(["x"])


def test_a_closed_pipe_causes_no_traceback() -> None:
    command = f"{sys.executable} -m peer.cli --help | head -c 1"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_error(closed: str) -> None:
    """``--version`` failed with a traceback, and a socket would have been the standard output."""
    script = "import os, sys; sys.argv[1:] = ['--version']; from peer.cli import main; "
    script += "sys.exit = lambda code: os._exit(code or os.open('/dev/null', 0) < 3); main()"
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {closed}', sys.executable, script],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""


@pytest.mark.parametrize("both", [False, True], ids=["stdout", "stdout and stderr"])
def test_a_peer_whose_output_nobody_reads_any_more_is_asked_to_leave(both: bool) -> None:
    """`shoal join LINK | head` ended at once, and left its work behind."""
    peer = """
import signal, sys
from peer.cli.application import complain, say
asked = []
signal.signal(signal.SIGHUP, lambda *_: asked.append(1))
sys.stdin.read()
for _ in range(3):
    say("a round")
complain("still here")
sys.exit(len(asked))
"""
    errors = subprocess.STDOUT if both else subprocess.PIPE
    with Child("-c", peer, stderr=errors) as child:
        child.output.close()
        child.end_input()
        if child.process.stderr is not None:
            assert child.process.stderr.read() == "shoal: still here\n"
        assert child.wait() == 1


@pytest.mark.parametrize(
    ("environment", "desktop"),
    [({}, False), ({"DISPLAY": ":0"}, True), ({"WAYLAND_DISPLAY": "wayland-0"}, True)],
)
def test_a_graphical_session_makes_a_machine_a_desktop(
    environment: dict[str, str], desktop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert taking_part._is_desktop() is desktop


@pytest.mark.parametrize("command", ["start", "status", "export"])
def test_a_path_that_is_too_long_is_reported_in_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, errors = complaint([command, "a" * 300, *["out"] * (command == "export")], capsys)
    assert code == 2
    assert os.strerror(errno.ENAMETOOLONG) in errors


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.ENOENT, errno.EIO, errno.EMFILE]
)
def test_an_unwritable_disk_is_reported_in_one_line(
    number: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    code, errors = complaint(["limits", "--up", "1M", "--directory", str(tmp_path)], capsys)
    assert code == 2
    assert os.strerror(number) in errors
    assert str(tmp_path) in errors


@pytest.mark.parametrize("command", [["limits", "--up", "1M"], ["pause"], ["resume"], ["leave"]])
def test_a_folder_that_cannot_be_changed_keeps_no_other_peer_from_being_told(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    anna, boris, clara = (tmp_path / name for name in ("anna", "boris", "clara"))
    with ExitStack() as stack:
        for folder in (anna, boris, clara):
            stack.enter_context(occupied(folder, RunFile(), "learner"))
        (anna / LIMITS).mkdir()
        code = cli.run(command)
    output, errors = capsys.readouterr()
    assert code == 2
    assert errors == f"shoal: {anna / LIMITS}: Is a directory; check the path\n"
    assert (boris / LIMITS).is_file() and (clara / LIMITS).is_file()
    assert [line.partition(": ")[0] for line in output.splitlines()] == [
        f"my-run, learner, {boris}",
        f"my-run, learner, {clara}",
    ]


@pytest.mark.parametrize("command", ["limits", "pause", "resume", "leave"])
def test_wishes_are_for_a_peer_and_limits_for_one_that_may_come(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier, limits were written into any folder that was named by mistake, such as a source
    tree, and `shoal pause --directory` of an empty one ended with 0."""
    arguments = [command, "--directory", str(tmp_path)]
    if command == "limits":
        assert cli.run(arguments) == 0
    else:
        code, errors = complaint(arguments, capsys)
        assert code == 2 and f"there is no peer in the folder {tmp_path}: pass" in errors
    (tmp_path / "README.md").touch()
    before = sorted(tmp_path.iterdir())
    capsys.readouterr()
    assert complaint(arguments, capsys)[0] == 2
    assert complaint(["limits", *arguments[1:]], capsys) == (
        2,
        f"shoal: {tmp_path} is not a peer's folder: it has other files in it, such as 'README.md'; "
        "pass a new or an empty folder with --directory (shoal docs folder-not-empty)\n",
    )
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / "in_use").touch()
    assert cli.run(arguments) == 0


def test_limits_without_a_folder_leave_peers_of_the_past_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shoal limits --up 1M` changed nine folders, of runs that had ended among them."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    past = tmp_path / "shoal" / "runs" / "0123456789abcdef"
    with occupied(past, RunFile(), "learner"):
        pass
    with occupied(tmp_path / "anna", RunFile(), "learner"):
        assert cli.run(["limits", "--up", "1M"]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"my-run, learner, {tmp_path / 'anna'}: up 1 MB/s")
    assert output.count("\n") == 1 and not (past / LIMITS).exists()


def test_a_line_of_the_log_contains_nothing_of_a_stranger_that_a_terminal_would_obey() -> None:
    code = """
import logging
from peer.cli.application import start_logging

start_logging()
logging.getLogger("peer.views").info("run_page_not_had reason=%s", "no\\x1b[2J\\nroot: well")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr.endswith(" run_page_not_had reason=no\ufffd[2J\ufffdroot: well\n")
    assert done.stderr.count("\n") == 1
