"""The commands and programs that pages show: commands parse, tutorials and loops run."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from peer import cli
from tests.command_faults import fault_of

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "BOOTSTRAP.md", *sorted((ROOT / "docs").glob("*/*.md"))]
GENERATED = {"commands", "run-file", "api", "events"}


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, language: str) -> list[str]:
    text = path.read_text(encoding="utf-8")
    # Block by block: the end of one is no beginning of one without a language.
    found = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for word, block in found if word == language]


def commands_of(path: Path) -> list[str]:
    """The commands that begin lines of blocks, without prompts and comments."""
    lines = [
        line.removeprefix("$ ").partition("  #")[0].strip()
        for language in ("", "text", "console")
        for block in blocks(path, language)
        for line in block.replace("\\\n", "").splitlines()
    ]
    return [
        line
        for line in lines
        if re.match("shoal [a-z]", line) and not re.search("[|>]|\\.\\.\\.'?$", line)
    ]


@pytest.mark.parametrize("path", [page for page in PAGES if page.stem not in GENERATED], ids=named)
def test_commands_of_a_page_can_be_given(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("my.run.toml", "notes.txt", "book.txt", "run.toml", "seed1.key"):
        (tmp_path / name).touch()
    for folder in ("RUN_DIR", "my-model", "my-adapters"):
        (tmp_path / folder).mkdir()
    faults = {line: fault for line in commands_of(path) if (fault := fault_of(line))}
    assert not faults


def test_the_commands_are_found() -> None:
    """Without it nothing would fail if pages wrote them in another way."""
    assert sum(len(commands_of(path)) for path in PAGES) > 60


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_programs_of_a_page_name_what_is_there(path: Path) -> None:
    for program in blocks(path, "python"):
        for node in ast.walk(ast.parse(program)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id == "peer" and node.attr not in (
                    "hf",
                    "lightning",
                    "island",
                    "simulate",
                ):
                    assert hasattr(importlib.import_module("peer"), node.attr), node.attr
                if node.value.id == "run":
                    assert hasattr(importlib.import_module("peer").Run, node.attr), node.attr


def test_the_tutorial_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "\n".join(blocks(ROOT / "docs/run/tutorial.md", "console"))
    steps = re.findall(r"^\$ shoal (.*)\n((?:[^$].*\n)*)", text, re.MULTILINE)
    assert len(steps) >= 2
    for line, shown in steps:
        assert cli.run(shlex.split(line)) == 0
        out, err = capsys.readouterr()
        for expected in shown.splitlines():
            assert expected in (out + err).splitlines()


PREPARED = """
import types, torch, peer
from pathlib import Path

class Net(torch.nn.Linear):
    def forward(self, batch):
        return types.SimpleNamespace(loss=super().forward(batch).square().mean())

model = Net(4, 4)
optimizer = inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
build_model = lambda: model
dataset = torch.utils.data.TensorDataset(torch.randn(64, 4))
dataset = [row[0] for row in dataset]
loader = torch.utils.data.DataLoader(dataset, batch_size=4)
text = peer.describe(model, name="my-run")
Path("my.run.toml").write_text(text)
"""
"""What a reader of a loop has already: a model, an optimizer and data."""

JOINS = re.compile(r"peer\.(?:island\.)?join\(")
MOVES = [f"docs/run/from-{name}.md" for name in ("hivemind", "ddp", "torchft", "flower")]
OWN_LOOP = "docs/run/own-loop.md"


def loop_of(page: str) -> str:
    (loop,) = (block for block in blocks(ROOT / page, "python") if JOINS.search(block))
    return loop


def test_the_loop_of_the_first_page_is_that_of_its_own_page() -> None:
    assert loop_of("README.md") == loop_of(OWN_LOOP)


@pytest.mark.slow  # real agents
@pytest.mark.parametrize("page", [OWN_LOOP, *MOVES])
def test_a_loop_of_a_page_trains_in_a_run(page: str, tmp_path: Path) -> None:
    loop = loop_of(page)
    # A run goes on until its end: this peer leaves after some steps.
    loop = re.sub(
        r"( +)(\w+)\.zero_grad\(\)", r"\1\2.zero_grad()\n\1if run.status.steps > 20: break", loop
    )
    loop = loop.replace(
        '"my.run.toml",', '"my.run.toml", listen=("/ip4/127.0.0.1/tcp/0",), page=None,'
    )
    program = tmp_path / "program.py"
    program.write_text(f"{PREPARED}\n{loop}\nprint('steps', run.status.steps)")
    torchrun = ["-m", "torch.distributed.run", "--standalone"] if "island" in loop else []
    done = subprocess.run(
        [sys.executable, *torchrun, program],
        cwd=tmp_path,
        env={
            "XDG_DATA_HOME": str(tmp_path),
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT),
            "HOME": str(tmp_path),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps" in done.stdout


@pytest.mark.slow  # a minute on a quiet machine
@pytest.mark.timeout(900)
def test_the_simulations_of_their_page_run(tmp_path: Path) -> None:
    lines = [
        line.replace("cp examples", f"cp {ROOT}/examples")
        for block in blocks(ROOT / "docs/research/simulate.md", "")
        for line in block.splitlines()
    ]
    assert len(lines) >= 5
    shell = [f'shoal() {{ "{sys.executable}" -m peer.cli "$@"; }}', *lines]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-ec", "\n".join(shell)], cwd=tmp_path, env=environment, check=True)
    assert list(tmp_path.glob("results/*.html"))
