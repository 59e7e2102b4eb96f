from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
from msgspec import structs

from averaging.history.chain import Chain
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.state import FragmentState
from averaging.messages import Link
from averaging.numbers.layout import Layout, TensorSpec
from dht.identity import PeerId
from peer import cli
from peer.errors import RunRefused
from peer.model.recipes import (
    build_model,
    embedding_names,
    head_names,
    trained_parameters,
)
from peer.rules.ledger import Ledger
from peer.run_file.merging import Outer
from peer.run_file.sections import GptModel, PythonStdlibData, RunFile
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.home import folder_bytes
from peer.storage.outer_state import NothingToExport, OuterState, export, load_outer, outer_content
from peer.storage.tensor_file import Tensor

RUN = RunFile(
    name="a-run",
    model=GptModel(layers=2, width=32, heads=2, context=16, tied_head=False),
    data=PythonStdlibData(sequence_length=16),
    outer=Outer(fragments=5, momentum=0.5),
)
MODEL = build_model(RUN)
LAYOUT = Layout.build(
    [TensorSpec(name, tuple(p.shape)) for name, p in trained_parameters(MODEL).items()],
    RUN.outer.fragments,
    embeddings=embedding_names(MODEL),
    heads=head_names(MODEL),
)


def state_of(fragment: int, version: int = 7) -> FragmentState:
    """A fragment that holds the model's own parameters."""
    parameters = {name: p.detach().numpy().ravel() for name, p in trained_parameters(MODEL).items()}
    units = LAYOUT.fragments[fragment].units
    theta = np.concatenate([parameters[u.tensor][u.start : u.end] for u in units])
    links = [Link(v, bytes([v, fragment]) * 16, 100 * v) for v in range(version + 1)]
    return FragmentState(
        fragment=fragment,
        version=version,
        lineage=links[-1].lineage,
        chain=Chain(links),
        theta=theta,
        momentum=theta * np.float32(0.5),
        merged=MergedMap(
            {PeerId("anna"): Mark(3, 10 * version, 500), PeerId(f"p{fragment}"): Mark(1, 2, 30)}
        ),
    )


STATES = [state_of(index, version=7 + index) for index in range(len(LAYOUT.fragments))]


def save(folder: CheckpointFolder, **changes: object) -> Path:
    arguments = {"run": RUN, "layout": LAYOUT, "states": STATES, "ledger": None} | changes
    return folder.save(*outer_content(**arguments))  # type: ignore[arg-type]


def load(folder: CheckpointFolder) -> OuterState:
    loaded = load_outer(folder, run_id=RUN.run_id, layout_hash=LAYOUT.hash)
    assert loaded is not None
    return loaded


def test_every_fragment_is_restored_exactly_with_its_history(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    ledger = Ledger([fragment.size for fragment in LAYOUT.fragments])
    save(folder, ledger=ledger.plain())
    loaded = load(folder)
    assert loaded.run == RUN
    assert loaded.layout == LAYOUT
    assert loaded.ledger == ledger.plain()
    for before, after in zip(STATES, loaded.states, strict=True):
        assert after.digest() == before.digest()
        assert (after.fragment, after.version) == (before.fragment, before.version)
        assert after.lineage == before.lineage
        assert after.chain == before.chain
        assert dict(after.merged) == dict(before.merged)
        after.theta[:] = 0  # whoever loads it may work on it


def test_the_directives_of_the_runs_owner_are_kept_with_the_states(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, directives=(b"one", b"two"))
    assert load(folder).directives == (b"one", b"two")


def test_global_tokens_count_each_peer_once(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder)
    assert load(folder).global_tokens == 500 + 30 * len(STATES)


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert load_outer(CheckpointFolder(tmp_path)) is None
    with pytest.raises(NothingToExport, match=str(tmp_path)):
        export(CheckpointFolder(tmp_path), tmp_path / "out.safetensors")


def test_a_checkpoint_of_another_run_or_model_is_refused_with_both_names(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder)
    with pytest.raises(RunRefused) as refused:
        load_outer(folder, run_id="ab" * 32)
    assert f"is {RUN.run_id}, but this is {'ab' * 32}; pass another folder" in str(refused.value)
    with pytest.raises(RunRefused) as refused:
        load_outer(folder, layout_hash=bytes(32))
    assert LAYOUT.hash.hex() in str(refused.value)


def test_an_intact_but_invalid_checkpoint_is_set_aside(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder)
    folder.save({"theta.0": Tensor.of(np.zeros(3, np.float32))}, {"kind": "something else"})
    assert load(folder).path.name == "000000000001"
    assert (tmp_path / "000000000002.damaged").is_dir()


PLAIN = structs.replace(RUN, outer=structs.replace(RUN.outer, momentum=0.0))
"""The run without outer momentum."""
PLAIN_STATES = [dataclasses.replace(state, momentum=np.zeros(0, np.float32)) for state in STATES]


def test_without_outer_momentum_a_checkpoint_has_theta_alone(tmp_path: Path) -> None:
    folder, whole = CheckpointFolder(tmp_path / "plain"), CheckpointFolder(tmp_path / "whole")
    path, other = save(folder, run=PLAIN, states=PLAIN_STATES), save(whole)
    loaded = load_outer(folder, run_id=PLAIN.run_id)
    assert loaded is not None
    for before, after in zip(PLAIN_STATES, loaded.states, strict=True):
        assert after.digest() == before.digest() and after.momentum.size == 0
    sizes = [folder_bytes(each) for each in (other, path)]
    assert sizes[0] - sizes[1] == pytest.approx(4 * LAYOUT.size, rel=0.01)


@pytest.mark.parametrize(("run", "states"), [(RUN, PLAIN_STATES), (PLAIN, STATES)])
def test_a_checkpoint_whose_momentum_is_not_that_of_its_run_is_set_aside(
    run: RunFile, states: list[FragmentState], tmp_path: Path
) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, run=run, states=states)
    assert load_outer(folder) is None
    assert (tmp_path / "000000000001.damaged").is_dir()


