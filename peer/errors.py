"""What can go wrong while taking part in a run, apart from bugs.

Callers read the fields of an error, never its text. ``exit_code`` is what a
command returns for it: 2 bad usage or run file, 3 could not reach the run, 4
refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

INTERRUPTED = 130
"""What a command returns that Ctrl-C or SIGTERM has ended, as shells do."""


class PeerError(Exception):
    """The world misbehaved: a file, a run or a machine was not as it should be."""

    exit_code: ClassVar[int] = 1


class PathError(PeerError):
    """Something is wrong with a file or a folder."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Fault:
    """One setting of a run file that cannot stay as it is."""

    setting: str
    """Its full name, such as ``outer.momentum``; empty when the file as a whole is at fault."""
    problem: str
    """What is wrong, with the value, and the rule it breaks."""
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

    def __init__(self, source: str, faults: Sequence[Fault]) -> None:
        super().__init__(source, tuple(faults))  # args == parameters, so it survives pickling
        self.source = source
        self.faults = tuple(faults)

    def __str__(self) -> str:
        more = len(self.faults) - 1
        rest = f" (and {more} more: `shoal run check` lists them all)" if more else ""
        return f"{self.source}: {self.faults[0]}{rest}"


class LinkError(PeerError):
    """A text that should be a ``shoal://`` link is not one."""

    exit_code = 2

    def __init__(self, link: str, reason: str) -> None:
        super().__init__(link, reason)
        self.link = link
        self.reason = reason

    def __str__(self) -> str:
        shown = self.link if len(self.link) <= 120 else self.link[:117] + "..."
        return (
            f"{shown!r} is not a run link: {self.reason}; "
            "a link looks like shoal://RUN_ID?seed=/ip4/203.0.113.7/tcp/7700/p2p/12D3Koo..."
        )


class RunNotFound(PeerError):
    """Neither a file, nor an address, nor a peer gave the run file asked for."""

    exit_code = 3

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason)
        self.where = where
        self.reason = reason

    def __str__(self) -> str:
        return f"no run file at {self.where}: {self.reason}"


class NobodyMet(RunNotFound):
    """No peer of a run was met at the addresses of its link."""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class RunRefused(PeerError):
    """This peer and the run do not fit together, or the run does not let it in."""

    exit_code = 4

    def __init__(self, what: str, ours: str, theirs: str) -> None:
        super().__init__(what, ours, theirs)
        self.what = what
        self.ours = ours
        self.theirs = theirs

    def __str__(self) -> str:
        return f"{self.what} does not match: here it is {self.ours}, the run has {self.theirs}"


class RunEnded(PeerError):
    """The run's date has passed, and nobody who has its state is there."""

    exit_code = 4

    def __init__(self, run: str, date: str) -> None:
        super().__init__(run, date)
        self.run = run
        self.date = date

    def __str__(self) -> str:
        return (
            f"run {self.run!r} ended at {self.date}, and nobody who has its state is there; "
            "ask one of its peers for the exported model, or set a later end.date for a new run"
        )


class FolderOfAnotherRun(RunRefused):
    """The folder that this peer was told to use holds another run's, or another model's, state.

    ``ours`` is what the run wants, ``theirs`` what lies in the folder.
    """

    def __str__(self) -> str:
        return (
            f"{self.what} is {self.theirs}, but this is {self.ours}; "
            "pass another folder with --directory"
        )


class FolderUnusable(PathError):
    """The folder for a peer's key, checkpoints and logs cannot be made or written to."""

    exit_code = 2

    def __str__(self) -> str:
        return (
            f"this peer's folder {self.path} cannot be used: {self.reason}; make it writable for "
            "this user and see that there is room, or pass another one with --directory"
        )


class NobodyToAsk(PeerError):
    """Somebody wants to join a run, and nothing says through whom."""

    exit_code = 3

    def __init__(self, run: str, where: str) -> None:
        super().__init__(run, where)
        self.run = run
        self.where = where

    def __str__(self) -> str:
        return (
            f"{self.where} names no seed through which to join the run {self.run!r}, and none of "
            "its peers is known here; take the link that one of them shows, or pass --seed "
            f"MULTIADDR; `shoal start {self.where}` begins it"
        )


