"""``shoal run new`` and ``run check``: run files."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer import Argument, Option

from peer.cli.application import Json, complain, json_text, report_if_slow, show, usage_errors
from peer.cli.finding import check_new, run_to_start
from peer.errors import DataUnavailable, Fault, NotWritten, RunFileError, RunFileUnreadable
from peer.installed import extra
from peer.run_file.contradictions import remarks
from peer.run_file.presets import STDLIB, name_from, preset, starting
from peer.run_file.sections import OWNED_HUB_NAME, CustomData, CustomModel, HfData, RunFile
from peer.storage.home import data_cache

FRAGMENT_MIN = 1000
"""Parameters of a fragment below which its rounds are mostly messages."""

runs = typer.Typer(help="Write, check and own run files.", no_args_is_help=True)


@runs.command("new")
def run_new(
    file: Annotated[
        Path | None,
        Argument(help="New file to write; without one the text is printed.", metavar="FILE"),
    ] = None,
    size: Annotated[
        str | None,
        Option(help="Settings for a model of this size: 124m, 350m or 1b."),
    ] = None,
    data: Annotated[
        str | None,
        Option(
            help="Training data: python_stdlib, fineweb-edu, or a dataset on the Hugging Face "
            "hub: owner/name, or owner/name@COMMIT. [default: python_stdlib]"
        ),
    ] = None,
    base: Annotated[
        str | None,
        Option(
            help="Published model that the run begins from: owner/name or owner/name@COMMIT on the "
            "Hugging Face hub, or a folder.",
            metavar="MODEL",
        ),
    ] = None,
    lora: Annotated[
        int | None,
        Option(
            help="With --base: train adapters of this rank instead of all parameters.",
            min=1,
            max=1024,
            metavar="RANK",
        ),
    ] = None,
    custom: Annotated[
        str | None,
        Option(
            help="For a program with a model of its own: a Python file and the function in it that "
            "builds the model. It is run here.",
            metavar="FILE.py:FUNCTION",
        ),
    ] = None,
    every: Annotated[
        bool,
        Option("--all", help="Write every setting, and those of other recipes as comments."),
    ] = False,
) -> None:
    """Write a run file: the settings that most runs change, with their meaning, or with --all all.

    Without --size and --base the model is small, trained with Muon, and the run is named after the
    file. With them the link and the memory that the run needs are in a comment at the top, and on
    stderr. --base writes the commit and the hashes of the model. Comments name the defaults of
    settings that have another value.

    Example: shoal run new my.run.toml --size 124m --data fineweb-edu
    """
    from peer.run_file.writing import to_toml

    if file is not None and file.exists():
        raise typer.BadParameter(f"{file} exists; name a new file")
    if custom is not None:
        if any(given is not None for given in (size, data, base, lora)):
            raise typer.BadParameter("--custom: the program brings its own model and data")
        _put(_described(custom, _named_after(file)), file)
        return
    if base is not None and size is not None:
        raise typer.BadParameter("--base and --size: a published model has its own size")
    if base is None and lora is not None:
        raise typer.BadParameter("--lora needs --base")
    if base is None and size is None:
        if data is not None:
            raise typer.BadParameter("--data needs --size or --base")
        _put(to_toml(starting(_named_after(file)), short=not every, every_recipe=every), file)
        return
    with usage_errors():
        if base is not None:
            run = extra("bases.commands").run_from_base(base, rank=lora, data=data)
        else:
            assert size is not None
            run = preset(size, STDLIB if data is None else data)
        run = _with_commit(run)
    _put(_text_of(run, every=every), file)


def _text_of(run: RunFile, *, every: bool) -> str:
    """The text of a run file. What a peer of the run needs is printed on stderr."""
    from peer.run_file.reading import parse
    from peer.run_file.writing import to_toml

    parse(to_toml(run), source="--data")  # the name of a dataset may be none
    from peer.trainer.needs import needs_of  # with torch: mistakes are told without it

    notes = needs_of(run).lines
    print("\n".join(notes), file=sys.stderr)
    return to_toml(run, notes=notes, short=not every, every_recipe=every)


def _named_after(file: Path | None) -> str:
    return "my-run" if file is None else name_from(file.name.split(".")[0])


def _described(where: str, name: str) -> str:
    """The run file of a model that a function in a Python file builds."""
    import runpy

    path, _, function = where.rpartition(":")
    if not Path(path).is_file() or not function.isidentifier():
        raise typer.BadParameter(f"--custom is {where!r}; it is FILE.py:FUNCTION, and FILE exists")
    import torch

    from peer.trainer.own_loops import describe

    sys.path.insert(0, str(Path(path).absolute().parent))  # as for a program that is run
    build = runpy.run_path(path).get(function)
    if not callable(build):
        raise typer.BadParameter(f"--custom: {path} has no function {function!r}")
    model = build()
    if not isinstance(model, torch.nn.Module):
        raise typer.BadParameter(f"--custom: {function} returns {type(model).__name__}, no Module")
    return describe(model, name=name)


def _put(text: str, file: Path | None) -> None:
    """Print a run file, or write it to a new file and say what comes next."""
    if file is None:
        print(text, end="")
        return
    file.touch(exist_ok=False)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        file.unlink()  # a part of it would be in the way of the next try
        raise NotWritten(str(file), error.strerror or str(error)) from error
    name = shlex.quote(str(file))
    print(f"wrote {file}; next: `shoal run check {name}`, then `shoal start {name}`")


def _with_commit(run: RunFile) -> RunFile:
    """The run with the newest commit of its dataset, if it is on the hub and has none."""
    from peer.data.hub import commit_of

    data = run.data
    if not isinstance(data, HfData) or data.revision is not None:
        return run
    if not re.fullmatch(OWNED_HUB_NAME, data.dataset):
        return run  # it is refused for its name
    return msgspec.structs.replace(
        run, data=msgspec.structs.replace(data, revision=commit_of(data.dataset))
    )


@runs.command("check")
def run_check(
    file: Annotated[Path, Argument(help="Run file to check.", metavar="FILE")],
    data: Annotated[
        Path | None,
        Option(
            exists=True,
            file_okay=False,
            help="Also read the data once, with this folder as data folder.",
            metavar="FOLDER",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Check a run file: print every fault with its line and rule, or the run's id and size.

    Example: shoal run check my.run.toml
    """
    from peer.data.sources import read_once

    try:
        found_run = run_to_start(str(file))
        check_new(found_run, str(file))
    except (RunFileError, RunFileUnreadable) as error:
        faults_found = (
            error.faults if isinstance(error, RunFileError) else [Fault("", error.reason)]
        )
        if as_json:
            faults = [{"line": f.line, "setting": f.setting, "fault": str(f)} for f in faults_found]
            print(json_text({"ok": False, "faults": faults}))
        else:
            for fault in faults_found:
                complain(f"{file}: {fault}")
        return error.exit_code
    run = found_run.run
    if not as_json:
        for remark in remarks(run):
            complain(remark)
    record: dict[str, Any] = {"ok": True, "name": run.name, "run_id": run.run_id}
    lines: Sequence[str] = ()
    if not isinstance(run.model, CustomModel):
        from peer.trainer.needs import needs_of  # with torch: faults are told without it

        needs = needs_of(run)
        lines = needs.lines
        record["parameters"] = needs.parameters
        record["buffers"] = needs.buffers
        record["fragments"] = len(needs.layout.fragments)
        record["layout_hash"] = needs.layout.hash.hex()
        size = needs.parameters // run.outer.fragments
        if size < FRAGMENT_MIN and not as_json:
            complain(
                f"outer.fragments is {run.outer.fragments}: with about {size} parameters each, the "
                "messages of a round are larger than what it merges; fewer are better"
            )
    if data is not None:
        try:
            with report_if_slow("still reading the data"):
                record["data"] = (
                    "custom: a program reads it"
                    if isinstance(run.data, CustomData)
                    else read_once(run, cache_dir=data_cache(), data_dir=data)
                )
        except DataUnavailable as error:
            if not as_json:
                raise
            faults = [{"line": None, "setting": "data", "fault": str(error)}]
            print(json_text({"ok": False, "faults": faults}))
            return error.exit_code
    show(record, (*(f"{key}: {value}" for key, value in record.items()), *lines), as_json=as_json)
    return 0
