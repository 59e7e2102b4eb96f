"""Fetching a run's base before this machine is measured with it."""

from __future__ import annotations

from pathlib import Path

import typer

from peer.cli.application import complain
from peer.cli.showing import print_summary, progress
from peer.extras.bases.base_models import base_folder, missing_bytes, missing_files
from peer.model.recipes import needs_base
from peer.quantities import bytes_text, plural
from peer.run_file.places import base_of
from peer.run_file.sections import RunFile
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
