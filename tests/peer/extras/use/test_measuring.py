"""Losses are those of the run's peers, and every byte of a text counts once."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from dht.identity import PeerId
from peer.data.sources import open_data
from peer.errors import Unusable
from peer.extras.export.tokenizer import bytes_tokenizer
from peer.extras.use.measuring import held_out_of_run, on_text
from peer.extras.use.ready import ReadyModel, ready_of_run
from peer.model.recipes import held_out_loss
from peer.run_file.sections import CustomData, CustomModel, FilesData, FileSource, RunFile, TextData
from tests.peer.extras.export.exported_run import RUN, save_run, trained_model

TEXTS = msgspec.structs.replace(
    RUN, data=TextData(files=["*.txt"], sequence_length=32, held_out=0.3)
)


def ready(folder: Path, run: RunFile = TEXTS) -> ReadyModel:
    return ready_of_run(save_run(folder, run), bytes_tokenizer(32), data_dir=folder)


def test_the_loss_on_a_text_is_that_of_each_byte_after_those_before_it(tmp_path: Path) -> None:
    text = "Ā line of text, and a longer one than a sequence.\n" * 2
    (tmp_path / "own").write_text(text)
    stream = [0, *text.encode()]
    model, nats = trained_model(TEXTS), 0.0
    for at in range(0, len(stream) - 1, 32):
        window = torch.tensor([stream[at : at + 33]])
        with torch.no_grad():
            shares = torch.log_softmax(model(window[:, :-1]), dim=-1)[0]
        nats -= sum(shares[i, int(window[0, i + 1])].item() for i in range(len(shares)))
    loss = on_text(ready(tmp_path), tmp_path / "own")
    size = len(text.encode())
    assert (loss.tokens, loss.size_bytes) == (size, size)
    assert loss.nats_per_token == pytest.approx(nats / size, rel=1e-5)
    assert loss.bits_per_byte == pytest.approx(nats / size / math.log(2), rel=1e-5)


def test_the_held_out_loss_is_the_one_that_peers_measure(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    for number in range(8):
        (tmp_path / f"{number}.txt").write_bytes(
            random.integers(32, 127, 1 << 15, np.uint8).tobytes()
        )
    loss = held_out_of_run(ready(tmp_path), cache_dir=tmp_path / "cache")
    data = open_data(TEXTS, peer_id=PeerId("anna"), cache_dir=tmp_path / "other", data_dir=tmp_path)
    expected = held_out_loss(trained_model(TEXTS), data.held_out)
    assert loss.nats_per_token == pytest.approx(expected, rel=1e-6)
    predicted = data.held_out[:, 1:]
    assert loss.tokens == predicted.size
    assert loss.size_bytes == np.count_nonzero(predicted)  # an end of a document has no bytes


def test_ends_of_lines_are_measured_as_they_are(tmp_path: Path) -> None:
    """Training reads those of Windows, too."""
    (tmp_path / "own").write_bytes(b"a line\r\nand another\r")
    loss = on_text(ready(tmp_path), tmp_path / "own")
    assert loss.tokens == loss.size_bytes == 20


@pytest.mark.parametrize(
    ("content", "why"), [(None, "No such file"), (b"\xff\xfe", "UTF-8"), (b"", "too little text")]
)
def test_a_file_without_text_is_refused(content: bytes | None, why: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "own").write_bytes(content)
    with pytest.raises(Unusable, match=why):
        on_text(ready(tmp_path / "peer"), tmp_path / "own")


def test_runs_of_programs_are_refused_with_what_can_be_done(tmp_path: Path) -> None:
    own = msgspec.structs.replace(RUN, data=CustomData(sequence_length=32))
    with pytest.raises(Unusable, match="--text FILE"):
        held_out_of_run(ready(tmp_path / "a", own), cache_dir=tmp_path)
    outer = save_run(tmp_path / "b")
    custom = msgspec.structs.replace(RUN, model=CustomModel())
    object.__setattr__(outer, "run", custom)
    with pytest.raises(Unusable, match="'custom'"):
        ready_of_run(outer, None, data_dir=tmp_path)


def test_text_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    shards = FilesData(sources=[FileSource(files=["a.bin"])], sequence_length=32)
    run = msgspec.structs.replace(RUN, data=shards)
    bare = ready_of_run(save_run(tmp_path, run), None, data_dir=tmp_path)
    with pytest.raises(Unusable, match="names no tokenizer"):
        bare.prompt([{"role": "user", "content": "x"}])
