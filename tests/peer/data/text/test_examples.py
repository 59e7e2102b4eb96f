"""Chats and completions: which tokens are predicted, and how examples fill sequences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dht.identity import PeerId
from peer.data.sources import open_data
from peer.data.text.formats import text_of
from peer.data.text.tokenizing import ByteTokenizer, FileTokenizer, example_tokens, packed
from peer.errors import DataUnavailable, RunFileError
from peer.model.recipes import build_model, build_optimizer, held_out_loss, next_token_loss
from peer.model.recipes.chunked_loss import loss_in_chunks
from peer.run_file.forms import ExampleForm, form_of
from peer.run_file.reading import parse
from peer.run_file.sections import FilesData, FileSource, GptModel, RunFile
from peer.run_file.writing import to_toml
from peer.trainer.computing.choices import Choices
from peer.trainer.computing.engine import Engine

ANNA, BORIS = PeerId("anna"), PeerId("boris")
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hé?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
    {"role": "user", "content": "unanswered"},
]


def run_of(folder: Path, rows: Sequence[Any], **settings: Any) -> RunFile:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = FilesData(
        sources=[FileSource(files=["a.jsonl"])], held_out=0.2, sequence_length=32, **settings
    )
    return parse(
        to_toml(RunFile(model=GptModel(layers=1, width=32, heads=2, context=32), data=data))
    )


def opened(run: RunFile, folder: Path, peer: PeerId = ANNA) -> Any:
    return open_data(run, peer_id=peer, cache_dir=folder / "cache", data_dir=folder)


def spoken(tokens: Any) -> str:
    """The text that is read, with what is predicted in brackets; a 0 ends an answer."""
    said, inside = "", False
    for token in tokens:
        if (token >= 0) != inside:
            said += "[" if token >= 0 else "]"
            inside = bool(token >= 0)
        said += bytes([token if token >= 0 else ~token]).decode("latin-1").replace("\0", "0")
    return said + "]" * inside


def test_of_a_chat_the_answers_and_their_ends_are_predicted() -> None:
    form = form_of("chat", None, None)
    tokens = example_tokens(form, text_of([CHAT]), ByteTokenizer())
    expected = "Be brief.\n\nUser: HÃ©?\nAssistant: [Yes.0]User: Why?\nAssistant: [So.0]"
    assert spoken(tokens) == expected


def test_words_of_a_template_after_an_answer_are_predicted_as_well() -> None:
    form = form_of("completion", None, {"prompt": "Q {content} A ", "answer": "{content}."})
    tokens = example_tokens(form, text_of(["1+1", "2"]), ByteTokenizer())
    assert spoken(tokens) == "Q 1+1 A [2.0]"


def test_a_token_that_begins_in_the_context_is_not_predicted(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the extra 'hf' is not installed")
    made = tokenizers.ByteLevelBPETokenizer()
    texts = ["User: so it is\nAssistant: so it is"] * 50
    made.train_from_iterator(texts, vocab_size=300, special_tokens=["<|endoftext|>"])
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    tokenizer = FileTokenizer(path, "<|endoftext|>")
    form = form_of("chat", None, None)
    chat = [{"role": "user", "content": "it is"}, {"role": "assistant", "content": "so it is"}]
    tokens = example_tokens(form, text_of([chat]), tokenizer)
    known = int((tokens < 0).sum())
    assert 0 < known < tokens.size
    assert tokens[-1] == tokenizer.end
    whole = "User: it is\nAssistant: so it is"
    (plain,) = tokenizer.encode([whole])
    assert [t if t >= 0 else ~t for t in tokens[:-1].tolist()] == plain.tolist()
    answer = tokenizer._tokenizer.decode(tokens[known:-1].tolist())
    assert "so it is".endswith(answer.strip()) and answer.strip()


def test_sequences_hold_whole_examples_and_are_filled_up() -> None:
    examples = [np.array([~1, 2, 0], np.int32), np.array([~3, 4, 5, 0], np.int32)]
    tokens = packed([*examples, examples[0]], 6, end=0)
    assert tokens.reshape(-1, 6).tolist() == [
        [~1, 2, 0, ~0, ~0, ~0],
        [~3, 4, 5, 0, ~0, ~0],
        [~1, 2, 0, ~0, ~0, ~0],
    ]
    too_long = np.array([~1] * 6 + [2, 0], np.int32)  # its answer is cut off
    assert packed([too_long], 6, end=0).size == 0
    cut = np.array([~1, ~1, 2, 2, 2, 2, 2, 0], np.int32)
    assert packed([cut], 6, end=0).tolist() == [~1, ~1, 2, 2, 2, 2]


ROWS = [{"prompt": f"{n}+1=", "completion": str(n + 1)} for n in range(200)]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_examples_are_read_from_files_by_each_peer_in_its_own_order(
    tmp_path: Path, suffix: str
) -> None:
    run = run_of(tmp_path, ROWS, form="completion")
    if suffix == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="the extra 'hf' is not installed")
        parquet = pytest.importorskip("pyarrow.parquet")

        parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
        source = FileSource(files=["a.parquet"])
        run = msgspec.structs.replace(run, data=msgspec.structs.replace(run.data, sources=[source]))
    mine, other = opened(run, tmp_path), opened(run, tmp_path, BORIS)
    assert mine.held_out.shape[1] == 33
    assert np.array_equal(mine.held_out, other.held_out)
    rows = [spoken(row) for row in mine.train.next(40)]
    assert rows != [spoken(row) for row in other.train.next(40)]
    for row in [*rows, *(spoken(each) for each in mine.held_out)]:
        for example in filter(None, row.split("]")[:-1]):
            asked, _, answer = example.partition("[")
            assert int(asked.lstrip("0").split("+")[0] or 0) + 1 == int(answer.removesuffix("0"))
    held = {part for row in mine.held_out for part in spoken(row).split("]")[:-1]}
    seen = {part for row in rows for part in row.split("]")[:-1]}
    assert held and seen and not held & seen
    state = mine.train.state()
    following = mine.train.next(5)
    again = opened(run, tmp_path)
    again.train.restore_position(state)
    assert np.array_equal(again.train.next(5), following)


@pytest.mark.parametrize(
    ("row", "form", "told"),
    [
        ({"prompt": "a"}, "completion", "line 1: has no field 'completion', but the fields prompt"),
        (
            {"prompt": "a", "completion": 3},
            "completion",
            "no text in the column 'completion', but 3",
        ),
        ({"messages": "hi"}, "chat", "no messages in the column 'messages', but 'hi'"),
        ({"messages": [{"role": "user"}]}, "chat", "a message without role and content"),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "chat",
            "the role 'tool'; data.template has system, user, assistant",
        ),
        ({"messages": CHAT[:2]}, "chat", "no message of the assistant, so nothing to learn"),
    ],
)
def test_a_row_that_is_no_example_is_refused_with_its_line(
    tmp_path: Path, row: dict[str, Any], form: str, told: str
) -> None:
    run = run_of(tmp_path, [row], form=form)
    with pytest.raises(DataUnavailable, match=told):
        opened(run, tmp_path)


def test_a_parquet_file_without_the_column_is_refused_before_it_is_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'hf' is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")

    from peer.data.sources import check_data

    parquet.write_table(pyarrow.Table.from_pylist([{"question": "a"}]), tmp_path / "a.parquet")
    run = run_of(tmp_path, [], form="completion")
    source = FileSource(files=["a.parquet"])
    run = msgspec.structs.replace(run, data=msgspec.structs.replace(run.data, sources=[source]))
    with pytest.raises(DataUnavailable, match=r"no column 'prompt'; its columns are question: set"):
        check_data(run, tmp_path, cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"columns": ["a"]}, "data.columns is for data.form"),
        ({"form": "chat", "columns": ["a", "b"]}, "names 2; form = 'chat' has 1"),
        ({"form": "chat", "template": {"user": "{content}"}}, "has no text for 'assistant'"),
        ({"form": "completion", "template": {"prompt": "x", "answer": "{content}"}}, "must have"),
    ],
)
def test_a_form_against_its_rules_is_refused(
    tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(RunFileError) as raised:
        run_of(tmp_path, ROWS, **settings)
    assert told in str(raised.value)


def test_text_is_the_form_of_runs_that_name_none(tmp_path: Path) -> None:
    data = FilesData(sources=[FileSource(files=["a.jsonl"])])
    assert b"form" not in RunFile(data=data).canonical()
    assert b'"form":"chat"' in RunFile(data=msgspec.structs.replace(data, form="chat")).canonical()


class Uniform(nn.Module):
    """Gives the token after a number a chance that depends on the number read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))

    def forward(self, tokens: Tensor) -> Tensor:
        assert int(tokens.min()) >= 0
        return self.table[tokens]


