"""Errors of finding and calling peers.

Callers read the fields of an error, never its text.
"""

from __future__ import annotations

from dataclasses import dataclass
from string import Formatter
from typing import ClassVar, dataclass_transform

ANSWERS_SHOWN = 3
"""Number of peers' answers shown in an error; the rest are counted."""


@dataclass_transform(eq_default=False)
class ExpectedError(Exception):
    """Base class of errors that are no bugs: callers read their fields, not their text.

    A subclass declares its fields as a dataclass does, and is made a dataclass. The fields are its
    ``args``, so that it survives pickling.
    """

    __match_args__: ClassVar[tuple[str, ...]] = ()
    message: ClassVar[str | None] = None
    """The text of the error, with fields in braces: ``peer {peer} cannot be reached: {reason}``. A
    class whose text is more than that has a ``__str__`` instead."""

    def __init_subclass__(cls) -> None:
        if "__annotations__" in cls.__dict__:
            dataclass(eq=False, repr=False)(cls)
        named = {name for _, name, _, _ in Formatter().parse(cls.message or "") if name}
        if not named.issubset(cls.__match_args__):
            raise TypeError(f"the message of {cls.__name__} names more than its fields: {named}")

    def __post_init__(self) -> None:
        self.args = tuple(getattr(self, name) for name in self.__match_args__)

    def __str__(self) -> str:
        return super().__str__() if self.message is None else self.message.format_map(vars(self))


class DhtError(ExpectedError):
    """A peer, a daemon or a file did not behave as it should."""


class PeerUnreachable(DhtError):
    """A peer did not answer: unknown address, refused, or silent for too long."""

    peer: str
    reason: str
    message = "peer {peer} cannot be reached: {reason}"


ANOTHER_PEER = "another peer answers there"
"""Beginning of the reason where a peer was dialled by the address of another one."""

BUSY = "too many calls"
"""Beginning of the reason where a peer cannot answer just now, and may be called again."""

NOT_SERVED = "this protocol is not served"
"""Reason of a refusal by a peer that does not know the protocol, or does not serve it."""


class CallRefused(DhtError):
    """A peer answered, and the answer was an error or broke a limit."""

    peer: str
    protocol: str
    reason: str
    message = "peer {peer} refused {protocol}: {reason}"


class StreamBroken(DhtError):
    """A stream ended before the END frame and its acknowledgement, or broke a limit."""

    peer: str
    reason: str
    message = "stream with {peer} broke: {reason}"


class HostClosed(DhtError):
    """The host is closing or its daemon is being restarted; try again later."""

    reason: str
    message = "the host is not up: {reason}"


_WITHOUT_IT = "a peer then gets a new identity, and an owner's runs have nobody who may change them"


class KeyFileError(DhtError):
    """The file that holds this peer's key cannot be used; it was left as it is.

    ``problem`` is ``exposed``, ``damaged``, ``unreadable`` or ``unwritable``.
    """

    path: str
    reason: str
    problem: str

    def __str__(self) -> str:
        if self.problem == "exposed":
            return (
                f"key file {self.path} can be read by others ({self.reason}); "
                f"run `chmod 600 {self.path}`, or move it away: {_WITHOUT_IT}"
            )
        if self.problem == "damaged":
            return (
                f"key file {self.path} is damaged: {self.reason}; restore it from a backup, "
                f"or move it away: {_WITHOUT_IT}"
            )
        if self.problem == "unwritable":
            return (
                f"key file {self.path} cannot be written: {self.reason}; "
                "free some space, or choose a folder that this user may write"
            )
        return (
            f"key file {self.path} cannot be read: {self.reason}; start as the user whose file it "
            "is, or choose another one"
        )


class AddressError(DhtError, ValueError):
    """An address is not valid here. ``component`` is the part that is wrong."""

    text: str
    component: str
    reason: str

    def __str__(self) -> str:
        where = f" {self.component!r}" if self.component else ""
        return f"address {self.text!r}:{where} {self.reason}"


class RunFileUnavailable(DhtError):
    """No peer had the run file that belongs to this run id."""

    run: str
    answers: tuple[tuple[str, str], ...]
    timeout_s: float

    def __str__(self) -> str:
        if not self.answers:
            told = "no peer was found to ask"
        else:
            shown = self.answers[:ANSWERS_SHOWN]
            told = "; ".join(f"{peer}: {reason}" for peer, reason in shown)
            if more := len(self.answers) - len(shown):
                told += f"; and {more} more had none either"
        return f"no run file for run {self.run} within {self.timeout_s:g} s; {told}"
