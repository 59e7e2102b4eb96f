"""What people and other programs see of this build, as text: one file beside this one for each.

``test_snapshots`` compares, and ``python -m tests.golden`` writes the files anew. A change of a
file is a change of what peers, scripts or folders of an earlier build rely on: its commit says why.
Of what ``--json`` prints, keys and types are kept, and values are masked. Messages between peers
have their files in ``protocol_N``, codecs in ``codec_NAME.bin``.
"""

from __future__ import annotations

import io
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer import rich_utils

from averaging.history.chain import Chain
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.state import FragmentState
from averaging.messages import Link
from averaging.numbers.layout import Layout, TensorSpec
from dht.identity import Identity, PeerId, RunId
from dht.membership.credentials import Signer
from dht.membership.orders import Orders
from peer import cli
from peer.bridge import messages as bridge
from peer.bridge.messages import FromAgent, FromTrainer
from peer.bridge.settings import PeerSettings
from peer.description import Described
from peer.extras.credit.accounting import wire
from peer.extras.credit.reading import save_tally
from peer.extras.orders.directives import Delivered
from peer.joining.visit import RunStatus, Silent
from peer.run_file import presets
from peer.run_file.reading import parse
from peer.run_file.sections import RunFile
from peer.status import PeerRow, Training
from peer.storage.address import keep_link
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.earlier import KeptState, save_state
from peer.storage.home import KEY, OUTER, occupied
from peer.storage.outer_state import outer_content
from tests.golden.refusals import KINDS, transcript
from tests.peer.extras.credit.accounting.books import a_tally
from tests.peer.run_file.whole import whole
from tests.peer.statuses import BORIS, a_status

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
CHECKPOINT = HERE / "checkpoint"
ANNA = Identity.from_seed(b"a" * 32)
SEED = f"/ip4/203.0.113.7/tcp/7700/p2p/{ANNA.peer_id}"
WIDTH = 100


# Commands


def commands(command: Any = None, name: str = "shoal") -> Iterator[tuple[str, Any]]:
    """Every command and every group of commands with its name."""
    command = cli.command() if command is None else command
    yield name, command
    for word, child in sorted(getattr(command, "commands", {}).items()):
        yield from commands(child, f"{name} {word}")


def help_text() -> str:
    """The ``--help`` of every command on a terminal of fixed width and without colours."""
    return "\n".join(
        f"$ {name} --help\n{_printed([*name.split()[1:], '--help'])}" for name, _ in commands()
    )


def _printed(arguments: Sequence[str]) -> str:
    """What a command prints, without the spaces at the ends of lines."""
    output, errors = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("COLUMNS", str(WIDTH))
        # Typer reads them from the environment when it is imported.
        patched.setattr(rich_utils, "MAX_WIDTH", WIDTH)
        patched.setattr(rich_utils, "FORCE_TERMINAL", False)
        with redirect_stdout(output), redirect_stderr(errors):
            cli.run(arguments)
    assert output.getvalue(), f"{arguments}: {errors.getvalue()}"
    return "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines())


# --json