class FolderInUse(PeerError):
    """Another process is this peer already."""

    exit_code = 2

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return (
            f"the folder {self.path} is in use by another peer on this machine; "
            "end that one, or give this one its own --directory"
        )


class OwnProgramNeeded(PeerError):
    """The run leaves a part of the training to whoever takes part."""

    exit_code = 2

    def __init__(self, run: str, what: str) -> None:
        super().__init__(run, what)
        self.run = run
        self.what = what

    def __str__(self) -> str:
        return (
            f"the {self.what} of run {self.run!r} is 'custom': only a program that brings it can "
            "take part, with peer.join; see README.md, 'Your own loop'"
        )


class LeftEarly(PeerError):
    """Somebody asked this peer to leave before it was in the run."""

    def __init__(self, run: str, circumstance: str, exit_code: int = INTERRUPTED) -> None:
        super().__init__(run, circumstance, exit_code)
        self.run = run
        self.circumstance = circumstance
        self.exit_code = exit_code  # type: ignore[misc]

    def __str__(self) -> str:
        return f"left the run {self.run!r} before it trained in it: {self.circumstance}"


class RunUnreachable(PeerError):
    """This peer could not get into the run."""

    def __init__(self, run: str, reason: str, exit_code: int = 3) -> None:
        super().__init__(run, reason, exit_code)
        self.run = run
        self.reason = reason
        self.exit_code = exit_code  # type: ignore[misc]

    def __str__(self) -> str:
        return f"could not join the run {self.run!r}: {self.reason}"


class RunLost(RunUnreachable):
    """This peer was in the run and cannot continue in it."""

    def __str__(self) -> str:
        return f"cannot go on in the run {self.run!r}: {self.reason}"


class MachineTooSmall(PeerError):
    """What the run's model takes is not there."""

    exit_code = 4

    def __init__(self, run: str, problem: str) -> None:
        super().__init__(run, problem)
        self.run = run
        self.problem = problem

    def __str__(self) -> str:
        return f"this machine cannot take part in {self.run!r}: {self.problem}"


class ExtraMissing(PeerError):
    """Something that the run asks for needs packages which are not installed."""

    exit_code = 2

    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(what, package, extra)
        self.what = what
        self.package = package
        self.extra = extra

    def __str__(self) -> str:
        return (
            f"{self.what} needs the package {self.package!r}, which is not installed; "
            f"run: pip install 'shoal[{self.extra}]'"
        )


class DataUnavailable(PeerError):
    """The data that the run trains on is not on this machine, or too little of it."""

    exit_code = 2

    def __init__(self, recipe: str, reason: str) -> None:
        super().__init__(recipe, reason)
        self.recipe = recipe
        self.reason = reason

    def __str__(self) -> str:
        return f"data recipe {self.recipe!r} cannot be read here: {self.reason}"


class DiskFull(PeerError):
    """A checkpoint could not be written for lack of space. The older ones are untouched."""

    def __init__(self, path: str, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(path, needed_bytes, free_bytes)
        self.path = path
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes

    def __str__(self) -> str:
        return (
            f"no room for a checkpoint in {self.path}: it takes {self.needed_bytes / 1e6:.1f} MB, "
            f"{self.free_bytes / 1e6:.1f} MB are free; the older checkpoints are kept, "
            "training goes on; free some space or choose another --directory"
        )


class QuotaFull(DiskFull):
    """The same, for lack of what the owner of the machine allows. ``free_bytes``: of that."""

    def __str__(self) -> str:
        return (
            f"no room for a checkpoint in {self.path}: it takes {self.needed_bytes / 1e6:.1f} MB, "
            f"of what `shoal limits --disk` allows there {self.free_bytes / 1e6:.1f} MB are left; "
            "the older checkpoint is kept, training goes on; allow more"
        )


class NotWritten(PathError):
    """A file that was asked for cannot be written where it was wanted."""

    exit_code = 2

    def __str__(self) -> str:
        return f"cannot write {self.path}: {self.reason}; choose another place"


class CheckpointDamaged(PathError):
    """A checkpoint is incomplete or was changed after it was written."""

    def __str__(self) -> str:
        return f"checkpoint {self.path} is damaged: {self.reason}"
