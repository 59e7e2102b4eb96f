"""The errors of averaging. Callers read their fields, never their text."""

from __future__ import annotations

from dht.errors import ExpectedError


class AveragingError(ExpectedError):
    """The world misbehaved: a peer's bytes, a learner's numbers or this machine's arithmetic."""


class NotFinite(AveragingError):
    """NaN or infinity in values to be sent. ``unit`` is counted from the first encoded one.

    A codec knows no names; its caller adds them: ``error.in_tensor(name)``.
    """

    unit: int
    tensor: str | None = None

    def in_tensor(self, name: str) -> NotFinite:
        """Return the same error with the name of the tensor that ``unit`` belongs to."""
        return NotFinite(self.unit, name)

    def __str__(self) -> str:
        where = f"tensor {self.tensor!r}" if self.tensor else f"unit {self.unit}"
        return f"{where} holds NaN or infinity; it cannot be merged"


class BadPayload(AveragingError):
    """Encoded bytes that no honest peer would send: a wrong length or an impossible scale."""

    codec: str
    reason: str
    message = "payload in {codec} refused: {reason}"


class SubnormalsFlushed(AveragingError):
    """This thread's arithmetic flushes subnormals, so its bits would differ from other peers'."""

    what: str
    message = (
        "subnormal {what} are flushed to zero in this thread, so its results would "
        "differ from other peers'; something set the processor's FTZ or DAZ mode, as "
        "torch.set_flush_denormal(True) and libraries built with -ffast-math do"
    )


class LineageBroken(AveragingError):
    """A replay entry that does not follow from the state that it was to be applied to."""

    fragment: int
    version: int
    reason: str
    message = "fragment {fragment}: version {version} does not follow: {reason}"


class BulkRefused(AveragingError):
    """A peer refused to take or to give a slice, or the connection to it carries no bulk data."""

    peer: str
    reason: str
    message = "peer {peer} refused bulk data: {reason}"
