"""``shoal export``: the model of a run, in the forms in which others use it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from peer.cli.application import USE_THE_MODEL, Json, report_if_slow, show
from peer.cli.finding import link_in
from peer.extras.export.found_models import check_there, find_model, is_remote, parts_of
from peer.installed import extra
from peer.run_file.sections import RunFile

commands = typer.Typer()


@commands.command(rich_help_panel=USE_THE_MODEL)
def export(
    where: Annotated[
        str,
        Argument(
            metavar="RUN_DIR|LINK", help="Folder of a peer in a run, or shoal:// link or run file."
        ),
    ],
    out: Annotated[Path, Argument(metavar="OUT", help="File or folder to write.")],
    to: Annotated[
        Literal["safetensors", "hf", "peft"],
        Option(
            help="'safetensors': one file of named parameters, for peer.load_weights and --weights;"
            " 'hf': a folder with configuration, tokenizer and model card, which transformers loads"
            " with from_pretrained, adapters added to their base; 'peft': a folder of adapters.",
        ),
    ] = "safetensors",
    dtype: Annotated[Literal["fp32", "bf16"], Option(help="Type of the parameters.")] = "fp32",
    data: Annotated[
        Path | None,
        Option(
            exists=True,
            file_okay=False,
            help="Folder with the run's local files: a tokenizer.json, and for --average its data; "
            "by default RUN_DIR/data, or the folder of the run file.",
            metavar="FOLDER",
        ),
    ] = None,
    average: Annotated[
        bool,
        Option(
            "--average",
            help="Also compute the mean of the last checkpoints in RUN_DIR, measure both on the "
            "held-out data, and write what is better.",
        ),
    ] = False,
    force: Annotated[
        bool, Option("--force", help="Replace OUT if it is a file; a folder is never replaced.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the newest parameters of a run, as a file of them or as a model that others load.

    With a link they are downloaded from the run's keepers or learners, without taking part, while
    the run goes on and after its end. A download that was interrupted goes on when repeated.

    Example: shoal export 'shoal://RUN_ID?seed=...' my-model --to hf --dtype bf16
    """
    link_in(where)
    check_there(where)
    if average and is_remote(where):
        raise typer.BadParameter(
            "--average needs the folder of a peer of this machine, which has earlier checkpoints: "
            "other peers serve the newest parameters alone"
        )
    from peer.extras.export.folder import (
        Export,
        check_exportable,
        check_free,
        check_place,
        write_folder,
    )
    from peer.extras.export.parameters import in_bf16
    from peer.storage.outer_state import write_model

    check: Callable[[RunFile], None] | None = None
    write: Callable[[Export, Path], None] | None = None
    if to == "hf":
        check, write = check_exportable, write_folder
    elif to == "peft":
        form = extra("use.adapters")
        check, write = form.check, form.write
    if to == "safetensors":
        check_place(out, replaces=force)
    else:
        check_free(out)
    model = find_model(where, out, data_dir=data, quiet=as_json, check=check)
    outer, facts, told = model.outer, model.facts, list[str]()
    compared = None
    if average:
        from peer.extras.export.averages import judged
        from peer.storage.checkpoint import CheckpointFolder
        from peer.storage.home import OUTER

        folder = CheckpointFolder(Path(where) / OUTER, reads_only=True)
        with report_if_slow("still measuring"):
            compared = judged(model, folder, quiet=as_json)
        outer, told = compared.better, [compared.text]
        facts = replace(facts, average_losses=(compared.average_loss, compared.newest_loss))
    if write is not None:
        model.check_recipe()
        whole = Export(
            outer=outer,
            facts=facts,
            tokenizer=model.tokenizer(),
            dtype=dtype,
            base=None if to == "peft" else model.base(quiet=as_json),
        )
        write(whole, out)
    elif dtype == "bf16":
        write_model(outer, out, cast=in_bf16)
    else:
        write_model(outer, out)
    shutil.rmtree(parts_of(outer.run, out), ignore_errors=True)
    record = {
        "file": str(out),
        "form": to,
        "dtype": dtype,
        "name": outer.run.name,
        "run_id": outer.run.run_id,
        "tokens": outer.global_tokens,
        "model": outer.model,
        "averaged": outer.averaged,
        "held_out": compared and {"newest": compared.newest_loss, "average": compared.average_loss},
    }
    text = (
        f"wrote {out}: run {outer.run.name}, {outer.global_tokens} tokens, model {outer.model} "
        "(peers with the same model name have the same bits)"
    )
    show(record, [*told, text], as_json=as_json)