def test_a_fragment_of_another_size_is_not_loaded(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    wrong = [dataclasses.replace(STATES[0], theta=STATES[0].theta[1:]), *STATES[1:]]
    save(folder, states=wrong)
    assert load_outer(folder) is None


def test_each_fragment_is_required(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="once, in order"):
        save(CheckpointFolder(tmp_path), states=STATES[1:])


def test_an_export_loads_into_the_model_with_every_parameter_as_it_was(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "run")
    save(folder)
    out = tmp_path / "out.safetensors"
    export(folder, out)
    other = build_model(RunFile(model=RUN.model, random_seed=9))
    assert not torch.equal(other.get_parameter("head.weight"), MODEL.get_parameter("head.weight"))
    safetensors.torch.load_model(other, out)
    for name, parameter in MODEL.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter), name
    with safetensors.safe_open(out, framework="np") as opened:
        assert opened.metadata()["shoal_run_id"] == RUN.run_id
        assert opened.metadata()["shoal_global_tokens"] == "650"
        assert "shoal_apart" not in opened.metadata()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.safetensors", "run"]


def test_export_prints_json_for_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(CheckpointFolder(tmp_path / "outer"))
    out = tmp_path / "out.safetensors"
    assert cli.run(["export", str(tmp_path), str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    with safetensors.safe_open(out, framework="np") as opened:
        metadata = opened.metadata()
    assert told == {
        "file": str(out),
        "form": "safetensors",
        "dtype": "fp32",
        "name": metadata["shoal_run"],
        "run_id": metadata["shoal_run_id"],
        "tokens": int(metadata["shoal_global_tokens"]),
        "model": metadata["shoal_model"],
        "averaged": 1,
        "held_out": None,
    }


def test_an_export_that_cannot_be_written_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(CheckpointFolder(tmp_path / "outer"))
    assert cli.run(["export", str(tmp_path), str(tmp_path / "no" / "x")]) == 2
    errors = capsys.readouterr().err
    assert "no/x: its folder does not exist; choose another place" in errors


def test_an_export_replaces_a_file_only_when_it_is_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(CheckpointFolder(tmp_path / "outer"))
    out = tmp_path / "thesis.txt"
    out.write_text("mine")
    assert cli.run(["export", str(tmp_path), str(out)]) == 2
    errors = capsys.readouterr().err
    assert "thesis.txt: it exists, and --force replaces it" in errors
    assert out.read_text() == "mine"

    assert cli.run(["export", str(tmp_path), str(out), "--force"]) == 0
    with safetensors.safe_open(out, framework="np"):
        pass


def test_an_export_notes_the_side_of_a_fork(tmp_path: Path) -> None:
    def exported(lineage: bytes, **how: str) -> dict[str, str]:
        one, *others = STATES
        folder = CheckpointFolder(tmp_path / lineage.hex())
        save(folder, states=[dataclasses.replace(one, lineage=lineage), *others])
        out = tmp_path / f"{lineage.hex()}.safetensors"
        outer = export(folder, out, **how)
        with safetensors.safe_open(out, framework="np") as opened:
            metadata: dict[str, str] = opened.metadata()
        assert metadata["shoal_model"] == outer.model
        return metadata

    here, there = exported(b"a" * 32), exported(b"b" * 32, apart="boris: at [3, 4]")
    assert here["shoal_versions"] == there["shoal_versions"]
    assert here["shoal_model"] != there["shoal_model"]
    assert there["shoal_apart"] == "boris: at [3, 4]"


def test_a_large_tensor_split_over_fragments_is_exported_in_one_piece(tmp_path: Path) -> None:
    small = {"b": 500, "c": 400, "d": 300, "e": 300}
    specs = [TensorSpec(name, (size,)) for name, size in small.items()]
    layout = Layout.build([TensorSpec("w", (100, 64)), *specs], 3)
    rows = [u.start for fragment in layout.fragments for u in fragment.units if u.tensor == "w"]
    assert len(rows) == 3
    assert rows != sorted(rows), "the fragments hold the rows in order: nothing to sort"
    rng = np.random.default_rng(0)
    whole = {spec.name: rng.random(spec.size, np.float32) for spec in layout.specs}
    states = [
        FragmentState(
            fragment.index,
            0,
            bytes(32),
            Chain([Link(0, bytes(32), 0)]),
            np.concatenate([whole[u.tensor][u.start : u.end] for u in fragment.units]),
            np.zeros(fragment.size, np.float32),
            MergedMap(),
        )
        for fragment in layout.fragments
    ]
    folder = CheckpointFolder(tmp_path / "run")
    save(folder, run=RunFile(outer=Outer(fragments=3, momentum=0.5)), layout=layout, states=states)
    export(folder, tmp_path / "out.safetensors")
    read = safetensors.torch.load_file(tmp_path / "out.safetensors")
    for spec in layout.specs:
        assert (read[spec.name].numpy() == whole[spec.name].reshape(spec.shape)).all(), spec.name
