"""Three peers fine-tune a small model that a run has made, with adapters: one command, on a CPU.

A run of one peer makes the base: a byte-level model of Python sources, exported for transformers.
``shoal run new --base`` writes a run file with its hashes, three peers train adapters of it on
questions about weekdays, and the result is exported. Every step is a command that users run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import peer
from peer.data.sources import open_data
from peer.demo.processes import Output, kill_tree, spawn

BASE_RUN = """\
name = "base"

[model]
recipe = "gpt"
layers = 2
width = 96
heads = 4
context = 64

[data]
recipe = "python_stdlib"
sequence_length = 64

[inner]
learning_rate = 3e-3
batch_size = 16

[schedule]
shape = "constant"
warmup_tokens = 20_000

[end]
tokens = {tokens}
"""

QUESTIONS_RUN = """\
name = "weekdays"

{model}

[data]
recipe = "files"
form = "completion"
columns = ["question", "answer"]
template = {{ prompt = "# {{content}}\\n", answer = "{{content}}" }}
sequence_length = 64
held_out = 0.15

[[data.sources]]
files = ["questions.jsonl"]

[inner]
learning_rate = 1e-2
batch_size = 16
weight_decay = 0.0

[schedule]
warmup_tokens = {warmup}

[outer]
fragments = 4
steps_per_cycle = 24

[rounds]
quorum_deadline_s = 10.0
round_deadline_s = 20.0

[membership]
heartbeat_s = 2.0
expiry_s = 8.0

[end]
tokens = {tokens}
"""

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
WORDS = ("one day", "two days", "three days", "four days", "five days", "six days", "a week")
ASKED = ("What day is {n} after {day}?", "{n} after {day}?", "Today is {day}. And in {n}?")

STEP_TOKENS = 16 * 64
LINE_S = 0.1


def questions() -> list[dict[str, str]]:
    return [
        {
            "question": asked.format(n=words, day=day),
            "answer": f"{DAYS[(today + number + 1) % 7]}.",
        }
        for asked in ASKED
        for number, words in enumerate(WORDS)
        for today, day in enumerate(DAYS)
    ]


def shoal(*arguments: str) -> str:
    """The output of a command that ends by itself."""
    (output,) = all_of(arguments)
    return output


def all_of(*commands: Sequence[str]) -> list[str]:
    """The outputs of commands that run side by side: each imports transformers for seconds."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(_output, commands))


