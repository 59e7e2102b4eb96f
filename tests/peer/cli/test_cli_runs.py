"""The commands about runs and simulations: what they print, and with which code they end."""

from __future__ import annotations

import inspect
import json
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from averaging.history.state import FragmentState, Pieces
from averaging.numbers.layout import Layout, TensorSpec
from dht.identity import Identity
from peer.cli import taking_part
from peer.cli.application import json_text
from peer.errors import NobodyMet, RunNotFound
from peer.joining.link import FoundRun, Link
from peer.joining.visit import RunStatus, Silent
from peer.rules.leaving import Departure
from peer.run_file.presets import SIZES, preset
from peer.run_file.reading import parse
from peer.run_file.sections import End, GptModel, MuonInner, RunFile
from peer.simulate.settings import Swarm
from peer.simulate.settings import parse as parse_swarm
from peer.storage.address import keep_link
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.earlier import KeptState, LastSeen, look_at_files, save_last_seen, save_state
from peer.storage.home import OUTER, default_directory, occupied
from peer.storage.outer_state import outer_content
from peer.trainer.needs import needs_of
from peer.trainer.settings import JoinSettings
from tests.peer.commands_said import said
from tests.peer.run_file.whole import whole
from tests.peer.statuses import a_status

PEER = Identity.from_seed(bytes(32)).peer_id

COMMIT = "0123456789" * 4


# --- run files --------------------------------------------------------------------------------


def test_a_new_run_file_is_valid_and_trains_with_muon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, _ = said(["run", "new"], capsys)
    assert code == 0
    run = parse(text)
    assert isinstance(run.inner, MuonInner) and run.name == "my-run"
    path = tmp_path / "My model.run.toml"
    assert said(["run", "new", str(path)], capsys)[0] == 0
    assert parse(path.read_text(encoding="utf-8")).name == "my-model"
    path.write_text(text, encoding="utf-8")
    code, output, _ = said(["run", "check", str(path), "--json"], capsys)
    found = json.loads(output)
    assert code == 0
    assert found["run_id"] == run.run_id
    assert found["parameters"] > 100_000
    assert len(found["layout_hash"]) == 64


def test_a_run_of_a_model_of_ones_own_begins_with_a_file_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.py"
    own.write_text("import torch\n\ndef build():\n    return torch.nn.Linear(1000, 250)\n")
    code, text, _ = said(["run", "new", "--custom", f"{own}:build"], capsys)
    run = parse(text)
    recipes = (run.model, run.data, run.inner)
    assert code == 0 and {each.__struct_config__.tag for each in recipes} == {"custom"}
    assert run.outer.fragments == 2 and "# For a model of 250,250 trained parameters" in text
    code, _, errors = said(["run", "new", "--custom", f"{own}:torch"], capsys)
    assert code == 2 and "has no function 'torch'" in errors


def test_fragments_that_are_mostly_messages_get_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(whole('name = "x"\n[outer]\nfragments = 4000\n'), encoding="utf-8")
    code, _, errors = said(["run", "check", str(path)], capsys)
    assert code == 0 and "outer.fragments is 4000: with about 209 parameters each" in errors


