"""The commands about runs and simulations: what they print, and with which code they end."""

from __future__ import annotations

import inspect
import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from peer import cli
from peer.cli import taking_part
from peer.rules.ending import Ending
from peer.run_file.presets import preset
from peer.run_file.reading import parse
from peer.run_file.sections import SIZES, GptModel, RunFile
from peer.trainer.needs import needs_of

COMMIT = "0123456789" * 4


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.run(arguments)
    output, errors = capsys.readouterr()
    return code, output, errors


# --- run files --------------------------------------------------------------------------------


def test_a_new_run_file_has_every_default_and_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, _ = said(["run", "new"], capsys)
    assert code == 0
    assert parse(text) == RunFile()
    path = tmp_path / "my.run.toml"
    path.write_text(text, encoding="utf-8")
    code, output, _ = said(["run", "check", str(path), "--json"], capsys)
    found = json.loads(output)
    assert code == 0
    assert found["run_id"] == RunFile().run_id
    assert found["parameters"] > 100_000
    assert len(found["layout_hash"]) == 64


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("data", ["python_stdlib", "fineweb-edu", f"Owner/some_Text@{COMMIT}"])
def test_a_new_run_file_for_a_size_is_valid_and_says_what_the_run_needs(
    size: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text, told = said(["run", "new", "--size", size, "--data", data], capsys)
    assert code == 0
    run = parse(text)
    assert run == preset(size, data)
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

    def unreachable(*_: object) -> None:
        raise OSError("no route to the hub")

    monkeypatch.setattr(hub.HfApi, "dataset_info", unreachable)
    code, text, errors = said(["run", "new", "--size", "124m", "--data", "a/b"], capsys)
    assert (code != 0, text) == (True, "")
    assert "no route to the hub; name it as a/b@COMMIT" in errors


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--size", "2b"], "size is '2b'; it is one of 124m, 350m, 1b"),
        (["--size", "124m", "--data", "c4"], "data is 'c4'"),
        (["--size", "124m", "--data", "a/b c"], "data.dataset is 'a/b c'"),
        (["--data", "fineweb-edu"], "--data needs --size"),
    ],
)
def test_a_new_run_file_for_an_unknown_size_or_dataset_is_refused(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, errors = said(["run", "new", *options], capsys)
    assert (code, output) == (2, "")
    assert says in errors
    assert errors.count("\n") == 1


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


def test_a_run_with_a_custom_model_cannot_be_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.toml"
    path.write_text('name = "own"\n[model]\nrecipe = "custom"\n', encoding="utf-8")
    code, _, errors = said(["keep", str(path), "--directory", str(tmp_path / "kept")], capsys)
    assert code == 2
    assert "'own' is 'custom'" in errors
    assert not (tmp_path / "kept").exists()


def test_a_keeper_without_a_checkpoint_says_so_at_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def kept(*_: object) -> Ending:
        return Ending("asked to end", 130, finished=False, timeout_s=0.0)

    monkeypatch.setattr("peer.agent.keeper.keep", kept)
    (tmp_path / "a.toml").write_text('name = "a"\n', encoding="utf-8")
    command = ["keep", str(tmp_path / "a.toml"), "--directory", str(tmp_path / "kept")]
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


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["start", "/nowhere/run.toml"], 3, "No such file"),
        (["start", "shoal://" + "0" * 64], 2, "shoal join LINK"),
        (["join", "shoal://nonsense"], 2, "a run id has 64 hex digits"),
        (["join", "http://example.org/run.toml"], 3, "use https"),
        (["status", "not-a-link"], 2, "is not a run link"),
        (["join", "shoal://" + "0" * 64], 3, "no seed"),
        (["status", "shoal://" + "0" * 64], 3, "no seed"),
        (
            ["start", "examples/tiny_gpt/run.toml", "--weights", "/nothing"],
            2,
            "no such file or folder",
        ),
        (["export", "/nowhere", "/tmp/out.safetensors"], 2, "no usable checkpoint"),
    ],
)
def test_an_expected_failure_is_one_line_and_an_exit_code(
    arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    got, output, errors = said(arguments, capsys)
    assert (got, output) == (code, "")
    assert errors.startswith("shoal: ")
    assert errors.count("\n") == 1
    assert says in errors


def test_a_missing_device_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = said(
        ["start", "examples/tiny_gpt/run.toml", "--device", "toaster", "--yes"], capsys
    )
    assert code == 2
    assert "toaster" in errors


# --- simulations -------------------------------------------------------------------------------


def test_goodput_prints_the_cells_that_scripts_read(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = said(["simulate", "goodput", "--json", "--seeds", "1"], capsys)
    cells = json.loads(output)["cells"]
    assert code == 0
    assert len(cells) == 30
    assert {"system", "learners", "chips", "goodput", "reported"} <= cells[0].keys()


def test_goodput_computes_the_swarm_of_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["simulate", "goodput", "--learners", "12", "--mtbf", "9h", "--rejoin", "4m", "--json"]
    code, output, _ = said(own, capsys)
    rows = {row["system"]: row["goodput"] for row in json.loads(output)["swarm"]}
    assert code == 0
    assert rows["decoupled"] == pytest.approx(99.3, abs=0.2)


def test_an_experiment_writes_csv_a_picture_and_a_self_contained_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, _ = said(["simulate", "bandwidth", "--out", str(tmp_path)], capsys)
    assert code == 0
    assert "0.84 (0.84)" in output
    assert (tmp_path / "bandwidth.csv").read_text().startswith("method,codec,utilisation")
    assert (tmp_path / "bandwidth.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "bandwidth.html").read_text(encoding="utf-8")
    assert "data:image/png;base64," in page
    assert "http" not in page


def test_bandwidth_shows_which_methods_a_link_can_carry(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = said(["simulate", "bandwidth", "--up", "1Gbit/s", "--params", "1e9"], capsys)
    assert code == 0
    lines = {line.split("  ")[0].strip(): line for line in output.splitlines()}
    assert lines["data parallel"].endswith(": not enough")
    assert lines["decoupled"].endswith(": enough")


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "bandwidth", "--up", "20furlong"],
        ["simulate", "bandwidth", "--step", "-1s"],
        ["simulate", "bandwidth", "--params", "0"],
        ["simulate", "goodput", "--learners", "3", "--mtbf", "soon"],
        ["chaos", "goodput", "--only", "rigid"],
    ],
)
def test_an_invalid_quantity_is_bad_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, errors = said(arguments, capsys)
    assert (code, output) == (2, "")
    assert errors.count("\n") == 1


def test_joining_a_run_file_without_seeds_does_not_found_a_second_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.run.toml"
    path.write_text("name = 'mine'", encoding="utf-8")
    folder = tmp_path / "peer"
    code, output, errors = said(["join", str(path), "--directory", str(folder)], capsys)
    assert (code, output) == (3, "")
    assert f"to found the run: `shoal start {path}`" in errors
    assert not folder.exists()


@pytest.mark.parametrize("command", ["start", "join", "keep"])
def test_a_port_in_use_is_reported_before_anything_starts(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.run.toml"
    path.write_text("name = 'mine'", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        where = ["--directory", str(tmp_path / "peer"), "--listen", f"/ip4/127.0.0.1/tcp/{port}"]
        code, output, errors = said([command, str(path), *where], capsys)
    assert (code, output) == (2, "")
    assert f"port {port} is taken by another program" in errors


@pytest.mark.parametrize("command", ["start", "join", "keep"])
def test_a_name_that_is_too_long_is_reported_before_anything_starts(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output, errors = said([command, "my.run.toml", "--name", "x" * 33], capsys)
    assert (code, output) == (2, "")
    assert "1 to 32 printable characters" in errors


@pytest.mark.parametrize("command", ["start", "join", "keep"])
def test_an_invalid_seed_is_reported_before_anything_starts(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.run.toml"
    path.write_text("name = 'mine'", encoding="utf-8")
    where = ["--directory", str(tmp_path / "peer"), "--seed", "seed.example.org:7700"]
    code, output, errors = said([command, str(path), *where], capsys)
    assert (code, output) == (2, "")
    assert "seed.example.org:7700" in errors
