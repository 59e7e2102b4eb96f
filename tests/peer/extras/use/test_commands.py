"""``shoal say`` and ``shoal eval`` on a peer's folder and on an export of it."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from peer import cli
from peer.extras.use.commands import harmless
from peer.run_file.sections import FilesData, FileSource, TextData
from tests.peer.commands_said import record, said
from tests.peer.extras.export.exported_run import RUN, save_run

TEXTS = msgspec.structs.replace(
    RUN, data=TextData(files=["*.txt"], sequence_length=32, held_out=0.3)
)

SAMPLING = ["--seed", "3", "--max-tokens", "40", "--temperature", "0.9"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peer")
    save_run(folder, TEXTS)
    (folder / "data").mkdir()
    (folder / "data" / "a.txt").write_text("A text of a run, quite long. " * 5000)
    return folder


@pytest.fixture(scope="module")
def exported(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    out = tmp_path_factory.mktemp("out") / "model"
    assert cli.run(["export", str(run_dir), str(out), "--to", "hf"]) == 0
    return out


def test_a_model_that_the_file_does_not_describe_is_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program had joined with a model of its own: "KeyError: 'blocks.0.mlp.down.weight'"."""
    save_run(tmp_path / "peer", TEXTS, torch.nn.Linear(3, 2))
    for command in (["say", "x"], ["export", str(tmp_path / "out"), "--to", "hf"]):
        code, _, errors = said([command[0], str(tmp_path / "peer"), *command[1:]], capsys)
        assert code == 4 and errors.count("\n") == 1
        assert "these are not the parameters of the model that the file of run" in errors
        assert "bias: (2,) here, absent there; blocks.0." in errors


def test_a_run_and_its_export_say_the_same(
    run_dir: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = record(["say", str(run_dir), "Once", *SAMPLING], capsys)
    theirs = record(["say", str(exported), "Once", *SAMPLING], capsys)
    assert (ours["prompt"], ours["seed"]) == ("Once", 3)
    assert 0 < ours["tokens"] <= 40 and ours["tokens_per_s"] > 0
    assert ours["text"] == theirs["text"]


def test_an_export_is_asked_in_the_form_of_the_training_like_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only chats have a chat template: what was trained on completions answered nonsense."""
    pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    sources = [FileSource(files=["*.jsonl"])]
    template = {"prompt": "# {content}\n", "answer": "{content}"}
    data = FilesData(form="completion", template=template, sequence_length=32, sources=sources)
    save_run(tmp_path / "peer", msgspec.structs.replace(RUN, data=data))
    out = str(tmp_path / "out")
    assert cli.run(["export", str(tmp_path / "peer"), out, "--to", "hf"]) == 0
    ours = record(["say", str(tmp_path / "peer"), "Once", *SAMPLING], capsys)
    theirs = record(["say", out, "Once", *SAMPLING], capsys)
    assert ours["text"] == theirs["text"]


def test_lines_are_continued_until_an_empty_one(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for typed, count in (("Once\nTwice\n\nnever", 2), ("Once\n", 1)):
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        code, output, _ = said(["say", str(run_dir), *SAMPLING, "--json"], capsys)
        assert code == 0
        assert [json.loads(line)["prompt"] for line in output.splitlines()] == typed.split()[:count]


def test_lines_make_a_chat_where_the_tokenizer_has_a_template(
    exported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
    (folder / "chat_template.jinja").write_text(template)
    monkeypatch.setattr("sys.stdin", io.StringIO("x\ny\n"))
    options = ["--temperature", "0", "--max-tokens", "4", "--json"]
    code, output, errors = said(["say", str(folder), *options], capsys)
    assert code == 0, errors
    first, second = (json.loads(line)["text"] for line in output.splitlines())
    (folder / "chat_template.jinja").unlink()
    for text, answer in (("u:x;a:", first), (f"u:x;a:{first};u:y;a:", second)):
        alone = record(["say", str(folder), text, *options[:-1]], capsys)
        assert alone["text"] == answer


def test_control_characters_for_a_terminal_are_not_shown(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert harmless("\x1b[2J\x9b\r\x7f") == "\ufffd[2J" + "\ufffd" * 3
    assert harmless("語\u3000\u00a0\u200d\n\t") == "語\u3000\u00a0\u200d\n\t"
    text = record(["say", str(run_dir), "Once", *SAMPLING], capsys)["text"]
    code, output, _ = said(["say", str(run_dir), "Once", *SAMPLING], capsys)
    assert (code, output) == (0, harmless(text) + "\n")


def test_bytes_that_are_no_text_are_read_as_replaced(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert record(["say", str(run_dir), "a\udcff", *SAMPLING], capsys)["prompt"] == "a\ufffd"
    typed = io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", typed)
    assert record(["say", str(run_dir), *SAMPLING], capsys)["prompt"] == "a\ufffd"


def test_the_built_in_model_speaks_without_transformers(run_dir: Path) -> None:
    program = (
        "import sys; sys.modules['transformers'] = sys.modules['tokenizers'] = None\n"
        "from peer import cli; sys.exit(cli.run(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "say", str(run_dir), "Once", *SAMPLING, "--json"],
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] > 0


def test_a_run_and_its_export_have_the_same_loss(
    run_dir: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own,) = record(["eval", str(run_dir)], capsys)["losses"]
    data = ["--data", str(run_dir / "data")]
    (theirs,) = record(["eval", str(exported), *data], capsys)["losses"]
    assert own["nats_per_token"] == pytest.approx(theirs["nats_per_token"], rel=1e-5)
    assert own["bytes"] == own["tokens"] and own["data"] == theirs["data"]
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_text("other text")
    files = ["--text", str(tmp_path / "a.txt"), "--text", str(tmp_path / "b.txt")]
    found = record(["eval", str(exported), *files], capsys)
    assert found["run_id"] == TEXTS.run_id
    assert [each["bytes"] for each in found["losses"]] == [9, 10]
    code, output, _ = said(["eval", str(run_dir), *files], capsys)
    assert code == 0 and output.count(" bits per byte; ") == 2


@pytest.mark.parametrize("command", ["say", "eval"])
def test_a_single_exported_file_is_told_from_a_run_file(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier, the file that `shoal export` writes by default was refused as too long a run
    file."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(100_000))
    code, _, errors = said([command, str(file)], capsys)
    assert code == 2
    assert f"{file.name} is one file of parameters; pass the run's folder or link" in errors


def test_a_damaged_export_is_one_line(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("model.safetensors", "config.json", "shoal_run.json"):
        folder = tmp_path / name
        folder.mkdir()
        for path in exported.iterdir():
            (folder / path.name).write_bytes(path.read_bytes()[: -9 if path.name == name else None])
        code, _, errors = said(["say", str(folder), "x"], capsys)
        assert code == 2 and errors.startswith("shoal: cannot load a model from the folder")
        assert errors.count("\n") == 1


def test_a_damaged_checkpoint_is_passed_over_and_left_to_its_peer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path, TEXTS)
    save_run(tmp_path, TEXTS)
    older, newer = sorted((tmp_path / "outer").iterdir())
    (newer / "meta.json").write_text("of another version")
    assert record(["say", str(tmp_path), "x", *SAMPLING], capsys)["tokens"]
    assert sorted((tmp_path / "outer").iterdir()) == [older, newer]
    (older / "meta.json").unlink()
    code, _, errors = said(["say", str(tmp_path), "x"], capsys)
    assert code == 2 and "no usable checkpoint" in errors.splitlines()[-1]
    assert sorted((tmp_path / "outer").iterdir()) == [older, newer]
