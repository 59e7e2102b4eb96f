"""A base in commands: fetched before this machine is measured with it, and named in a run file.

The run file of a run that begins from it is that of ``shoal run new --base``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import typer

from peer.cli.application import complain, print_summary, progress, report_if_slow
from peer.extras.bases.base_models import base_folder, missing_bytes, missing_files
from peer.model.recipes import needs_base
from peer.quantities import bytes_text, plural
from peer.run_file.merging import Outer
from peer.run_file.places import base_of
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
from peer.trainer.preflight import first_lines


def may_fetch(run: RunFile) -> bool:
    """Ask before the run's base is downloaded, which comes before all that is measured with it."""
    if (needed := _to_fetch(run)) is None:
        return True
    print_summary((*first_lines(run), f"Base     {needed}"))
    return typer.confirm("Fetch the base, to see what this machine can do with it?", default=True)


def fetched_base(run: RunFile, *, founds: bool, data_dir: Path, quiet: bool) -> Path | None:
    """The weights of the run's base, verified; ``None`` if this peer does not need them.

    Raises ``BaseUnavailable`` or ``ExtraMissing``.
    """
    base = base_of(run.model)
    if base is None or not needs_base(run, founds=founds):
        return None
    if missing := missing_files(run, cache_dir=data_cache()):
        complain(f"fetching {base.text} into {data_cache()}: {plural(len(missing), 'file')}")
    with progress("fetching the base, file by file", quiet=quiet) as show:
        return base_folder(
            run,
            cache_dir=data_cache(),
            data_dir=data_dir,
            tell=lambda name, share: show(share),
        )


def _to_fetch(run: RunFile) -> str | None:
    """The download that this peer has yet to make for the run's base, in words; ``None``: none.

    Its size is asked for where the files are.
    """
    base, cache_dir = base_of(run.model), data_cache()
    assert base is not None
    if not (missing := missing_files(run, cache_dir=cache_dir)):
        return None
    size = missing_bytes(run, cache_dir=cache_dir)
    size_text = "of a size that is not known" if size is None else bytes_text(size)
    return f"{base.text}: {plural(len(missing), 'file')}, {size_text}, into {cache_dir}"


CONTINUED_TOKENS, CONTINUED_LENGTH = 20_000_000, 1024


def run_from_base(named: str, *, rank: int | None, data: str | None) -> RunFile:
    """The run file of a run that begins from a published model. Raises ``ValueError``."""
    from peer.extras.bases.base_models import published
    from peer.extras.bases.lora import usual_targets
    from peer.model.recipes import build_model

    with report_if_slow("still reading the base"):
        base_model = published(named)
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
    """A run that continues to train a published model, or trains adapters of it. The rates are
    usual ones, of which there is no figure here."""
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
