"""Configuration of a presence: what the peer is in its run, and how it stays in touch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dht.identity import RunId
from dht.membership.table import MembershipSettings
from dht.protocol import RELEASE, SPOKEN, Range
from dht.records import RUN_FILE_MAX_BYTES, Role

DIRECTORY_TIMEOUT_S = 8.0
"""Time for one look-up in the directory, or one record stored in it."""

GOODBYE_TIMEOUT_S = 3.0
"""Time for telling all others that this peer leaves."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Description of this peer for the others."""

    run: RunId | None
    """The run it takes part in; ``None`` for a bootstrap peer, which serves every run."""

    role: Role = "learner"
    name: str = ""
    site: str = ""
    run_file: bytes | None = None
    """The run file, which is served to any peer that asks for it by run id."""

    credential: bytes = b""
    """Proof that the run admits this peer (``dht.membership.credentials``)."""

    release: str = RELEASE
    """Release of the software, for people."""

    observes: bool = False
    """Read the membership of the run without joining it: nothing is published. An observer asks
    for dial-backs only when told to (``Presence.check_reachability``), because a dial-back can
    cost it the connection through which it observes."""

    def __post_init__(self) -> None:
        if self.observes and self.run is None:
            raise ValueError("observes is true without a run; it needs one to look at")
        size = 0 if self.run_file is None else len(self.run_file)
        if size > RUN_FILE_MAX_BYTES:
            raise ValueError(f"run file has {size} bytes; at most {RUN_FILE_MAX_BYTES}")

    @property
    def is_member(self) -> bool:
        """Say whether this peer publishes a record of itself in the run."""
        return self.run is not None and not self.observes


@dataclass(frozen=True, slots=True, kw_only=True)
class PresenceSettings:
    """Settings by which a peer stays in touch. The defaults are for the open internet."""

    membership: MembershipSettings = field(default_factory=MembershipSettings)
    protocol_versions: Range = SPOKEN
    call_timeout_s: float = 5.0
    cache_path: Path | None = None
    """File that keeps the peers met for the next session; ``None``: they are not kept."""

    directives_path: Path | None = None
    """File that keeps the directives of the run's owner; ``None``: they are not kept."""

    cache_every_s: float = 60.0
    calls_per_minute: int = 120
    """Limit on the calls of one other peer to this one; a tenth of it for dial-backs."""
