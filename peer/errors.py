"""Errors of this package: expected failures while taking part in a run.

Callers read the fields of an error, never its text. ``exit_code`` is the ``ExitCode`` of a command
that ends with the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar

from dht.errors import ExpectedError


class ExitCode(IntEnum):
    """The exit codes of all commands. docs/reference/output.md shows them to those who start."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    """Bad usage, run file or machine: only a person can mend it."""
    UNREACHABLE = 3
    REFUSED = 4
    """The run does not want this peer or this machine, or is over."""
    INTERRUPTED = 130
    """Ctrl-C or SIGTERM has ended a command, as in shells."""
    TERMINATED = 143
    """SIGTERM has ended a program of the user's own that is in a run, as in shells."""

    @property
    def is_final(self) -> bool:
        """True if the same command would end in the same way: a launcher must not repeat it."""
        return self in (ExitCode.DONE, ExitCode.USAGE, ExitCode.REFUSED)


def explained(text: str, section: str) -> str:
    """A message, and the command that prints the section of the documents about it."""
    return f"{text} (shoal docs {section})"


def one_line(error: BaseException) -> str:
    """The text of an error of another library, for a sentence of ours."""
    return " ".join(str(error).split())[:300] or type(error).__name__


class PeerError(ExpectedError):
    """Base class: a file, a run or a machine is not as it should be."""

    exit_code = 1


class Failure(PeerError):
    """An error that no caller tells apart: its text, and where the documents explain it."""

    reason: str
    section: str
    """The name of a section for ``shoal docs``."""
    message = "{reason}"


class Unusable(Failure):
    """Something that was given, or asked for, cannot be used here; the text says what to do."""

    exit_code = 2


class Declined(Failure):
    """The run as it stands does not allow what was asked for; the text says why."""

    exit_code = 4


class PathError(PeerError):
    """A file or a folder cannot be used."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Fault:
    """An invalid setting of a run file."""

    setting: str
    """Full name, such as ``outer.momentum``; empty if the whole file is at fault."""
    problem: str
    """The problem, with the value and the rule that it breaks."""
    line: int | None = None
    nearest: str | None = None
    """The valid name or value that was probably meant."""

    def __str__(self) -> str:
        where = "" if self.line is None else f"line {self.line}: "
        hint = "" if self.nearest is None else f"; did you mean {self.nearest!r}?"
        return f"{where}{self.problem}{hint}"


class RunFileError(PeerError):
    """A run file breaks a rule. ``faults`` has every fault that was found, in file order."""

    exit_code = 2
    source: str
    faults: Sequence[Fault]

    def __str__(self) -> str:
        more = len(self.faults) - 1
        rest = f" (and {more} more: `shoal run check` lists them all)" if more else ""
        return f"{self.source}: {self.faults[0]}{rest}"


class LinkError(PeerError):
    """A text is not a valid ``shoal://`` link."""

    exit_code = 2
    link: str
    reason: str

    def __str__(self) -> str:
        shown = self.link if len(self.link) <= 120 else self.link[:117] + "..."
        return (
            f"{shown!r} is not a run link: {self.reason}; "
            "a link looks like shoal://RUN_ID?seed=/ip4/203.0.113.7/tcp/7700/p2p/12D3Koo..."
        )


class RunNotFound(PeerError):
    """The requested run file is not in a file, at an address, or at a peer."""

    exit_code = 3
    where: str
    reason: str
    message = "no run file at {where}: {reason}"


class RunFileUnreadable(RunNotFound):
    """There is no run file at a path of this machine: nothing was tried to reach."""

    exit_code = 2


class NobodyMet(RunNotFound):
    """No peer of a run answered at the addresses of its link."""

    message = "{where}: {reason}"


class SeedsElsewhere(NobodyMet):
    """All seeds of a link take part in another run."""


class RunRefused(PeerError):
    """This peer does not match the run."""

    exit_code = 4
    what: str
    ours: str
    theirs: str
    message = "{what} does not match: here it is {ours}, the run has {theirs}"


class ModelMismatch(RunRefused):
    """This peer's model is not that of the run. ``differences`` are the first ones, by name.

    ``ours`` and ``theirs`` are the hashes of the layouts, or of the frozen parameters.
    """

    SHOWN: ClassVar[int] = 10

    def __init__(
        self,
        run: str,
        ours: str,
        theirs: str,
        differences: Sequence[Sequence[str]] = (),
        count: int = 0,
        frozen: bool = False,
    ) -> None:
        """``differences``: name, shape here, shape there. ``count``: the number of all of them."""
        shown = tuple((name, here, there) for name, here, there in differences[: self.SHOWN])
        count = max(count, len(differences))
        super().__init__("the layout of the model", ours, theirs)
        self.args = (run, ours, theirs, shown, count, frozen)  # so that it survives pickling
        self.run = run
        self.differences: tuple[tuple[str, str, str], ...] = shown
        self.count = count
        self.frozen = frozen

    def __str__(self) -> str:
        if not self.differences:
            return super().__str__()
        text = "; ".join(f"{name}: {a} here, {b} there" for name, a, b in self.differences)
        if self.count > len(self.differences):
            text += f"; and {self.count - len(self.differences)} more"
        if self.frozen:
            return (
                f"frozen parameters are not those of run {self.run!r}: {text}; load the same "
                "weights as the other peers, or pass allow_frozen_differences=True"
            )
        return (
            f"the model is not that of run {self.run!r}: {text}; build the model as the other "
            "peers do"
        )