@pytest.mark.parametrize("options", [[], ["--size", "124m"]])
def test_a_new_run_file_is_written_to_a_new_file_and_replaces_none(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my run.toml"
    code, output, _ = said(["run", "new", str(path), *options], capsys)
    assert code == 0
    text = path.read_text(encoding="utf-8")
    assert text == said(["run", "new", *options], capsys)[1]
    assert f"shoal start '{path}'" in output and len(output.splitlines()) == 1
    path.write_text("mine", encoding="utf-8")
    code, output, errors = said(["run", "new", str(path), *options], capsys)
    assert (code, output, path.read_text(encoding="utf-8")) == (2, "", "mine")
    assert f"{path} exists" in errors


def test_of_a_new_run_file_that_the_disk_does_not_take_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.toml"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        code, output, errors = said(["run", "new", str(path)], capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (code, output) == (2, "")
    assert f"cannot write {path}: " in errors
    assert not path.exists()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("data", ["python_stdlib", "fineweb-edu", f"Owner/some_Text@{COMMIT}"])
def test_a_new_run_file_for_a_size_is_valid_and_says_what_the_run_needs(
    size: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, told = said(["run", "new", "--size", size, "--data", data], capsys)
    assert code == 0
    run = parse(text)
    assert run == preset(size, data)
    assert (run.policy.admission, run.outer.merge) == ("open", "centered_clip")
    assert run.model == GptModel(**SIZES[size])
    assert run.inner.__struct_config__.tag == "muon"
    path = tmp_path / "my.run.toml"
    path.write_text(text, encoding="utf-8")
    code, output, _ = said(["run", "check", str(path), "--json"], capsys)
    found = json.loads(output)
    assert (code, found["run_id"]) == (0, run.run_id)
    assert found["fragments"] == run.outer.fragments
    assert told.splitlines() == list(needs_of(run).lines)
    for line in told.splitlines():
        assert f"\n# {line}\n" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_new_run_file_names_the_newest_commit_of_its_dataset(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="the extra 'hf' is not installed")
    monkeypatch.setattr(hub.HfApi, "dataset_info", lambda *_: SimpleNamespace(sha=COMMIT))
    code, text, _ = said(["run", "new", "--size", "124m", "--data", "a/b"], capsys)
    assert code == 0 and parse(text) == preset("124m", f"a/b@{COMMIT}")

    monkeypatch.undo()
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:1")  # nothing listens there
    code, text, errors = said(["run", "new", "--size", "124m", "--data", "a/b"], capsys)
    assert (code, text) == (2, "")
    assert "refused; name it as a/b@COMMIT" in errors


def test_every_fault_of_a_run_file_is_printed_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('schema = 1\nnam = "x"\n[outer]\nmomentum = 2.0\n', encoding="utf-8")
    code, output, errors = said(["run", "check", str(path)], capsys)
    assert (code, output) == (2, "")
    assert "line 2" in errors
    assert "did you mean 'name'" in errors
    assert "line 4" in errors
    code, output, _ = said(["run", "check", str(path), "--json"], capsys)
    assert code == 2
    assert {fault["line"] for fault in json.loads(output)["faults"]} == {2, 4}


def test_a_checked_run_file_says_what_a_peer_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(whole('name = "x"\n[outer]\nbuffers = "mean"\n'), encoding="utf-8")
    code, output, _ = said(["run", "check", str(path)], capsys)
    assert code == 0
    words = {line.split()[0] for line in output.splitlines()}
    assert words >= {"Model", "Link", "Device", "Machine"}
    code, output, _ = said(["run", "check", str(path), "--json"], capsys)
    assert json.loads(output)["buffers"] == 0


def test_a_run_whose_text_cannot_be_read_is_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new.toml"
    path.write_text(whole('name = "new"\n[data]\nrecipe = "text"\nfiles = ["*.txt"]\n'))
    start = ["start", "--yes", "--directory", str(tmp_path / "peer"), str(path)]
    for content, says in ((None, "no file"), ("short", "the held-out part has no sequence of 128")):
        if content is not None:
            (tmp_path / "a.txt").write_text(content)
        code, output, errors = said(start, capsys)
        assert (code, output) == (2, "")
        assert says in errors
    assert not (tmp_path / "peer").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{nonsense\n", "a.jsonl, line 1: is not JSON"),
        ('{"text": "short"}\n', "the held-out part has no sequence of 128 tokens; raise data."),
    ],
)
def test_a_run_with_a_file_that_cannot_be_used_is_not_begun(
    content: str,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Earlier, it was founded, and its first peer ended when training came to the file."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr("peer.cli.training.look_at", None)
    path = tmp_path / "new.toml"
    path.write_text(
        whole('name = "new"\n[data]\nrecipe = "files"\n[[data.sources]]\nfiles = ["a.jsonl"]\n')
    )
    (tmp_path / "a.jsonl").write_text(content)
    start = ["start", "--yes", "--directory", str(tmp_path / "peer"), str(path)]
    code, output, errors = said(start, capsys)
    assert (code, output) == (2, "")
    assert says in errors and errors.count("\n") == 1
    assert not (tmp_path / "peer").exists()


def test_a_new_run_file_may_show_the_settings_of_every_recipe(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, text, _ = said(["run", "new", "--all"], capsys)
    assert code == 0
    short = said(["run", "new"], capsys)[1]
    assert parse(text) == parse(short)
    assert short.count("\n") < 130 < 350 < text.count("\n")
    assert '# With recipe = "hf":' in text
    assert "#   dataset = ..." in text
    assert "#   [[data.sources]]" in text
    assert "#   nesterov = false" in text
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "[[data.sources]]" not in short


def test_an_edited_run_file_is_told_with_what_was_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    before = RunFile(name="new", end=End(date=datetime(2020, 3, 31, tzinfo=UTC)))
    folder = default_directory(before.run_id)
    save_checkpoint(folder, before)
    save_last_seen(folder, LastSeen(run=before.canonical().decode(), at=0.0))
    path = tmp_path / "new.toml"
    path.write_text(
        whole('name = "new"\n[inner]\nbatch_size = 16\n[end]\ndate = 2020-03-31T00:00:00Z\n')
    )
    code, _, errors = said(["start", "--yes", str(path)], capsys)
    assert code == 2  # for the date
    assert "inner.batch_size was 32 and is 16. With them this is another run" in errors
    path.write_text(whole('name = "new"\n[end]\ndate = 2020-03-31T00:00:00Z\n'))
    (folder / "stranger").write_text("")  # ends the command there
    code, _, errors = said(["start", "--yes", str(path)], capsys)
    assert "not a peer's folder" in errors
    assert "another run" not in errors


def save_checkpoint(folder: Path, run: RunFile, layout: Layout | None = None) -> Path:
    """``layout``: not given, that of one small matrix."""
    if layout is None:
        layout = Layout.build([TensorSpec("w", (4, 4), "float32")], run.outer.fragments)
    states = [
        FragmentState.founded(
            layout.hash,
            part.index,
            np.zeros(part.size, np.float32),
            Pieces.of(part, run.outer.momentum).momentum,
        )
        for part in layout.fragments
    ]
    content = outer_content(run=run, layout=layout, states=states)
    return CheckpointFolder(folder / OUTER).save(*content)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions that are asked at a terminal, where somebody takes the default answer."""
    questions: list[str] = []

    def confirm(question: str, *, default: bool = False) -> bool:
        questions.append(question)
        return default

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", confirm)
    return questions


def test_damaged_checkpoints_are_told_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: list[str]
) -> None:
    folder, run = tmp_path / "peer", RunFile(name="new")
    path = tmp_path / "new.toml"
    path.write_text(whole('name = "new"\n'), encoding="utf-8")
    saved = [save_checkpoint(folder, run) for _ in range(2)]
    (folder / "in_use").touch()
    Identity.load_or_create(folder / "identity.key")
    (saved[1] / "tensors.safetensors").write_bytes(b"x")
    found = look_at_files(folder)
    assert not found.lost
    assert found.told == (
        f"checkpoint {saved[1]} is damaged: tensors.safetensors has the wrong size; "
        "going on from 000000000001, before it",
    )
    (saved[0] / "meta.json").write_bytes(b"x")
    code, output, errors = said(["start", str(path), "--directory", str(folder)], capsys)
    assert (code, output) == (4, "")
    assert "no checkpoint in" in errors
    assert "the run begins again with its first weights" in errors
    assert asked == ["Go on without them?"]
    # What an agent has set aside is lost all the same.
    for each in saved:
        CheckpointFolder(folder / OUTER).set_aside(each)
    assert look_at_files(folder).lost


def test_a_lost_key_is_told_of_since_it_makes_another_peer(tmp_path: Path) -> None:
    """Earlier, the key was replaced without a word, and what was known of the peer was that of a
    stranger."""
    assert look_at_files(tmp_path / "new").told == ()
    save_checkpoint(tmp_path, RunFile(name="new"))
    (told,) = look_at_files(tmp_path).told
    assert "has no identity.key, so this peer gets a new one" in told
    Identity.load_or_create(tmp_path / "identity.key")
    assert look_at_files(tmp_path).told == ()


def test_a_folder_in_use_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = tmp_path / "new.toml", tmp_path / "peer"
    path.write_text(whole('name = "new"\n'), encoding="utf-8")
    run = parse(path.read_text())
    monkeypatch.setattr("peer.cli.training.look_at", None)
    with occupied(folder, run, "learner"):
        code, output, errors = said(
            ["start", str(path), "--directory", str(folder), "--yes"], capsys
        )
    assert (code, output) == (1, "") and "is in use by another peer" in errors


def test_a_run_with_a_custom_model_is_kept_once_its_peers_or_a_checkpoint_describe_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts: list[Layout] = []

    async def kept(settings: object, layout: Layout, *_: object, **__: object) -> Departure:
        layouts.append(layout)
        return Departure("asked to end", 130, finished=False, timeout_s=0.0)

    monkeypatch.setattr("peer.agent.keeper.keep", kept)
    path, folder = tmp_path / "own.toml", tmp_path / "kept"
    path.write_text(whole('name = "own"\n[model]\nrecipe = "custom"\n'), encoding="utf-8")
    command = ["keep", str(path), "--directory", str(folder), "--yes"]
    code, _, errors = said(command, capsys)
    assert code == 3 and "no seed" in errors, errors
    assert not folder.exists()
    run = parse(path.read_text(encoding="utf-8"))
    layout = Layout.build(
        [TensorSpec("w", (4, 4)), TensorSpec("mean", (4,))],
        run.outer.fragments,
        statistics=["mean"],
    )
    save_checkpoint(folder, run, layout)
    (folder / "in_use").touch()
    assert said(command, capsys)[0] == 130
    assert [each.hash for each in layouts] == [layout.hash]


def test_a_keeper_without_a_checkpoint_says_so_at_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def kept(*_: object, **__: object) -> Departure:
        return Departure("asked to end", 130, finished=False, timeout_s=0.0)

    monkeypatch.setattr("peer.agent.keeper.keep", kept)
    (tmp_path / "a.toml").write_text(whole('name = "a"\n'), encoding="utf-8")
    where = ["--directory", str(tmp_path / "kept"), "--seed", SEED]
    command = ["keep", str(tmp_path / "a.toml"), *where, "--yes"]
    assert said(command, capsys)[:2] == (
        130,
        "asked to end; no checkpoint of this run on this machine\n",
    )
    (tmp_path / "kept" / "outer" / "000000000001").mkdir(parents=True)
    assert f"the checkpoint is in {tmp_path / 'kept'}" in said(command, capsys)[1]


def test_starting_and_joining_take_the_same_options() -> None:
    def options(name: str) -> dict[str, object]:
        (command,) = [
            each
            for each in taking_part.commands.registered_commands
            if each.callback and each.callback.__name__ == name
        ]
        parameters = dict(inspect.signature(command.callback).parameters)  # type: ignore[arg-type]
        del parameters["where"]
        return {key: parameter.default for key, parameter in parameters.items()}

    assert options("start") == options("join")
    assert {"directory", "data", "pace", "page", "yes"} <= options("join").keys()


@pytest.mark.parametrize("command", ["join --yes", "status"])
def test_a_link_that_names_nobody_to_ask_is_refused_in_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, errors = said([*command.split(), "shoal://" + "0" * 64], capsys)
    assert (code, output) == (3, "")
    assert errors.startswith("shoal: ") and errors.count("\n") == 1
    assert "no seed" in errors


# --- simulations -------------------------------------------------------------------------------


def test_an_experiment_needs_no_plots_to_show_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, its tables were thrown away after minutes of simulation."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    short = [part for setting in ("peers.count=2", "end.cycles=1") for part in ("--set", setting)]
    code, output, _ = said(["simulate", *short, "--out", str(tmp_path)], capsys)
    assert code == 0 and "goodput" in output
    assert (tmp_path / "swarm.csv").exists() and not list(tmp_path.glob("*.png"))


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    """NaN is no JSON: other parsers refuse it."""
    assert json.loads(json_text({"error": float("nan"), "rows": [float("inf")]})) == {
        "error": None,
        "rows": [None],
    }


def test_a_file_of_settings_is_printed_and_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = said(["simulate", "new"], capsys)
    assert code == 0 and parse_swarm(output) == Swarm()


@pytest.mark.parametrize("command", [["export", "OUT"], ["say", "x"]])
def test_a_folder_that_does_not_exist_is_refused_without_torch(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for module in ("peer.extras.export.parameters", "peer.extras.use.ready"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    code, output, errors = said([command[0], "no-such-folder", *command[1:]], capsys)
    assert output == "" and "there is no folder 'no-such-folder'" in errors
    assert code


def test_joining_a_run_file_without_seeds_does_not_found_a_second_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.run.toml"
    path.write_text(whole("name = 'mine'"), encoding="utf-8")
    folder = tmp_path / "peer"
    code, output, errors = said(["join", str(path), "--directory", str(folder), "--yes"], capsys)
    assert (code, output) == (3, "")
    assert f"to found the run: `shoal start {path}`" in errors
    assert not folder.exists()


@pytest.mark.parametrize("command", ["start", "join", "keep"])
def test_without_a_terminal_nobody_takes_part_unasked(
    command: str,
    began: list[tuple[FoundRun, JoinSettings]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Earlier, a script or a cron job took part as if it had agreed; `keep` never asked."""
    path = str(remember(tmp_path))
    monkeypatch.setattr("peer.agent.keeper.keep", None)
    where = ["--seed", SEED]
    code, output, errors = said([command, path, *where], capsys)
    assert (code, output, began) == (2, "", [])
    assert "no terminal to ask at: with --yes it takes part" in errors and errors.count("\n") == 1


def test_a_keeper_is_asked_with_what_the_run_takes_of_the_machine(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    asked: list[str],
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = str(remember(tmp_path))
    monkeypatch.setattr("typer.confirm", lambda question, default: question != "Take part?")
    code, output, errors = said(["keep", path, "--seed", SEED], capsys)
    assert (code, errors) == (4, "")
    assert [line.split()[0] for line in output.splitlines()] == ["Run", "Keeps", "Machine"]


@pytest.mark.parametrize("command", ["start", "join", "keep"])
def test_a_port_in_use_is_reported_before_anything_starts(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.run.toml"
    path.write_text(whole("name = 'mine'"), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        where = ["--directory", str(tmp_path / "peer"), "--listen", f"/ip4/127.0.0.1/tcp/{port}"]
        code, output, errors = said([command, str(path), *where], capsys)
    assert (code, output) == (2, "")
    assert f"port {port} is taken by another program" in errors


# --- a run that has existed -------------------------------------------------------------------

OLD = RunFile(name="old")
LINK = f"shoal://{OLD.run_id}"
SEED = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWGVBEgkHzjFQg5VNNCdTSh3MPQbYUsFKVpLLUwz3kk2fu"


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[FoundRun, JoinSettings]]:
    """The settings that a command would take part with."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    taken: list[tuple[FoundRun, JoinSettings]] = []

    def take_part(found: FoundRun, own: JoinSettings, options: object) -> int:
        taken.append((found, own))
        return 0

    monkeypatch.setattr(taking_part, "_take_part", take_part)
    return taken


def remember(tmp_path: Path, **changes: Any) -> Path:
    """Leave what a keeper of this machine knew of the run, and write its run file."""
    seen = LastSeen(run=OLD.canonical().decode(), at=0.0, tokens=2_000_000, **changes)
    save_last_seen(tmp_path / "shoal" / "keepers" / OLD.run_id[:16], seen)
    path = tmp_path / "old.toml"
    path.write_text(whole('name = "old"\n'), encoding="utf-8")
    return path


def test_a_run_that_has_existed_is_founded_anew_only_when_that_is_meant(
    tmp_path: Path,
    began: list[tuple[FoundRun, JoinSettings]],
    capsys: pytest.CaptureFixture[str],
    asked: list[str],
) -> None:
    path = str(remember(tmp_path))
    code, output, errors = said(["start", path], capsys)
    assert (code, output, began, asked) == (4, "", [], ["Found it anew?"])
    assert "the run 'old' has existed: last seen here on 1970-01-01" in errors
    assert "at 2 M tokens" in errors and "`shoal start --yes` founds it anew" in errors
    code, _, errors = said(["start", path, "--yes"], capsys)
    assert code == 0 and "has existed" in errors
    assert began.pop()[1].found is True


def test_starting_in_the_folder_of_an_earlier_start_goes_on_without_a_question(
    tmp_path: Path,
    began: list[tuple[FoundRun, JoinSettings]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, folder = remember(tmp_path), tmp_path / "anna"
    (folder / "outer" / "000000000001").mkdir(parents=True)
    (folder / "in_use").touch()
    assert said(["start", str(path), "--directory", str(folder), "--yes"], capsys) == (0, "", "")
    assert len(began) == 1


def test_a_run_file_whose_run_is_live_on_this_machine_is_joined(
    tmp_path: Path,
    began: list[tuple[FoundRun, JoinSettings]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A second start stopped, with the advice to pass another folder; that founded the run again.
    No question is asked either: the run has existed, and goes on."""
    path, folder = remember(tmp_path), tmp_path / "anna"
    with occupied(folder, OLD, "learner"):
        keep_link(folder, f"{LINK}?seed={SEED}")
        for command in ("start", "join"):
            assert said([command, str(path), "--yes"], capsys)[0] == 0
    for _, own in began:
        assert own.directory == default_directory(OLD.run_id)
    assert [own.found for _, own in began] == [True, False]
    assert began[0][1].found_after_s == 5.0 and began[1][1].seeds == (SEED,)


def test_joining_never_founds_and_needs_nobody_to_know_the_run_file(
    tmp_path: Path,
    began: list[tuple[FoundRun, JoinSettings]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    remember(tmp_path)
    assert said(["join", f"{LINK}?seed={SEED}", "--yes"], capsys) == (0, "", "")
    ((found, own),) = began
    assert (found.run, found.by_link) == (OLD, True)
    assert (own.found, own.found_after_s) == (False, None)
    code, _, errors = said(["join", LINK, "--weights", "first.safetensors"], capsys)
    assert code == 2 and "--weights is for `shoal start`" in errors


@pytest.mark.parametrize("command", ["join", "keep"])
def test_a_link_without_a_seed_is_refused_where_the_folder_knows_nobody_either(
    command: str,
    tmp_path: Path,
    began: list[tuple[FoundRun, JoinSettings]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The peer looked for others for ever, and had no address to look at."""
    remember(tmp_path, names=("anna",))
    folder = ["--directory", str(tmp_path / "new")]
    code, output, errors = said([command, LINK, *folder, "--yes"], capsys)
    assert (code, output, began) == (3, "", [])
    assert "has no seed address, and this peer's folder knows nobody of the run 'old'" in errors
    assert "at 2 M tokens, with anna), so there is nobody to ask; use the link that" in errors


def test_a_run_that_has_ended_says_so_to_those_who_join_and_those_who_ask(
    tmp_path: Path,
    began: list[tuple[FoundRun, JoinSettings]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    remember(tmp_path, ended_at=86_400.0)
    sentence = (
        "this run has ended on 1970-01-02 00:00 UTC at 2,000,000 tokens; "
        f"`shoal export '{LINK}' OUT.safetensors` fetches its model"
    )
    told = f"shoal: {sentence} (shoal docs run-over)\n"
    assert said(["join", LINK, "--yes"], capsys) == (4, "", told)
    sentence += "\n"
    assert said(["status", LINK], capsys) == (0, sentence, "")
    file = str(tmp_path / "old.toml")
    assert said(["status", file], capsys) == (0, sentence.replace(LINK, file), "")
    assert began == []


@pytest.mark.parametrize("command", ["status", "credit"])
def test_a_run_of_which_no_peer_answers_was_not_reached(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier, the command ended with 0, and a script took that for a run that is well."""
    silent = {PEER: Silent("boris", "learner", 0.25, "connection refused")}

    class OfTheDead:
        async def look(self, *, timeout_s: float) -> RunStatus:
            return RunStatus(OLD.run_id, (), silent)

    @asynccontextmanager
    async def visit(*arguments: object, **settings: object) -> AsyncIterator[OfTheDead]:
        yield OfTheDead()

    monkeypatch.setattr("peer.joining.visit.visit", visit)
    code, output, errors = said([command, LINK], capsys)
    assert code == 3
    assert "1 peer found (boris), and none answered" in errors and errors.count("\n") == 1
    assert command == "credit" or "boris: no answer: connection refused" in output


def test_a_watch_goes_on_when_nobody_is_found_any_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with 3, although the peers were back at the next look."""
    found = RunStatus(OLD.run_id, (), {PEER: Silent("boris", "learner", 0.25, "busy")})
    closed = RunStatus(OLD.run_id, (), {PEER: Silent("boris", "learner", 0.25, "no", refuses=True)})
    nobody = NobodyMet("run", "no peer of it was found")
    looks: list[RunStatus | NobodyMet] = []

    class OnAndOff:
        async def look(self, *, timeout_s: float) -> RunStatus:
            seen = looks.pop(0)
            if isinstance(seen, NobodyMet):
                raise seen
            return seen

    @asynccontextmanager
    async def visit(*arguments: object, **settings: object) -> AsyncIterator[OnAndOff]:
        yield OnAndOff()

    monkeypatch.setattr("peer.joining.visit.visit", visit)
    monkeypatch.setattr("peer.cli.steering.WATCH_EVERY_S", 0.0)
    looks[:] = [found, nobody, found, closed]
    code, output, errors = said(["status", LINK, "--watch", "--json"], capsys)
    assert (code, looks) == (4, [])
    assert [len(json.loads(line)["silent"]) for line in output.splitlines()] == [1, 0, 1, 1]
    assert "run: no peer of it was found; looking again\n" in errors

    looks[:] = [nobody, found]
    code, _, errors = said(["status", LINK, "--watch"], capsys)
    assert (code, looks) == (3, [found])


def test_the_model_of_a_run_that_has_ended_is_where_this_machine_has_it(
    tmp_path: Path,
    began: list[tuple[FoundRun, JoinSettings]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No peer may be on line any more, and then `shoal export LINK` cannot fetch it."""
    remember(tmp_path)
    folder = default_directory(OLD.run_id)
    save_checkpoint(folder, OLD)
    save_last_seen(folder, LastSeen(run=OLD.canonical().decode(), at=1.0, ended_at=86_400.0))
    code, _, errors = said(["join", LINK, "--yes"], capsys)
    assert (code, began) == (4, [])
    assert f"`shoal export {folder} OUT.safetensors`" in errors

    async def nobody(*arguments: object, **settings: object) -> None:
        raise NobodyMet("run", "no peer of it was found")

    monkeypatch.setattr("peer.extras.export.download.download", nobody)
    out = tmp_path / "out.safetensors"
    code, _, errors = said(["export", LINK, str(out)], capsys)
    assert code == 0 and out.exists()
    assert f"no peer of it was found; so this is the copy that your peer has in {folder}" in errors


def test_a_run_that_has_ended_is_not_started_again_in_its_folder(
    tmp_path: Path,
    began: list[tuple[FoundRun, JoinSettings]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Earlier, such a run trained some steps more, which nobody merged."""
    path, folder = remember(tmp_path, ended_at=86_400.0), tmp_path / "anna"
    (folder / "outer" / "000000000001").mkdir(parents=True)
    (folder / "in_use").touch()
    code, output, errors = said(["start", str(path), "--directory", str(folder), "--yes"], capsys)
    assert (code, output, began) == (4, "", [])
    assert (
        f"has ended on 1970-01-02 00:00 UTC at 2,000,000 tokens; `shoal export {folder}" in errors
    )


def test_a_link_that_nobody_answers_is_asked_again_until_somebody_does(
    began: list[tuple[FoundRun, JoinSettings]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []

    def ask_peers(link: Link, tell: object) -> bytes:
        if len(pauses) < 9:
            raise RunNotFound("the link's seeds", "nobody answers")
        return OLD.canonical()

    monkeypatch.setattr("peer.joining.link.ask_peers", ask_peers)
    monkeypatch.setattr("time.sleep", pauses.append)
    code, _, errors = said(["join", f"{LINK}?seed={SEED}", "--yes"], capsys)
    assert (code, began[0][0].run) == (0, OLD)
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert errors.count("is on line (never seen from this machine): nobody answers") == 9


def test_a_second_start_on_a_machine_says_that_it_is_a_second_peer(
    tmp_path: Path,
    began: list[tuple[FoundRun, JoinSettings]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Earlier, the second start took part from a folder of its own, and wrote its log into that of
    the first one."""
    path, folder = remember(tmp_path), default_directory(OLD.run_id)
    for command in (
        ["start", str(path), "--seed", SEED, "--yes"],
        ["join", f"{LINK}?seed={SEED}", "--yes"],
    ):
        assert said(command, capsys)[0] == 0
        assert began.pop()[1].directory == folder
        with occupied(folder, OLD, "learner"):
            _, _, errors = said(command, capsys)
        second = folder.with_name(f"{folder.name}-2")
        assert began.pop()[1].directory == second
        assert f"this one is a second one, with the folder {second}" in errors


def test_of_two_joins_that_wait_for_an_answer_the_later_one_gets_a_folder_of_its_own(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    asked: list[str],
) -> None:
    """Earlier, it ended after its answer: the other learner had taken the folder meanwhile."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    remember(tmp_path)
    trained: list[Path | None] = []
    look = SimpleNamespace(lines=(), engine=object(), step_time_s=1.0)
    monkeypatch.setattr("peer.cli.taking_part._look_at_run", lambda *_: "nobody answers")
    monkeypatch.setattr("peer.cli.training.look_at", lambda *_, **__: look)
    monkeypatch.setattr("peer.cli.taking_part.log_to", lambda path: None)
    monkeypatch.setattr(
        "peer.cli.training.Training.here", lambda training: trained.append(training.own.directory)
    )
    folder = default_directory(OLD.run_id)
    with ExitStack() as stack:

        def answered(question: str, *, default: bool) -> bool:
            stack.enter_context(occupied(folder, OLD, "learner"))
            return True

        monkeypatch.setattr("typer.confirm", answered)
        code, _, errors = said(["join", f"{LINK}?seed={SEED}"], capsys)
    second = folder.with_name(f"{folder.name}-2")
    assert (code, trained) == (0, [second])
    assert f"this one is a second one, with the folder {second}" in errors


def test_devices_beyond_the_sequences_of_a_batch_are_told_to_stand_idle(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--devices 9`, as it was called then, quietly became 4."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = tmp_path / "new.toml"
    path.write_text(whole('name = "new"\n[inner]\nbatch_size = 4\n'), encoding="utf-8")
    trained: list[tuple[str, ...]] = []
    look = SimpleNamespace(lines=(), engine=None, step_time_s=1.0)
    monkeypatch.setattr("peer.cli.training.look_at", lambda *_, **__: look)
    monkeypatch.setattr("peer.cli.taking_part.log_to", lambda path: None)
    monkeypatch.setattr(
        "peer.cli.training.Training.on_devices",
        lambda training, devices: trained.append(devices),
    )
    for asked, told in (("9", "4 of 9 devices train: a batch of run 'new' has 4 seq"), ("4", "")):
        code, _, errors = said(["start", str(path), "--yes", "--device", asked], capsys)
        assert code == 0 and told in errors and bool(told) == ("devices train" in errors)
        assert trained.pop() == ("cpu:0", "cpu:1", "cpu:2", "cpu:3")


def test_status_without_a_link_shows_the_peers_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert said(["status"], capsys) == (0, "none of your peers is running on this machine\n", "")
    folder = tmp_path / "anna"
    with occupied(folder, OLD, "learner"):
        assert ": starting\n" in said(["status"], capsys)[1]
        save_state(folder, KeptState("ready", "in the run", time.time()))
        save_last_seen(folder, LastSeen(run=OLD.canonical().decode(), at=0.0, tokens=2_000_000))
        code, output, _ = said(["status"], capsys)
        assert code == 0
        assert output.startswith("old, learner for 0:") and ": in the run\n" in output
        assert f"  0 tokens of this peer, at least 2 M merged in the run; {folder}\n" in output
        (row,) = json.loads(said(["status", "--json"], capsys)[1])["peers"]
        assert (row["run_id"], row["merged_tokens"]) == (OLD.run_id, 2_000_000)


def test_status_without_a_link_shows_the_figures_of_a_peer_and_how_old_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had neither loss nor speed, and the tokens merged in the run as of up to a minute ago."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    folder = tmp_path / "anna"
    with occupied(folder, OLD, "learner"):
        figures, now = a_status().figures(), time.time()
        save_state(folder, KeptState("ready", "in the run", now, figures, now - 7.0))
        save_last_seen(folder, LastSeen(run=OLD.canonical().decode(), at=0.0, tokens=20))
        output = said(["status"], capsys)[1]
        assert (
            "  step 10, loss 2.500, held-out loss 2.400 at 900 tokens, 2 peers, 7 rounds, "
            "1 k tokens merged by all, 20 tokens/s (0:07 ago)\n"
        ) in output
        (row,) = json.loads(said(["status", "--json"], capsys)[1])["peers"]
        assert row["merged_tokens"] == 1000 and 7.0 <= row["figures_age_s"] < 67.0
