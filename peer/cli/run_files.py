"""``shoal run new``, ``run check`` and ``export``: write and check run files, export weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument

from peer.cli import owning
from peer.cli.application import complain
from peer.cli.options import Json
from peer.cli.taking_part import no_peers

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
def run_new() -> None:
    """Print a run file with every setting, its default and its meaning.

    Example: shoal run new > my.run.toml
    """
    from peer.run_file.writing import template

    print(template(), end="")


@runs.command("check")
def run_check(
    file: Annotated[Path, Argument(help="Run file to check.", metavar="FILE")],
    as_json: Json = False,
) -> int:
    """Check a run file: print every fault with its line and rule, or the run's id and size.

    Example: shoal run check my.run.toml
    """
    from peer.errors import RunFileError
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
    print(json.dumps(found) if as_json else "\n".join(f"{k}: {v}" for k, v in found.items()))
    return 0
