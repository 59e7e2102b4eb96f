"""What is refused, and in which words: transcripts, one file in ``refused`` for each kind of input.

A case is what was given, then what was said of it, in lines that begin with ``=> ``. To add one,
write what is given into the file: ``python -m tests.golden`` writes what is said.
"""

from __future__ import annotations

import io
import shlex
import tempfile
from collections.abc import Callable, Iterator
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
from peer.simulate.settings import BadExperiment, Swarm, sweep

PEER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
STANDS_FOR = {
    "LINK": f"shoal://{'0' * 64}?seed=/ip4/127.0.0.1/tcp/9/p2p/{PEER}",
    "RUN": "examples/tiny_gpt/run.toml",
}
"""Words of commands in the transcripts."""
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
    return Swarm().with_settings(changes)


def _command(line: str) -> str:
    """What a command says that ends before anybody is looked for, and its exit code."""
    words = [STANDS_FOR.get(word, word) for word in shlex.split(line)]
    output, errors = io.StringIO(), io.StringIO()

    def nobody(*_: object, **__: object) -> None:
        raise AssertionError("somebody was looked for")

    with (
        pytest.MonkeyPatch.context() as patched,
        tempfile.TemporaryDirectory() as home,
        chdir(ROOT),
    ):
        patched.setenv("XDG_DATA_HOME", home)
        for name in NOT_CALLED:
            patched.setattr(name, nobody)
        with redirect_stdout(output), redirect_stderr(errors):
            code = cli.run(words)
    return f"exit {code}\n{output.getvalue()}{errors.getvalue()}".replace(str(ROOT), "ROOT")


NOT_CALLED = ("peer.joining.find.ask_peers", "peer.data.sources.read_once")
"""With these a command looks for others, or measures data."""
KINDS: dict[str, Callable[[str], str]] = {
    "refused/addresses.txt": _refusal(AddressError, parse_address),
    "refused/commands.txt": _command,
    "refused/experiments.txt": _refusal(BadExperiment, _experiment),
    "refused/links.txt": _refusal(LinkError, parse_link),
    "refused/run_files.txt": _refusal(RunFileError, lambda text: parse(text).run_id),
}
"""The transcripts, each with what says what is said of one input."""
