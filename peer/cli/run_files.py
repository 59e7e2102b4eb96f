"""``shoal run new``, ``run check`` and ``export``: write and check run files, export weights."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from peer.cli import owning
from peer.cli.application import complain, report_if_slow
from peer.cli.options import Json
from peer.cli.showing import usage_errors
from peer.cli.taking_part import no_peers

if TYPE_CHECKING:
    from peer.run_file.sections import RunFile

commands = typer.Typer()


@commands.command()
def export(
    folder: Annotated[Path, Argument(metavar="RUN_DIR", help="Folder of a peer in a run.")],
    out: Annotated[Path, Argument(metavar="OUT.safetensors", help="File to write.")],
    as_json: Json = False,
) -> None:
    """Write the newest parameters of a run as one safetensors file, by name and in fp32.

    Example: shoal export ~/.local/share/shoal/runs/0123456789abcdef out.safetensors
    """
    from peer.storage.checkpoint import CheckpointFolder
    from peer.storage.outer_state import export as write

    outer = write(CheckpointFolder(folder / "outer"), out)
    if as_json:
        record = {
            "file": str(out),
            "name": outer.run.name,
            "run_id": outer.run.run_id,
            "tokens": outer.global_tokens,
            "model": outer.model,
        }
        print(json.dumps(record))
        return
    print(
        f"wrote {out}: run {outer.run.name}, {outer.global_tokens} tokens, model {outer.model} "
        "(peers with the same model name have the same bits)"
    )


runs = typer.Typer(help="Write, check and own run files.", no_args_is_help=True)
runs.add_typer(owning.runs)


@runs.command("new")
def run_new(
    size: Annotated[
        str | None,
        Option(help="Settings for a model of this size: 124m, 350m or 1b.", show_default=False),
    ] = None,
    data: Annotated[
        str | None,
        Option(
            help="What it is trained on: python_stdlib, fineweb-edu, or a dataset on the Hugging "
            "Face hub: owner/name, or owner/name@COMMIT. [default: python_stdlib]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print a run file with every setting, its value and its meaning.

    Without --size every setting has its default. With it the link and the memory that the run needs
    are in a comment at the top, and on stderr.
    Example: shoal run new --size 124m --data fineweb-edu > my.run.toml
    """
    from peer.run_file.writing import template, to_toml

    if size is None:
        if data is not None:
            raise typer.BadParameter("--data needs --size")
        print(template(), end="")
        return
    from peer.run_file.presets import STDLIB, preset
    from peer.run_file.reading import parse
    from peer.trainer.needs import needs_of

    with usage_errors():
        run = _with_commit(preset(size, STDLIB if data is None else data))
    parse(to_toml(run), source="--data")  # the name of a dataset may be none
    notes = needs_of(run).lines
    print("\n".join(notes), file=sys.stderr)
    print(to_toml(run, notes=notes), end="")


def _with_commit(run: RunFile) -> RunFile:
    """The run with the newest commit of its dataset, if it is on the hub and has none."""
    import re

    import msgspec

    from peer.data.hub import commit_of
    from peer.run_file.sections import OWNED_HUB_NAME, HfData

    data = run.data
    if not isinstance(data, HfData) or data.revision is not None:
        return run
    if not re.fullmatch(OWNED_HUB_NAME, data.dataset):
        return run  # it is refused for its name
    return msgspec.structs.replace(
        run, data=msgspec.structs.replace(data, revision=commit_of(data.dataset))
    )


def _read_data(run: RunFile, folder: Path) -> str:
    """Read one batch of the data; returns its description."""
    from dht.identity import PeerId
    from peer.data.sources import check_data, open_data
    from peer.run_file.sections import CustomData
    from peer.storage.home import data_home

    if isinstance(run.data, CustomData):
        return "custom: a program reads it"
    check_data(run, folder)
    cache = data_home(os.environ) / "data"
    opened = open_data(run, peer_id=PeerId("check"), cache_dir=cache, data_dir=folder)
    opened.train.next(run.inner.batch_size)
    return opened.description


@runs.command("check")
def run_check(
    file: Annotated[Path, Argument(help="Run file to check.", metavar="FILE")],
    data: Annotated[
        Path | None,
        Option(help="Also read the data once, with this folder as data folder.", metavar="FOLDER"),
    ] = None,
    as_json: Json = False,
) -> int:
    """Check a run file: print every fault with its line and rule, or the run's id and size.

    Example: shoal run check my.run.toml
    """
    from peer.errors import DataUnavailable, RunFileError
    from peer.joining.link import find_run
    from peer.run_file.sections import CustomModel
    from peer.trainer.parameters import recipe_layout

    try:
        run = find_run(str(file), ask_peers=no_peers).run
    except RunFileError as error:
        if as_json:
            faults = [{"line": f.line, "setting": f.setting, "fault": str(f)} for f in error.faults]
            print(json.dumps({"ok": False, "faults": faults}))
        else:
            for fault in error.faults:
                complain(f"{file}: {fault}")
        return error.exit_code
    found: dict[str, Any] = {"ok": True, "name": run.name, "run_id": run.run_id}
    if not isinstance(run.model, CustomModel):
        layout = recipe_layout(run)
        found["parameters"] = layout.size
        found["fragments"] = len(layout.fragments)
        found["layout_hash"] = layout.hash.hex()
    if data is not None:
        try:
            with report_if_slow("still reading the data"):
                found["data"] = _read_data(run, data)
        except DataUnavailable as error:
            if not as_json:
                raise
            faults = [{"line": None, "setting": "data", "fault": str(error)}]
            print(json.dumps({"ok": False, "faults": faults}))
            return error.exit_code
    print(json.dumps(found) if as_json else "\n".join(f"{k}: {v}" for k, v in found.items()))
    return 0