def test_the_loss_is_the_mean_over_the_tokens_that_are_predicted() -> None:
    model = Uniform()
    tokens = torch.tensor([[~1, ~2, 3, 4], [~5, 6, ~7, ~0]])
    logits = torch.log_softmax(model.table, dim=1)
    expected = -(logits[2, 3] + logits[3, 4] + logits[5, 6]) / 3
    torch.testing.assert_close(next_token_loss(model, tokens), expected)
    assert held_out_loss(model, tokens.numpy(), at_once=1) == pytest.approx(
        float(expected.detach())
    )


@pytest.mark.parametrize("lean", [False, True])
def test_micro_batches_have_the_gradient_of_the_whole_batch(tmp_path: Path, lean: bool) -> None:
    run = run_of(tmp_path, ROWS, form="completion")
    batch = torch.from_numpy(opened(run, tmp_path).train.next(6))
    batch[0] = torch.where(batch[0] < 0, batch[0], ~batch[0])  # one without anything to predict
    found = []
    for micro_batch in (6, 1):
        model = build_model(run)
        choices = Choices(precision="fp32", micro_batch=micro_batch, lean=lean)
        engine = Engine(run, model, build_optimizer(run, model), choices)
        loss = engine.gradients(batch)
        found.append([loss, *(p.grad for p in model.parameters())])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)
    first = found[0][0]
    assert first is not None and bool(first.isfinite())
    model = build_model(run)
    torch.testing.assert_close(loss_in_chunks(model, batch), next_token_loss(model, batch))


def test_the_exported_template_gives_the_text_of_the_training() -> None:
    jinja2 = pytest.importorskip("jinja2", reason="the extra 'hf' is not installed")
    form: ExampleForm = form_of("chat", None, None)
    environment = jinja2.Environment()
    template = environment.from_string(form.chat_template())
    said = template.render(messages=CHAT[:4], eos_token="<e>", add_generation_prompt=True)
    assert said == "Be brief.\n\nUser: Hé?\nAssistant: Yes.<e>User: Why?\nAssistant: "
