"""``shoal run new --base``: the run file of a run that begins from a published model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from peer.cli.showing import progress
from peer.run_file.merging import Outer
from peer.run_file.presets import ROBUST_MERGE, name_from
from peer.run_file.sections import (
    AdamwInner,
    Data,
    End,
    FilesData,
    FileSource,
    HfData,
    HfModel,
    Lora,
    PythonStdlibData,
    RunFile,
    Schedule,
)
from peer.storage.home import data_cache

CONTINUED_TOKENS, CONTINUED_LENGTH = 20_000_000, 1024


def run_from_base(named: str, *, rank: int | None, data: str | None) -> RunFile:
    """The run file of a run that begins from a published model. Raises ``ValueError``."""
    from peer.extras.bases.lora import usual_targets
    from peer.extras.bases.published import published
    from peer.model.recipes import build_model

    with progress("reading the base", quiet=False) as show:
        base_model = published(named, cache_dir=data_cache(), tell=lambda name, share: show(share))
    plain: dict[str, Any] = {
        "config": base_model.config,
        "config_unset": list(base_model.config_unset) or None,
    }
    lora = None
    if rank is not None:
        model = build_model(_checked(RunFile(model=HfModel(**plain))), weights=False)
        lora = Lora(rank=rank, alpha=2.0 * rank, targets=usual_targets(model))
    chosen = HfModel(**plain, base=base_model.source, base_files=list(base_model.files), lora=lora)
    tokenizer, end_token = base_model.tokenizer, base_model.end_token
    if Path(named).is_dir():
        from peer.extras.export.tokenizer import is_of_bytes

        if is_of_bytes(Path(named)):
            tokenizer, end_token = "bytes", None
    return continuing(chosen, _data(data, tokenizer or "bytes", end_token))


def _checked(run: RunFile) -> RunFile:
    """The same run. Raises ``RunFileError`` if its model must not be built."""
    from peer.run_file.reading import parse
    from peer.run_file.writing import to_toml

    return parse(to_toml(run), source="the base's config.json")


def _data(name: str | None, tokenizer: str, end_token: str | None) -> Data:
    if name == "python_stdlib":
        return PythonStdlibData()
    if name is None:
        sources = [FileSource(files=["texts"])]
        return FilesData(tokenizer=tokenizer, end_token=end_token, sources=sources)
    if "/" not in name:
        raise ValueError(f"data is {name!r}; with --base it is a dataset on the hub: owner/name")
    if "@" not in tokenizer and tokenizer != "bytes":
        raise ValueError(
            "the tokenizer of a base that is not on the hub is a local file, which a dataset on "
            "the hub cannot use: leave --data out and set [data] yourself"
        )
    dataset, _, commit = name.partition("@")
    return HfData(dataset=dataset, revision=commit or None, tokenizer=tokenizer)


def continuing(model: HfModel, data: Data) -> RunFile:
    """A run that continues to train a published model, or trains adapters of it."""
    assert model.base is not None
    adapts = model.lora is not None
    context = model.config.get("max_position_embeddings")
    length = min(CONTINUED_LENGTH, context if isinstance(context, int) and context > 1 else 128)
    inner = (
        AdamwInner(learning_rate=2e-4, batch_size=16, weight_decay=0.0)
        if adapts
        else AdamwInner(learning_rate=2e-5, batch_size=16)
    )
    owned = model.base.rstrip("/").rpartition("/")[2].partition("@")[0]
    return RunFile(
        name=name_from(f"{owned}-{'lora' if adapts else 'continued'}"),
        model=model,
        data=msgspec.structs.replace(data, sequence_length=length),
        inner=inner,
        schedule=Schedule(warmup_tokens=CONTINUED_TOKENS // 50),
        outer=Outer(fragments=4 if adapts else 16, steps_per_cycle=30, merge=ROBUST_MERGE),
        end=End(tokens=CONTINUED_TOKENS),
    )
