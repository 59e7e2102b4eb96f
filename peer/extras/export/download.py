"""Downloading a run's parameters without taking part, for ``shoal export LINK``.

The fragments are fetched one after the other from all peers that have them, keepers or learners,
and each is kept in a folder until all are there. A download that was interrupted goes on with what
is missing, as long as the run stands where it stood.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from averaging import messages as said
from averaging.history.chain import Chain
from averaging.history.manifest import Manifest
from averaging.history.merged_map import Mark, MergedMap
from averaging.history.state import FragmentState, Pieces
from averaging.live.states.fetcher import Fetcher, FetchFailed, FetchProgress
from averaging.live.streams.threads import Threads
from averaging.messages import Signatures
from averaging.numbers.layout import Fragment, Layout
from dht.identity import PeerId
from peer.errors import CheckpointDamaged
from peer.joining.link import Link
from peer.joining.visit import LOOK_S, NotDownloaded, RunStatus, Visitor, visit
from peer.quantities import bytes_text, peers_text
from peer.rules.others import heaviest
from peer.run_file.sections import RunFile
from peer.status import PeerStatus
from peer.storage.checkpoint import CheckpointFolder
from peer.storage.credentials import owners_invite
from peer.storage.outer_state import OuterState
from peer.storage.tensor_file import Tensor

FETCH_FRAGMENT_S = 3600.0
_FILES = 2
"""The parts that have arrived, and the file that is written."""


async def download(
    link: Link,
    run: RunFile,
    layout: Layout | None,
    parts: Path,
    *,
    on_progress: Callable[[float], None] = lambda share: None,
    on_seen: Callable[[RunStatus], None] = lambda seen: None,
) -> OuterState:
    """The parameters of all fragments, as the peers of one founding have them now.

    ``layout``: that of the run's model; ``None`` if only programs have the model, and peers tell.
    ``parts``: folder for what has arrived. ``on_seen`` gets what the peers say of the run.
    Raises ``NotAdmitted``, ``NotDownloaded``, ``NobodyMet`` or ``DhtError``.
    """
    async with visit(link, own_invite=owners_invite) as visitor:
        seen = await visitor.look(timeout_s=LOOK_S)
        on_seen(seen)
        holders = [each for each in seen.peers if each.versions]
        if layout is None and holders:
            layout = await visitor.told_layout(holders, run)
        sources = sources_in(seen, layout, run.name)
        assert layout is not None
        _check_room(run, layout, parts)
        states = await _fetch(visitor, layout, sources, parts, on_progress, run)
    return OuterState(run, layout, states, None, parts)


def sources_in(seen: RunStatus, layout: Layout | None, run_name: str) -> list[PeerStatus]:
    """The peers of one founding that have the state of this layout.

    Raises ``NotAdmitted`` or ``NotDownloaded``.
    """
    seen.check_admitted()
    holders = [each for each in seen.peers if each.versions]
    fitting = [each for each in holders if layout and each.layout == layout.hash.hex()]
    if not fitting:
        reason = f"{peers_text(len(seen.peers))} answered, and none of them has its state yet"
        if layout is not None and holders:
            reason = f"the peers have another layout ({holders[0].layout}) than {layout.hash.hex()}"
        elif not seen.peers and seen.silent:
            reason = seen.reasons
        raise NotDownloaded(run_name, reason)
    founding = heaviest(fitting)
    return [each for each in fitting if each.founding == founding] or fitting


def _check_room(run: RunFile, layout: Layout, parts: Path) -> None:
    """Refuse a model that does not fit the disk, before anything of it arrives."""
    needed, free = _FILES * 4 * layout.size, shutil.disk_usage(parts.parent).free
    if needed > free:
        raise NotDownloaded(
            run.name,
            f"{parts.parent} has {bytes_text(free)} free, and it needs {bytes_text(needed)}: free "
            "some space or choose another place",
        )


async def _fetch(
    visitor: Visitor,
    layout: Layout,
    sources: Sequence[PeerStatus],
    parts: Path,
    on_progress: Callable[[float], None],
    run: RunFile,
) -> tuple[FragmentState, ...]:
    threads = Threads(1)
    fetcher = visitor.fetcher(threads)
    try:
        return await fetch_fragments(
            fetcher, layout, sources, parts, on_progress=on_progress, run=run
        )
    finally:
        threads.close()


async def fetch_fragments(
    fetcher: Fetcher,
    layout: Layout,
    sources: Sequence[PeerStatus],
    parts: Path,
    *,
    on_progress: Callable[[float], None] = lambda share: None,
    run: RunFile,
) -> tuple[FragmentState, ...]:
    """All fragments, one after the other, each as its sources have it when it is its turn.

    ``on_progress`` gets the share of the model that has arrived. Raises ``NotDownloaded``; the
    fragments in ``parts`` stay for the next call.
    """
    whole, done = layout.size, 0

    def progress(now: FetchProgress) -> None:
        share = now.verified_pieces / max(1, now.pieces)
        on_progress((done + share * layout.fragments[now.fragment].size) / whole)

    fetcher.on_progress = progress
    states = []
    for fragment in layout.fragments:
        index, folder = fragment.index, CheckpointFolder(parts / str(fragment.index), keep=1)
        state = _kept(folder, index, fragment.size, sources)
        if state is None:
            newest = max(each.versions[index] for each in sources)
            # Those that are behind are asked as well: they may have caught up.
            ranked = sorted(sources, key=lambda each: each.versions[index] != newest)
            state = await _fetch_one(fetcher, fragment, [PeerId(each.peer) for each in ranked], run)
            _keep(folder, state)
        states.append(state)
        done += fragment.size
        on_progress(done / whole)
    return tuple(states)


PAUSES_S = 0.0, 0.2, 0.4, 0.7, 1.1, 1.6, 2.2, 3.0
"""Pauses before the attempts to fetch a fragment; pieces that have arrived are kept. Each attempt
takes what the sources have by then. Some fail because one source has merged and the other is about
to. The pauses differ, so that they do not meet the same moment of every round."""


async def _fetch_one(
    fetcher: Fetcher, fragment: Fragment, sources: Sequence[PeerId], run: RunFile
) -> FragmentState:
    pieces, trust = Pieces.of(fragment, run.outer.momentum), _Agreement(len(sources))
    reason = ""
    for pause_s in PAUSES_S:
        await asyncio.sleep(pause_s)
        try:
            return await fetcher.state(
                fragment.index, pieces, sources, trust=trust, timeout_s=FETCH_FRAGMENT_S
            )
        except FetchFailed as error:
            reason = str(error)
    raise NotDownloaded(run.name, reason)


@dataclass(frozen=True)
class _Agreement:
    """Trust of a reader that has seen nobody work: two sources must hold the same bits.

    Where one peer is all there is, its word is all there is.
    """

    sources: int

    def holders_min(self, manifest: Manifest) -> int:
        return min(2, self.sources)

    def counts(self, peer: PeerId) -> bool:
        return True

    def hear(self, manifest: Manifest, signatures: Signatures) -> None: ...

    def problem(self, manifest: Manifest) -> str | None:
        return None

    def signers(self, manifest: Manifest) -> Sequence[PeerId]:
        return ()


def _keep(folder: CheckpointFolder, state: FragmentState) -> None:
    marks = {p: [m.incarnation, m.step, m.tokens] for p, m in sorted(state.merged.items())}
    meta = {"version": state.version, "lineage": state.lineage.hex(), "merged": marks}
    folder.save({"theta": Tensor.of(state.theta)}, {"kind": "part", **meta})


def _kept(
    folder: CheckpointFolder, index: int, size: int, sources: Sequence[PeerStatus]
) -> FragmentState | None:
    """The parameters that an earlier attempt has fetched, if no peer has newer ones."""
    checkpoint = folder.load_latest()
    if checkpoint is None:
        return None
    try:
        with checkpoint.tensors() as tensors:
            meta, theta = checkpoint.meta, tensors.get_tensor("theta")
        version, lineage = int(meta["version"]), bytes.fromhex(meta["lineage"])
        merged = MergedMap({PeerId(p): Mark(*mark) for p, mark in meta["merged"].items()})
        chain = Chain([said.Link(version, lineage, merged.tokens)])
    except (CheckpointDamaged, KeyError, ValueError, TypeError):
        return None
    if theta.shape != (size,) or any(each.versions[index] != version for each in sources):
        return None
    # Parameters alone: nobody averages with them, so their momentum is not kept.
    momentum = np.zeros(0, np.float32)
    return FragmentState(index, version, lineage, chain, theta, momentum, merged)