def json_text(folder: Path) -> str:
    """What commands print with ``--json``, by command, with values masked."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_DATA_HOME", str(folder / "home"))
        shown = {name: masked(json.loads(text)) for name, text in _json_outputs(folder)}
    return json.dumps(shown, indent=1, sort_keys=True) + "\n"


def masked(value: Any) -> Any:
    """Keys and types of a JSON value. Equal items of a list are shown once."""
    match value:
        case dict():
            return {_masked_key(key): masked(item) for key, item in value.items()}
        case list():
            kinds: list[Any] = []
            for item in map(masked, value):
                if item not in kinds:
                    kinds.append(item)
            return kinds
        case None:
            return None
    return type(value).__name__


def _masked_key(key: str) -> str:
    """Paths, ids and dates as keys are values of this machine or day."""
    if key.startswith("/"):
        return "PATH"
    if key.startswith("12D3Koo"):
        return "PEER"
    return "DATE" if key[:2] == "20" and key[4:5] == "-" else key


def _json_outputs(folder: Path) -> Iterator[tuple[str, str]]:
    good, bad = folder / "good.toml", folder / "bad.toml"
    good.write_text(whole(f"name = 'good'\nseeds = ['{SEED}']\n"), encoding="utf-8")
    bad.write_text("nam = 'bad'", encoding="utf-8")
    text, peer = folder / "a.txt", folder / "peer"
    text.write_text("some words", encoding="utf-8")
    run = a_run()
    with occupied(peer, run, "learner"):
        write_checkpoint(peer, run)
        save_tally(peer, wire.encode(a_tally(run=run.run_id)))
        keep_link(peer, f"shoal://{run.run_id}?seed={SEED}")
        (peer / "events.jsonl").write_text(
            '{"at": 1.5, "event": "log", "peer": "anna", "name": "anna"}\n'
        )
        Identity.load_or_create(peer / KEY)
        kept = KeptState("ready", "in the run", time.time(), a_status().figures(), time.time())
        save_state(peer, kept)
        for name, arguments in {
            "run sign": ["run", "sign", str(good)],
            "run check": ["run", "check", str(good)],
            "run check, a file with faults": ["run", "check", str(bad)],
            "run delegate": ["run", "delegate", str(good), ANNA.peer_id],
            "invite": ["invite", str(good)],
            "data prepare": ["data", "prepare", str(text), "--out", str(folder / "shards")],
            "status": ["status"],
            "limits": ["limits", "--up", "1M"],
            "credit": ["credit", str(peer)],
            "explain": ["explain", str(peer)],
            "export": ["export", str(peer), str(folder / "out.safetensors")],
            "simulate": ["simulate", "--set", "end.cycles=1", "--set", "peers.count=2"],
        }.items():
            yield name, _printed([*arguments, "--json"])
    yield "status LINK", cli.application.json_text(_status().plain())
    yield "run pause", _reported(_delivered())


def _status() -> RunStatus:
    signer = Signer(Identity.from_seed(bytes(32)), RunId("ab" * 32))
    directive = signer.directive(5, frozenset(), Orders(paused=True))
    silent = {BORIS: Silent("boris", "learner", 0.25, "busy")}
    return RunStatus("ab" * 32, (a_status(directive=5),), silent, {BORIS: directive})


def _delivered() -> Delivered:
    signer = Signer(Identity.from_seed(bytes(32)), RunId("ab" * 32))
    directive = signer.directive(5, frozenset(), Orders(paused=True))
    return Delivered(directive, True, {ANNA.peer_id: "", BORIS: "it is older"}, ["a merge"])


def _reported(delivered: Delivered) -> str:
    output = io.StringIO()
    with redirect_stdout(output):
        delivered.report(as_json=True)
    return output.getvalue()


# Run files


def runs_text() -> str:
    """Run id and canonical form of the examples, of all defaults and of each named size."""
    runs = {
        str(path.relative_to(EXAMPLES.parent)): parse(text)
        for path in sorted(EXAMPLES.rglob("*.toml"))
        if "\n[model]" in (text := path.read_text(encoding="utf-8"))
    }
    runs["the defaults"] = RunFile()
    runs |= {f"size {size}": presets.preset(size) for size in presets.SIZES}
    return "\n".join(
        f"{name}\n{run.run_id}\n{run.canonical().decode()}\n" for name, run in runs.items()
    )


# Agent and trainer, on the same machine but perhaps of two builds while one is upgraded

BEGIN = bridge.Begin(
    run=b"{}",
    directory="/a/folder",
    settings=PeerSettings(name="anna", seeds=(SEED,)),
    tensors=(Described("w", (2, 4), kind="head"),),
    found_after_s=None,
    started_at=1.5,
    earlier_tokens=7,
    ended_cleanly=True,
)
REPORT = bridge.Report(
    status=a_status(link="shoal://link"),
    rows=(PeerRow(name="boris", state="training", step_time_s=0.5, version=3, share=0.5),),
    scheduled_tokens=6,
)
ASKED = bridge.Measure(3, 900, 0)
FROM_TRAINER: tuple[FromTrainer, ...] = (
    BEGIN,
    bridge.Beat(),
    bridge.Leave(5.0, 1.0),
    bridge.Due(1),
    bridge.Restore(),
    bridge.Batches("batch digest"),
    bridge.Measured(asked=ASKED, loss=2.5, sequences=8),
    bridge.Progress(Training(share_of_peak=0.5, temperature_c=60.0)),
    bridge.Happened("an_event", {"field": 1}),
)
FROM_AGENT: tuple[FromAgent, ...] = (
    bridge.Beat(),
    bridge.Phase(name="ready", text="in the run", done=1.0),
    REPORT,
    bridge.Happened("an_event", {"field": 1}),
    ASKED,
    bridge.Over("the run is over", 0, True),
)


def bridge_text() -> str:
    """Messages of a trainer to its agent, then of the agent to its trainer."""
    sides: dict[str, Sequence[FromTrainer | FromAgent]] = {
        "trainer": FROM_TRAINER,
        "agent": FROM_AGENT,
    }
    return "".join(
        f"{side} {type(message).__name__} {bridge.pack(message).hex()}\n"
        for side, messages in sides.items()
        for message in messages
    )


# Checkpoints


def states() -> tuple[FragmentState, ...]:
    """The states of two fragments that have merged."""
    layout = a_layout()
    return tuple(
        FragmentState(
            fragment=index,
            version=7 + index,
            lineage=bytes([index + 1] * 32),
            chain=Chain(
                [
                    Link(6 + index, bytes([index + 5] * 32), 400),
                    Link(7 + index, bytes([index + 1] * 32), 500),
                ]
            ),
            theta=np.arange(fragment.size).astype(np.float32) / np.float32(8),
            momentum=np.arange(fragment.size).astype(np.float32) / np.float32(-16),
            merged=MergedMap({PeerId("anna"): Mark(3, 70, 500)}),
            history=bytes([index + 9] * 32),
        )
        for index, fragment in enumerate(layout.fragments)
    )


def a_layout() -> Layout:
    return Layout.build([TensorSpec(name, (2, 4), "float32") for name in "vw"], 2)


def a_run() -> RunFile:
    return parse(whole("name = 'a-run'\n[outer]\nfragments = 2\nmomentum = 0.5\n"))


def write_checkpoint(folder: Path, run: RunFile) -> Path:
    """Save the states as an agent does, and return the checkpoint's folder."""
    content = outer_content(
        run=run, layout=a_layout(), states=states(), directives=(b"a directive",)
    )
    return CheckpointFolder(folder / OUTER).save(*content)


def files(folder: Path) -> dict[str, bytes]:
    """The content of a folder."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def refused_text(name: str, folder: Path) -> str:
    return transcript(name, KINDS[name])


TEXTS: dict[str, Callable[[Path], str]] = {
    "help.txt": lambda folder: help_text(),
    "json.txt": json_text,
    "runs.txt": lambda folder: runs_text(),
    "bridge.txt": lambda folder: bridge_text(),
    **{name: partial(refused_text, name) for name in KINDS},
}
"""Each file of text with the function that writes it, which may use an empty folder."""


def rewrite(folder: Path) -> None:
    """Write all snapshots anew. ``folder`` is empty."""
    for name, text in TEXTS.items():
        (folder / name).mkdir(parents=True)
        (HERE / name).write_text(text(folder / name), encoding="utf-8")
    shutil.rmtree(CHECKPOINT, ignore_errors=True)
    written = write_checkpoint(folder / "checkpoint", a_run())
    shutil.copytree(written.parent, CHECKPOINT)
