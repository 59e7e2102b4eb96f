"""The model behind RUN_DIR or LINK, ready for use."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from peer.cli.application import report_if_slow
from peer.cli.finding import link_in
from peer.extras.export.found_models import check_there, find_model, is_remote, parts_of
from peer.run_file.places import base_of
from peer.storage.home import data_home

if TYPE_CHECKING:
    from peer.extras.use.ready import ReadyModel

LOADING = "still loading the model"


def find_ready(where: str, *, data_dir: Path | None, quiet: bool) -> ReadyModel:
    """The model of a run, or that in an exported folder, in memory and with its tokenizer."""
    link_in(where)
    check_there(where)
    from peer.extras.use.ready import check_buildable, is_export, ready_in, ready_of_run

    if Path(where).suffix == ".safetensors" and Path(where).is_file():
        raise typer.BadParameter(
            f"{where} is one file of parameters; pass the run's folder or link, or a folder that "
            "`shoal export --to hf` has written"
        )
    if not is_remote(where) and is_export(Path(where)):
        with report_if_slow(LOADING):
            return ready_in(Path(where), data_dir=data_dir)
    if not is_remote(where) and is_adapter_folder(Path(where)):
        return _ready_adapter(Path(where), data_dir=data_dir, quiet=quiet)
    parts = data_home(os.environ) / "model"
    parts.parent.mkdir(parents=True, exist_ok=True)
    model = find_model(where, parts, data_dir=data_dir, quiet=quiet, check=check_buildable)
    model.check_recipe()
    base = model.base(quiet=quiet)
    with report_if_slow(LOADING):
        ready = ready_of_run(model.outer, model.tokenizer(), data_dir=model.data_dir, base=base)
    shutil.rmtree(parts_of(model.outer.run, parts), ignore_errors=True)
    return ready


def is_adapter_folder(folder: Path) -> bool:
    """Return whether peft has written the adapters in this folder."""
    return (folder / "adapter_config.json").is_file()


def _ready_adapter(folder: Path, *, data_dir: Path | None, quiet: bool) -> ReadyModel:
    from peer.extras.bases.fetching import fetched_base
    from peer.extras.bases.lora import check_peft
    from peer.extras.use.adapted import adapted_in
    from peer.extras.use.ready import ExportUnusable, run_of

    check_peft()
    run = run_of(folder)
    if run is None or (named := base_of(run.model)) is None:
        why = "it does not say of which run its adapters are; load them with the package peft"
        raise ExportUnusable(str(folder), why)
    # A base in a folder is in the run's data folder; often the adapters were written beside it.
    beside = folder.absolute().parent
    places = data_dir or (beside if (beside / named.source).is_dir() else folder)
    base = fetched_base(run, founds=False, data_dir=places, quiet=quiet)
    with report_if_slow(LOADING):
        return adapted_in(folder, run, base, data_dir=data_dir)