def _output(arguments: Sequence[str]) -> str:
    command = [sys.executable, "-m", "peer.cli", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        sys.exit(f"shoal {' '.join(arguments)}\n{done.stderr}")
    return done.stdout


@contextmanager
def learners() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that are ended with the block, whatever happens in it."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        yield running
    finally:
        for process in running:
            kill_tree(process)


def learner(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    options = ("--directory", str(folder), "--name", folder.name, "--threads", "1")
    local = ("--listen", "/ip4/127.0.0.1/tcp/0", "--page", "off", "--device", "cpu")
    log = folder.with_suffix(".out")
    return spawn([*command, *options, *local, "--json", "--yes"], log, module=("-m", "peer.cli"))


def records(folder: Path) -> list[dict[str, Any]]:
    return Output(folder.with_suffix(".out")).news()


def awaited(
    folder: Path, process: subprocess.Popen[bytes], event: str, **fields: str
) -> dict[str, Any]:
    """The first record of an event with these fields. Ends the program if it does not come."""
    wanted = {"event": event, **fields}
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        for record in records(folder):
            if wanted.items() <= record.items():
                return record
        time.sleep(LINE_S)
    sys.exit(f"{folder.name} told no {wanted}: see {folder.with_suffix('.out')}")


def make_base(out: Path, steps: int) -> Path:
    """A run of one peer, and its model in the form that others publish theirs in."""
    file, folder = out / "base-run.toml", out / "base-peer"
    file.write_text(BASE_RUN.format(tokens=steps * STEP_TOKENS))
    with learners() as running:
        running.append(learner(folder, "start", str(file)))
        if running[0].wait(timeout=300):
            sys.exit(f"the run of the base failed: see {folder.with_suffix('.out')}")
    shoal("export", str(folder), str(out / "base"), "--to", "hf")
    return out / "base"


def write_run(out: Path, steps: int, peers: int) -> Path:
    """The run file: the model as ``shoal run new`` writes it, and data and schedule of our own."""
    (out / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions()))
    written = shoal("run", "new", "--base", str(out / "base"), "--lora", "8")
    model = written[written.index("[model]") : written.index("\n[data]")]
    model = model.replace('base_dtype = "bf16"', 'base_dtype = "fp32"')  # a CPU is slow in bf16
    tokens = peers * steps * STEP_TOKENS
    run = QUESTIONS_RUN.format(model=model, tokens=tokens, warmup=tokens // 20)
    (out / "run.toml").write_text(run)
    return out / "run.toml"


def tune(out: Path, file: Path, peers: int) -> list[Path]:
    folders = [out / f"peer-{number}" for number in range(peers)]
    with learners() as running:
        # Else the first would train most of the budget before the others have started.
        for folder in folders:
            folder.mkdir()
        all_of(*(("limits", "--directory", str(each), "--cpu", "10%") for each in folders))
        running.append(learner(folders[0], "start", str(file)))
        link = awaited(folders[0], running[0], "link")["link"]
        for folder in folders[1:]:
            running.append(learner(folder, "join", link, "--data", str(out)))
        for folder, process in zip(folders, running, strict=True):
            awaited(folder, process, "phase", name="ready")
        all_of(*(("limits", "--directory", str(each), "--cpu", "100%") for each in folders))
        for folder, process in zip(folders, running, strict=True):
            if process.wait(timeout=300):
                sys.exit(f"{folder.name} failed: see {folder.with_suffix('.out')}")
    return folders


def loss_before(out: Path, file: Path) -> float:
    """The held-out loss of the base, whose adapters do nothing yet."""
    run = peer.read_run(str(file))
    cache = Path(os.environ["XDG_DATA_HOME"]) / "shoal" / "data"
    model = peer.build_model(run, base=peer.fetch_base(run, out))
    held_out = open_data(run, peer_id="before", cache_dir=cache, data_dir=out).held_out
    return peer.held_out_loss(model, held_out)


class Phases:
    """The time that each part of the program takes."""

    def __init__(self) -> None:
        self._ends = [time.monotonic()]
        self._names: list[str] = []

    def end(self, name: str) -> None:
        self._names.append(name)
        self._ends.append(time.monotonic())

    def text(self) -> str:
        parts = zip(self._names, pairwise(self._ends), strict=True)
        told = ", ".join(f"{name} {end - start:.0f} s" for name, (start, end) in parts)
        return f"{self._ends[-1] - self._ends[0]:.0f} s ({told})"


def table(rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("finetune-out"))
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--base-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=200, help="mean number of steps of a peer")
    chosen = parser.parse_args()
    out: Path = chosen.out.absolute()
    out.mkdir(parents=True)
    os.environ["XDG_DATA_HOME"] = str(out / "home")
    phases = Phases()
    make_base(out, chosen.base_steps)
    phases.end("base")
    file = write_run(out, chosen.steps, chosen.peers)
    print(shoal("run", "check", str(file)))
    before = loss_before(out, file)
    phases.end("run file and loss before")
    folders = tune(out, file, chosen.peers)
    phases.end("three peers")
    run_dir, data, asked = (
        str(folders[0]),
        ("--data", str(out)),
        "Today is Friday. And in two days?",
    )
    measured, said, _, _ = all_of(
        ("eval", run_dir, *data, "--json"),
        ("say", run_dir, asked, *data, "--temperature", "0", "--json"),
        ("export", run_dir, str(out / "adapter"), "--to", "peft", *data),
        ("export", run_dir, str(out / "tuned"), "--to", "hf", *data),
    )
    after = json.loads(measured)["losses"][0]["nats_per_token"]
    answer = json.loads(said)["text"]
    phases.end("measuring and exports")
    done = [[each for each in records(f) if each.get("event") == "done"][-1] for f in folders]
    rows = [("peer", "steps", "tokens", "sent", "received")]
    for folder, last in zip(folders, done, strict=True):
        sent, received = (f"{last[name] / 1e3:.0f} kB" for name in ("bytes_sent", "bytes_received"))
        tokens = round(last["fates"]["processed"])
        rows.append((folder.name, last["steps"], tokens, sent, received))
    print(table(rows))
    print(f"held-out loss of the answers: {before:.3f} -> {after:.3f}")
    print(f"{asked!r}: {answer!r}")
    print(f"{phases.text()}; models, run file and logs are in {out}")


if __name__ == "__main__":
    main()
