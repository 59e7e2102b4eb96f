"""What is refused, and in which words: transcripts, one file in ``refused`` for each kind of input.

A case is what was given, then what was said of it, in lines that begin with ``=> ``. To add one,
write what is given into the file: ``python -m tests.golden`` writes what is said.
"""

from __future__ import annotations

import io
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from dht.addresses import parse as parse_address
from dht.errors import AddressError
from peer import cli
from peer.errors import LinkError, RunFileError
from peer.joining.link import parse_link
from peer.run_file.reading import parse
from peer.run_file.sections import RunFile
from peer.run_file.writing import to_toml
from peer.simulate.settings import BadExperiment, Swarm, sweep
from peer.simulate.simulation import SimulatedSwarm
from tests.peer.run_file.whole import whole

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
STANDS_FOR = {
    "LINK": f"shoal://{'0' * 64}?seed=/ip4/127.0.0.1/tcp/9/p2p/{PEER}",
    "RUN": "examples/tiny_gpt/run.toml",
}
"""Words of commands in the transcripts."""
SIGNED = RunFile(name="signed", seeds=[f"/ip4/203.0.113.7/tcp/7700/p2p/{PEER}"])
"""In commands, ``signed`` stands for the file of this run with its owner's signature."""
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SAID = "=> "
BETWEEN = "\n----\n"


def given(text: str) -> Iterator[str]:
    """What is given in each case of a transcript."""
    for case in text.removesuffix("\n").split(BETWEEN):
        yield "\n".join(line for line in case.split("\n") if not line.startswith(SAID))


def transcript(name: str, say: Callable[[str], str]) -> str:
    """The transcript as this build would write it."""
    text = (HERE / name).read_text(encoding="utf-8")
    cases = (
        "\n".join([each, *(f"{SAID}{line}" for line in say(each).splitlines())])
        for each in given(text)
    )
    return BETWEEN.join(cases) + "\n"


def _refusal(error: type[Exception], read: Callable[[str], Any]) -> Callable[[str], str]:
    def say(text: str) -> str:
        try:
            return f"accepted: {read(text)}"
        except error as refused:
            return str(refused)

    return say


def _experiment(setting: str) -> Swarm:
    (changes,) = sweep([setting])
    experiment = Swarm().with_settings(changes)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "examples"))
        with SimulatedSwarm(experiment):
            return experiment


def _command(line: str) -> str:
    """What a command says that ends before anybody is looked for, and its exit code."""
    words = [STANDS_FOR.get(word, word) for word in shlex.split(line)]
    with tempfile.TemporaryDirectory() as home:
        if SIGNED.name in words:
            words[words.index(SIGNED.name)] = _signed(Path(home))
        return _said(words, Path(home))


def _signed(home: Path) -> str:
    """The file of a run whose owner has signed it on this machine."""
    path = home / SIGNED.name
    path.write_text(to_toml(SIGNED), encoding="utf-8")
    assert "exit 0" in _said(["run", "sign", str(path)], home)
    return str(path)


def _run(text: str) -> str:
    """What is said when a run is started that reads well and could not work."""
    with tempfile.TemporaryDirectory() as home:
        path = Path(home) / "run.toml"
        path.write_text(whole(text), encoding="utf-8")
        checked = _said(["run", "check", str(path)], Path(home))
        started = _said(["start", "--yes", str(path)], Path(home))
        assert not (Path(home) / "shoal").exists(), "nothing is made for it"
    assert started.startswith(checked.rstrip()), "it is checked in the same way"
    return started


def _said(words: Sequence[str], home: Path) -> str:
    output, errors = io.StringIO(), io.StringIO()

    def nobody(*_: object, **__: object) -> None:
        raise AssertionError("somebody was looked for")

    with (
        pytest.MonkeyPatch.context() as patched,
        chdir(ROOT),
    ):
        patched.setenv("XDG_DATA_HOME", str(home))
        for name in NOT_CALLED:
            patched.setattr(name, nobody)
        with redirect_stdout(output), redirect_stderr(errors):
            code = cli.run(words)
    text = f"exit {code}\n{output.getvalue()}{errors.getvalue()}"
    return text.replace(str(home), "HOME").replace(str(ROOT), "ROOT")


NOT_CALLED = (
    "peer.joining.link.ask_peers",
    "peer.joining.visit.visit",
    "peer.data.sources.read_once",
)
"""With these a command looks for others, or measures data."""
KINDS: dict[str, Callable[[str], str]] = {
    "refused/addresses.txt": _refusal(AddressError, parse_address),
    "refused/commands.txt": _command,
    "refused/experiments.txt": _refusal(BadExperiment, _experiment),
    "refused/links.txt": _refusal(LinkError, parse_link),
    "refused/runs.txt": _run,
    "refused/run_files.txt": _refusal(RunFileError, lambda text: parse(text).run_id),
}
"""The transcripts, each with what says what is said of one input."""