class NotAdmitted(PeerError):
    """The run does not admit this peer."""

    exit_code = 4
    run: str
    reason: str
    message = "run {run!r} does not admit this peer: {reason}"


class RunOver(PeerError):
    """The run has ended: there is nothing left to train, and its model can be fetched."""

    exit_code = 4
    run: str
    date: str
    tokens: int | None
    link: str = "LINK"

    def __str__(self) -> str:
        reached = "" if self.tokens is None else f" at {self.tokens:,} tokens"
        return (
            f"this run has ended on {self.date}{reached}; "
            f"`shoal export {self.link} OUT.safetensors` fetches its model"
        )


class FolderOfAnotherRun(RunRefused):
    """The given folder holds the state of another run or of another model.

    ``ours`` is the value of the run, ``theirs`` the value in the folder.
    """

    message = "{what} is {theirs}, but this is {ours}; pass another folder with --directory"


class NobodyToAsk(PeerError):
    """No address is known through which this run can be joined."""

    exit_code = 3
    run: str
    where: str
    known: str
    """This machine's knowledge of the run, in words."""

    def __str__(self) -> str:
        is_file = "://" not in self.where
        start = f"; to found the run: `shoal start {self.where}`" if is_file else ""
        return (
            f"{self.where} has no seed address, and this peer's folder knows nobody of the run "
            f"{self.run!r} ({self.known}), so there is nobody to ask; use the link that one of its "
            f"peers shows, or pass --seed MULTIADDR{start}"
        )


class FolderInUse(PeerError):
    """Another process uses the folder of this peer."""

    exit_code = 1  # the other one may end: a launcher that starts this one again is right
    path: str
    message = (
        "the folder {path} is in use by another peer on this machine; "
        "stop that peer, or pass another folder (--directory; in a program directory=)"
    )


class LeftEarly(PeerError):
    """This peer was asked to leave before it was in the run."""

    run: str
    circumstance: str
    exit_code: int = ExitCode.INTERRUPTED
    message = "left the run {run!r} before it trained in it; {circumstance}"


class RunUnreachable(PeerError):
    """This peer could not get into the run."""

    run: str
    reason: str
    exit_code: int = 3
    message = "could not join the run {run!r}: {reason}"


class RunLost(RunUnreachable):
    """This peer was in the run and cannot continue in it."""

    message = "cannot go on in the run {run!r}: {reason}"


class LoopWarning(UserWarning):
    """A training loop seems to be wrong. Each kind is told once per run.

    Python raises it where ``warnings.simplefilter("error", peer.LoopWarning)`` asks for that.
    """


class MachineTooSmall(PeerError):
    """This machine lacks memory or disk space for the run's model."""

    exit_code = 4
    run: str
    problem: str
    message = "this machine cannot take part in {run!r}: {problem}"


class ExtraMissing(PeerError):
    """The run needs a package that is not installed."""

    exit_code = 2
    what: str
    package: str
    extra: str
    message = (
        "{what} needs the package {package!r}, which is not installed; "
        "run: pip install 'shoal[{extra}]'"
    )


class PartMissing(PeerError):
    """A part of ``peer.extras`` is left out of this installation."""

    exit_code = 2
    part: str
    message = "this needs peer.extras.{part}, which is not part of this installation of Shoal"


class DataUnavailable(PeerError):
    """The training data is not on this machine, or there is too little of it."""

    exit_code = 2
    recipe: str
    reason: str
    message = "data recipe {recipe!r} cannot be read here: {reason}"


class DiskFull(PeerError):
    """There is too little disk space for a checkpoint. The older ones are kept."""

    path: str
    needed_bytes: int
    free_bytes: int

    LEFT: ClassVar[str] = (
        "are free; the older checkpoints are kept, training goes on; free some space or choose "
        "another --directory"
    )

    def __str__(self) -> str:
        return (
            f"no room for a checkpoint in {self.path}: it takes {self.needed_bytes / 1e6:.1f} MB, "
            f"{self.free_bytes / 1e6:.1f} MB {self.LEFT}"
        )


class QuotaFull(DiskFull):
    """A checkpoint would exceed the disk limit, of which ``free_bytes`` are left."""

    LEFT = (
        "are left of the limit; the older checkpoint is kept, training goes on; raise the limit "
        "with `shoal limits --disk`"
    )


class NotWritten(PathError):
    """An output file cannot be written."""

    exit_code = 2
    message = "cannot write {path}: {reason}; choose another place"


class CheckpointDamaged(PathError):
    """A checkpoint is incomplete or was changed after it was written."""

    message = "checkpoint {path} is damaged: {reason}"


REFUSALS: tuple[type[PeerError], ...] = (
    ModelMismatch,
    RunRefused,
    FolderOfAnotherRun,
    NotAdmitted,
    RunOver,
    Unusable,
    Declined,
)
"""Errors with which an agent ends, and which its trainer raises again."""


def remade(kind: str, arguments: Sequence[Any]) -> PeerError | None:
    """The error of an agent in its trainer's process; ``None`` if it is none of ``REFUSALS``."""
    made = {each.__name__: each for each in REFUSALS}.get(kind)
    return None if made is None else made(*arguments)
