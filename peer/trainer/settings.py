"""Settings of this peer alone, for ``peer.join``. Everything else comes from the run file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from dht.membership.credentials import InviteKey
from peer.bridge.agent_process import COMMAND, LineSettings
from peer.bridge.settings import PeerSettings
from peer.rules.leaving import PATIENCE_S, check_patience
from peer.rules.rented import container_of, public_ports
from peer.run_file.declaring import nearest
from peer.storage.address import is_free

PACE_MAX_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings(PeerSettings):
    """Settings of this peer that are not part of the run."""

    directory: Path | None = None
    """Folder for key, checkpoints and logs of this peer; unset: a folder of the run in the user's
    data folder, and another one for each further peer that joins the run on this machine."""
    data_directory: Path | None = None
    """Folder where the file patterns of the ``text`` recipe begin; unset: the folder of a local run
    file, else ``data`` in ``directory``. A run file from the network therefore cannot name other
    files of this machine, such as the key in ``directory``."""
    invite: InviteKey | None = None
    """Invite to a run that admits invited peers, if it is not in the link; kept for later starts.
    """
    found: bool | None = None
    """True if this peer founds the run where nobody has its state; false: it waits for the others.
    Unset: it founds it, unless it was given a ``shoal://`` link or knows that the run has existed.
    """
    found_after_s: float | None = None
    """Time without meeting anybody after which this peer founds the run. Unset: 30 s, or at once if
    there is no seed."""
    quiet: bool = False
    """Do not print what entering waits for, the link for others and the address of the page, nor
    warn of checkpoints that are damaged."""
    pace_s: float = 0.0
    """Least time per step, so that several learners on one machine behave like several machines."""
    start_timeout_s: float = 900.0
    """Time limit for connecting, and for each further piece of the run's state. A slow download may
    take longer as long as it makes progress."""
    drain_s: float = 30.0
    """Time to finish exchanges in flight when the block ends; more where a slow line needs it."""
    patience_s: float = PATIENCE_S
    """Longest time that leaving may take, with saving: at the end of the block, after Ctrl-C and
    after SIGTERM. Less than what a launcher gives before it kills. Ctrl-C ends the wait."""
    save_every_s: float = 60.0
    """Time between two checkpoints of the optimizer; more where copying its state takes long."""
    started_at: float = field(default_factory=time.time)
    """Wall-clock time of this start. An older ``shoal leave`` was meant for an earlier trainer."""
    line: LineSettings = field(default_factory=LineSettings)
    final: Literal["run", "own"] = "run"
    """Parameters that the model holds after a run that is over: the run's final ones, or this
    peer's own, which have the steps since its last merge as well."""
    allow_frozen_differences: bool = False
    """Train together with peers whose frozen parameters are others than here. By default a peer
    whose frozen parameters differ from those of all others is refused."""
    agent_command: tuple[str, ...] = COMMAND
    """Command that starts an agent; another one is for tests."""

    def __post_init__(self) -> None:
        PeerSettings.__post_init__(self)
        if not 0.0 <= self.pace_s <= PACE_MAX_S:
            raise ValueError(
                f"the pace is {self.pace_s:g} s; it is the least time of a step, from 0 to "
                f"{PACE_MAX_S:g} seconds"
            )
        check_patience(self.patience_s)
        if self.final not in ("run", "own"):
            raise ValueError(f"final is {self.final!r}; it is 'run' or 'own'")


S = TypeVar("S", bound=PeerSettings)


def with_public_ports(own: S, *, tell: Callable[[str], object]) -> S:
    """The settings, in a rented container with the ports at which others can dial this peer."""
    container = container_of(os.environ)
    ports = container and public_ports(
        container, listen=own.listen, announce=own.announce, lane=own.lane, is_free=is_free
    )
    if not ports:
        return own
    tell(ports.text)
    return replace(own, listen=ports.listen, announce=ports.announce, lane=ports.lane)


def settings_from(settings: JoinSettings | None, own: Mapping[str, Any]) -> JoinSettings:
    """The settings, given whole or as keywords. Raises ``TypeError`` or ``ValueError``."""
    known = [field.name for field in fields(JoinSettings)]
    for name in own:
        if name not in known:
            near = nearest(name, known, cutoff=0.4)
            hint = "" if near is None else f"; did you mean {near!r}?"
            raise TypeError(f"{name!r} is no setting of peer.join{hint}")
    if settings is not None and own:
        raise ValueError("pass either settings or single ones of them, not both")
    if isinstance(own.get("directory"), str):
        own = {**own, "directory": Path(own["directory"])}
    return settings or JoinSettings(**own)
