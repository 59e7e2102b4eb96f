"""Questions to a person at a terminal, and the effect of the answers."""

from __future__ import annotations

import fcntl
import os
import select
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from peer.cli.application import print_summary
from peer.quantities import bytes_text
from peer.run_file.reading import parse
from peer.storage.earlier import LastSeen, save_last_seen
from tests.peer.extras.bases.published_model import NAME, publish
from tests.peer.extras.export.exported_run import save_run
from tests.peer.hub_server import hub_server
from tests.peer.run_file.whole import whole
from tests.processes import Child

TEXT = """
name = "old"
[model]
layers = 1
width = 16
heads = 2
context = 16
[data]
sequence_length = 16
[inner]
batch_size = 2
"""

REFUSED, INTERRUPTED = 4, 130


class Terminal:
    """A command whose input and output is a terminal of its own."""

    def __init__(self, child: Child, keyboard: int) -> None:
        self._child, self._keyboard = child, keyboard
        self.screen = ""

    def wait_for(self, text: str, *, timeout_s: float = 90.0) -> None:
        """Wait until ``text`` stands on the screen, after what was waited for before."""
        deadline = time.monotonic() + timeout_s
        while text not in self.screen:
            assert time.monotonic() < deadline, f"{text!r} is not on the screen:\n{self.screen}"
            assert self._read() or text in self.screen, f"it ended with:\n{self.screen}"

    def write(self, keys: str) -> None:
        # As a person would, after the prompt: Python's input() shows it before it waits for keys
        # and signals, and does not look at a Ctrl-C between the two until the next key.
        time.sleep(0.2)
        self.screen = ""
        os.write(self._keyboard, keys.encode())

    def end(self, *, timeout_s: float = 90.0) -> int:
        deadline = time.monotonic() + timeout_s
        while self._read():
            assert time.monotonic() < deadline, f"it has not ended:\n{self.screen}"
        return self._child.wait(30)

    def _read(self) -> bool:
        """Read some output; false at its end."""
        if not select.select([self._keyboard], [], [], 1.0)[0]:
            return True
        try:
            self.screen += os.read(self._keyboard, 4096).decode(errors="replace")
        except OSError:  # Linux: nobody has the terminal open any more
            return False
        return True


@contextmanager
def typing_to(*arguments: str, home: Path, **environment: str) -> Iterator[Terminal]:
    keyboard, screen = os.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    child = Child(
        *("-P", "-m", "peer.cli", *arguments),
        stdin=screen,
        stdout=screen,
        stderr=screen,
        start_new_session=True,
        preexec_fn=take_terminal,
        env={
            **os.environ,
            "XDG_DATA_HOME": str(home),
            "TERM": "xterm",
            "COLUMNS": "200",
            **environment,
        },
    )
    os.close(screen)
    with child:
        yield Terminal(child, keyboard)
    os.close(keyboard)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of a run that a keeper of this machine has known."""
    run = parse(TEXT)
    seen = LastSeen(run=run.canonical().decode(), at=0.0, tokens=2_000_000)
    save_last_seen(tmp_path / "shoal" / "keepers" / run.run_id[:16], seen)
    path = tmp_path / "old.toml"
    path.write_text(whole(TEXT), encoding="utf-8")
    return path


def folders(home: Path) -> set[str]:
    return {path.name for path in (home / "shoal").iterdir()}


@pytest.mark.parametrize(
    ("keys", "code"),
    [
        ("\n", REFUSED),
        pytest.param("n\n", REFUSED, marks=pytest.mark.slow),
        pytest.param("what?\nn\n", REFUSED, marks=pytest.mark.slow),
        ("\x03", INTERRUPTED),
    ],
)
def test_a_run_that_has_existed_is_not_founded_anew_without_a_yes(
    file: Path, tmp_path: Path, keys: str, code: int
) -> None:
    before = folders(tmp_path)
    with typing_to("start", str(file), home=tmp_path) as terminal:
        terminal.wait_for("Found it anew? [y/N]:")
        assert "at 2 M tokens" in terminal.screen
        terminal.write(keys)
        assert terminal.end() == code, terminal.screen
        assert "Traceback" not in terminal.screen
    assert folders(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "code"), [("n\n", REFUSED), ("\x03", INTERRUPTED)])
def test_after_a_yes_the_run_is_described_and_nothing_starts_without_another_one(
    file: Path, tmp_path: Path, keys: str, code: int
) -> None:
    with typing_to("start", str(file), home=tmp_path) as terminal:
        terminal.wait_for("Found it anew? [y/N]:")
        terminal.write("y\n")
        terminal.wait_for("Take part? [Y/n]:")
        assert "Run" in terminal.screen and "Machine" in terminal.screen, terminal.screen
        terminal.write(keys)
        assert terminal.end() == code, terminal.screen
    assert not list(tmp_path.glob("shoal/**/progress"))


def test_a_summary_is_broken_between_words_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "Network  sends at most 12.2 MB an hour (int4); the whole model is exchanged every 6.4 s"
    monkeypatch.setenv("COLUMNS", "40")
    print_summary([line])
    assert capsys.readouterr().out == f"{line}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_summary([line])
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 3 and max(map(len, shown)) <= 40
    assert all(each.startswith(" " * 9) for each in shown[1:])
    assert " ".join(" ".join(shown).split()) == " ".join(line.split())


@pytest.mark.slow
def test_a_base_is_not_fetched_without_a_yes(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the extra 'hf' is not installed")
    model = publish(tmp_path / "published")
    size = (model / "model.safetensors").stat().st_size
    with hub_server({NAME: model}) as hub:
        own = {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "hub")}
        with typing_to(
            "run", "new", "--base", NAME, "--data", "python_stdlib", home=tmp_path, **own
        ) as terminal:
            terminal.wait_for("[end]")
            assert terminal.end() == 0
            text = terminal.screen[terminal.screen.index("name =") :].replace("\r", "")
        file = tmp_path / "run.toml"
        file.write_text(f'homepage = "https://example.org/tiny"\n{text}', encoding="utf-8")
        hub.asked.clear()
        with typing_to("start", str(file), home=tmp_path, **own) as terminal:
            terminal.wait_for("Fetch the base")
            assert f"1 file, {bytes_text(size)}, into" in terminal.screen
            assert "https://example.org/tiny" in terminal.screen
            terminal.write("n\n")
            assert terminal.end() == REFUSED, terminal.screen
        assert len([path for path, _ in hub.asked if path.startswith("/store/")]) == 1  # its size
    assert not list(tmp_path.glob("shoal/data/models/*"))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["\n", "\x04"])
def test_lines_that_are_typed_are_continued_until_an_empty_one_or_the_end(
    tmp_path: Path, end: str
) -> None:
    save_run(tmp_path / "peer")
    options = ("--temperature", "0", "--max-tokens", "8")
    with typing_to("say", str(tmp_path / "peer"), *options, home=tmp_path) as terminal:
        terminal.wait_for("> ")
        answers = []
        for _ in range(2):  # a model of bytes has no chat: each line begins anew
            terminal.write("Once upon\n")
            terminal.wait_for("\n> ")
            answers.append(terminal.screen)
        assert answers[0] == answers[1] and len(answers[0]) > len("Once upon\r\n\r\n> ")
        terminal.write(end)
        assert terminal.end() == 0, terminal.screen
