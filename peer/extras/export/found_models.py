"""The parameters behind RUN_DIR or LINK, for the commands that use a run's model."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dht.identity import RunId
from peer.cli.application import complain, progress, start_logging
from peer.cli.finding import find_known_run
from peer.errors import NobodyMet
from peer.installed import extra
from peer.run_file.sections import CustomModel, RunFile
from peer.storage.address import with_own_peers
from peer.storage.home import OUTER, data_cache, default_directory, keeper_directory

if TYPE_CHECKING:
    from peer.extras.export.card import RunFacts
    from peer.extras.export.tokenizer import TokenizerFiles
    from peer.joining.visit import RunStatus
    from peer.storage.outer_state import OuterState


@dataclass(frozen=True, slots=True)
class FoundModel:
    """The parameters of a run, what is known of it, and the folder of its data."""

    outer: OuterState
    facts: RunFacts
    data_dir: Path

    def tokenizer(self) -> TokenizerFiles | None:
        """The tokenizer of the run's data. Raises ``DataUnavailable`` or ``ExtraMissing``."""
        from peer.extras.export.tokenizer import tokenizer_of

        return tokenizer_of(self.outer.run, cache_dir=data_cache(), data_dir=self.data_dir)

    def check_recipe(self) -> None:
        """Raise ``Declined`` if a program has trained another model than the file describes."""
        from peer.trainer.parameters import check_state

        check_state(self.outer.run, self.outer.layout)

    def base(self, *, quiet: bool) -> Path | None:
        """The weights below the run's adapters; ``None`` if it trains a whole model.

        Raises ``BaseUnavailable`` or ``ExtraMissing``.
        """
        folder: Path | None = extra("bases.commands").fetched_base(
            self.outer.run, founds=False, data_dir=self.data_dir, quiet=quiet
        )
        return folder


def is_remote(where: str) -> bool:
    """Return whether this is a link, an address or a run file, and no folder."""
    return "://" in where or Path(where).is_file()


def check_there(where: str) -> None:
    """Refuse a folder that does not exist, before the same libraries. Raises ``NoSuchFolder``."""
    from peer.storage.outer_state import NoSuchFolder

    if not is_remote(where) and not Path(where).is_dir():
        raise NoSuchFolder(where)


def find_model(
    where: str,
    parts: Path,
    *,
    data_dir: Path | None,
    quiet: bool,
    check: Callable[[RunFile], None] | None = None,
) -> FoundModel:
    """Read the newest checkpoint in a folder, or download the parameters of a run.

    ``parts``: beginning of the name of the folder for what has arrived of a download; the caller
    removes it. ``check`` is called with the run file before anything is downloaded.
    """
    from peer.extras.export.card import facts_in_folder
    from peer.storage.checkpoint import CheckpointFolder
    from peer.storage.outer_state import NothingToExport, load_outer

    if is_remote(where):
        return _download(where, parts, data_dir=data_dir, quiet=quiet, check=check)
    check_there(where)
    folder = Path(where)
    outer = load_outer(CheckpointFolder(folder / OUTER, reads_only=True))
    if outer is None:
        raise NothingToExport(str(folder / OUTER))
    if check is not None:
        check(outer.run)
    return FoundModel(outer, facts_in_folder(folder, outer), data_dir or folder / "data")


def _download(
    where: str,
    parts: Path,
    *,
    data_dir: Path | None,
    quiet: bool,
    check: Callable[[RunFile], None] | None,
) -> FoundModel:
    from peer.extras.export.card import RunFacts, facts_in_folder, facts_of_peers
    from peer.extras.export.download import download
    from peer.joining.link import Link
    from peer.signals import run_unless_stopped
    from peer.trainer.parameters import recipe_layout

    start_logging(logging.ERROR)
    found_run = find_known_run(where)
    if check is not None:
        check(found_run.run)
    # Peers tell the layout of a model that a program brings.
    is_custom = isinstance(found_run.run.model, CustomModel)
    layout = None if is_custom else recipe_layout(found_run.run)
    run_id = found_run.run.run_id
    link = Link(run_id, with_own_peers(run_id, found_run.seeds), found_run.invite)
    seen: list[RunStatus] = []
    with progress(f"downloading {found_run.run.name}", quiet=quiet) as on_progress:
        work = download(
            link,
            found_run.run,
            layout,
            parts_of(found_run.run, parts),
            on_progress=on_progress,
            on_seen=seen.append,
        )
        try:
            outer = run_unless_stopped(work)
        except NobodyMet as error:
            if (own := _own_copy(run_id)) is None:
                raise
            complain(f"{error.reason}; so this is the copy that your peer has in {own[0]}")
            return FoundModel(own[1], facts_in_folder(*own), data_dir or own[0] / "data")
    facts = facts_of_peers(seen[0]) if seen else RunFacts()
    return FoundModel(outer, facts, data_dir or found_run.folder or Path())


def _own_copy(run_id: RunId) -> tuple[Path, OuterState] | None:
    """The folder of a peer of this user that has a state of the run, and the newest one there."""
    from peer.storage.checkpoint import CheckpointFolder
    from peer.storage.outer_state import load_outer

    for folder in (default_directory(run_id), keeper_directory(run_id)):
        outer = load_outer(CheckpointFolder(folder / OUTER, reads_only=True), run_id=run_id)
        if outer is not None:
            return folder, outer
    return None


def parts_of(run: RunFile, parts: Path) -> Path:
    """The folder for what has arrived of a download of this run."""
    return parts.with_name(f".{parts.name}.{run.run_id[:16]}.parts")
