"""Small files of all formats, and runs that read them."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dht.identity import PeerId
from peer.data.batches.sequences import Data
from peer.data.files import open_files
from peer.data.text.formats import DataFile
from peer.data.text.tokenizing import TokenizerFacts
from peer.data.text.workers import Job, Workers, carry_out, counted
from peer.run_file.sections import Evaluation, FilesData, FileSource, RunFile

ANNA = PeerId("anna")
LENGTH = 16


def texts(count: int, seed: int = 0) -> list[str]:
    """Documents that are all different."""
    rng = np.random.default_rng(seed)
    return [
        f"<{seed}.{n}:" + "".join(chr(97 + c) for c in rng.integers(0, 26, 10 + n % 90)) + ">"
        for n in range(count)
    ]


def write(folder: Path, name: str, documents: Sequence[str]) -> str:
    """Write documents in the format of a name; returns the hash of the file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = np.frombuffer("\0".join(documents).encode(), np.uint8)
    if path.suffix == ".jsonl":
        path.write_text(
            "\n".join(json.dumps({"id": n, "text": t}) for n, t in enumerate(documents))
        )
    elif path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="the extra 'hf' is not installed")
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pyarrow.table({"text": documents, "id": range(len(documents))})
        parquet.write_table(table, path, row_group_size=20)
    elif path.suffix == ".npy":
        np.save(path, tokens.astype(np.int32))
    elif path.suffix == ".bin":
        path.write_bytes(tokens.astype("<u2").tobytes())
    else:
        path.write_text("".join(documents))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run_of(*sources: FileSource, **recipe: Any) -> RunFile:
    data = FilesData(sources=list(sources), sequence_length=LENGTH, **{"held_out": 0.1, **recipe})
    return RunFile(data=data, evaluation=Evaluation(sequences=8))


class InThisProcess(Workers):
    """Carries jobs out at once, for tests that change sizes, and so that they take no processes."""

    def do(self, job: Job) -> TokenizerFacts:
        return carry_out(job)

    def pieces_of(self, file: DataFile) -> int:
        return counted(file)


def limit_workers(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> list[subprocess.Popen[bytes]]:
    """Lower a limit of the worker processes that are started from now on, which are returned."""
    program = f"from peer.data.text import workers; workers.{limit} = {value}; workers.main()"
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def limited(command: list[str], **options: Any) -> Any:
        assert command[1:4] == ["-P", "-m", "peer.data.text.workers"]
        started.append(popen([sys.executable, "-c", program, *command[4:]], **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", limited)
    return started


def opened(
    run: RunFile, tmp_path: Path, peer: PeerId = ANNA, workers: int = 1, **more: Any
) -> Data:
    assert isinstance(run.data, FilesData)
    return open_files(
        run,
        run.data,
        peer,
        cache_dir=tmp_path / "cache",
        data_dir=tmp_path,
        workers=InThisProcess(workers),
        **more,
    )
