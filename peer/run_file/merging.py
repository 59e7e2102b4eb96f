"""The sections of the run file about merging: ``[outer]``, ``[rounds]`` and ``[mixing]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from peer.run_file.declaring import LATER, Section

Codec: TypeAlias = Literal["f32", "f16", "int8", "int4", "int2"]

_CODEC = "|".join(get_args(Codec))
CodecPair: TypeAlias = Annotated[
    str,
    Meta(
        pattern=f"^({_CODEC})(/({_CODEC}))?$",
        extra={"rule": "an encoding, or two for up/down, such as 'int2/int4'"},
    ),
]
"""The encodings of both ways, as in ``int2/int4``, or one for both."""


def codec_pairs(codecs: Sequence[str]) -> list[tuple[str, str]]:
    """The encodings of the way up and of the way down, from names such as ``int2/int4``."""
    parts = (codec.partition("/") for codec in codecs)
    return [(up, down or up) for up, _, down in parts]


class Outer(Section, frozen=True, kw_only=True):
    """How the updates of all peers are merged into the shared model."""

    fragments: Annotated[
        int,
        Meta(ge=1, le=4096),
        "Number of parts of the model (P) that are merged separately, in turn.",
    ] = 8
    steps_per_cycle: Annotated[
        int, Meta(ge=1, le=100_000), "Steps (H) in which every fragment is merged once."
    ] = 24
    overlap_steps: Annotated[
        int,
        Meta(ge=0, le=10000),
        "Steps (tau) that a merge may take while training goes on; 0: training waits for every "
        "merge. With more, a round waits longer for late peers; `carry` keeps the steps made "
        "meanwhile.",
    ] = 6
    learning_rate: Annotated[
        float, Meta(gt=0.0, le=10.0), "Learning rate (eta) of the outer optimizer."
    ] = 1.0
    momentum: Annotated[
        float,
        Meta(ge=0.0, lt=1.0),
        "Nesterov momentum (mu) of the outer optimizer; above 0 peers hold, send and save a second "
        "vector as large as the model.",
    ] = 0.0
    merge: Annotated[
        Literal["mean", "rda", "centered_clip"],
        "Rule that combines the contributions of a round into one update.",
    ] = "mean"
    late_work: Annotated[
        Literal["whole", "per_cycle"],
        LATER,
        "Contribution of work that missed its round to a later one: `whole`, the displacement of "
        "all its cycles, `per_cycle`, their mean, so that an outer step is as long as when "
        "nobody is late. Its tokens count in both.",
    ] = "whole"
    codec: Annotated[Codec, "Encoding of updates on the wire, for both ways."] = "int4"
    codec_up: Annotated[Codec | None, LATER, "Encoding of contributions; unset: as `codec`."] = None
    codec_down: Annotated[
        Codec | None, LATER, "Encoding of merged updates on their way back; unset: as `codec`."
    ] = None
    smaller_codecs: Annotated[
        list[CodecPair],
        Meta(max_length=8),
        LATER,
        "Encodings for lines that do not carry the preferred ones, each smaller than the one "
        "before it, such as `int2/int4` (up/down). Peers change over together.",
    ] = msgspec.field(default_factory=list)
    steps_per_cycle_max: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)] | None,
        LATER,
        "The longest cycle, for lines that do not carry the smallest encodings either; unset: "
        "cycles keep the length of steps_per_cycle.",
    ] = None
    embedding_codecs: Annotated[
        CodecPair | None,
        LATER,
        "Encodings of embeddings and head where they have fragments of their own, such as `int4` "
        "or `int8/int4` (up/down); unset: those of the other fragments.",
    ] = None
    line_share: Annotated[
        float,
        Meta(gt=0.0, le=1.0),
        LATER,
        "Share of a line that merging may take before encodings and cycles adapt to it, and before "
        "a peer takes part in every k-th version only.",
    ] = 0.7
    feedback: Annotated[
        Literal["auto", "on", "uploads", "off"],
        LATER,
        "Error feedback: whether the loss of encoding an update, or a slice that the peer merges "
        "for others, is part of its next update (`uploads`: of updates alone). `auto`: where int2 "
        "is one of the two encodings; with Muon of updates alone.",
    ] = "auto"
    buffers: Annotated[
        Literal["own", "mean"],
        LATER,
        "Buffers that are saved with the model, such as the running statistics of BatchNorm: "
        "`own` leaves each peer its own, `mean` merges them like parameters, as exact means.",
    ] = "own"

    @property
    def codecs(self) -> tuple[str, str]:
        """The codecs of the way up and of the way down."""
        return self.codec_up or self.codec, self.codec_down or self.codec

    @property
    def codecs_text(self) -> str:
        up, down = self.codecs
        return up if up == down else f"{up} up, {down} down"

    @property
    def smaller_pairs(self) -> list[tuple[str, str]]:
        """The smaller encodings of the way up and of the way down."""
        return codec_pairs(self.smaller_codecs)

    @property
    def embedding_pair(self) -> tuple[str, str] | None:
        """The encodings of embeddings and head of both ways, if they have their own."""
        return codec_pairs([self.embedding_codecs])[0] if self.embedding_codecs else None

    @property
    def fed_back(self) -> frozenset[str]:
        """Encodings whose loss is part of the peer's next update."""
        pairs = (self.codecs, *self.smaller_pairs, self.embedding_pair or self.codecs)
        used = {codec for pair in pairs for codec in pair}
        if self.feedback == "auto":
            return frozenset(used & {"int2"})
        return frozenset(used if self.feedback in ("on", "uploads") else ())

    def feeds_back_merged(self, *, muon: bool) -> bool:
        """True if this holds for merged slices, too. ``muon``: it is the inner optimizer.

        The loss comes back all at once, at one peer. With AdamW that is a gain, and with Muon at
        the rates at which it is best it costs up to two percent of the loss.
        """
        return self.feedback == "on" or (self.feedback == "auto" and not muon)


Quorum: TypeAlias = (
    Annotated[int, Meta(ge=2, le=64)]
    | Annotated[float, Meta(gt=0.0, le=1.0)]
    | Literal["majority", "all"]
)


class Rounds(Section, frozen=True, kw_only=True):
    """When a round starts and ends, and which contributions it accepts."""

    quorum: Annotated[
        Quorum,
        "Peers that must have joined: a number, a fraction of the live peers of the group, "
        "'majority' or 'all'. Never fewer than two.",
    ] = "majority"
    grace: Annotated[
        float,
        Meta(ge=0.0, lt=1.0),
        "Waiting time for late peers after the quorum, as a share of the time that overlapping "
        "training hides.",
    ] = 0.8
    quorum_deadline_s: Annotated[
        float, Meta(ge=0.1, le=86_400.0), "Seconds after which a round without a quorum is aborted."
    ] = 30.0
    round_deadline_s: Annotated[
        float, Meta(ge=1.0, le=86_400.0), "Seconds after which an unfinished round is aborted."
    ] = 300.0
    group_size: Annotated[
        int,
        Meta(ge=2, le=64),
        "Maximum number of peers in one round. More peers are divided into groups that change "
        "with every version: see [mixing].",
    ] = 16
    stale_max: Annotated[
        int,
        Meta(ge=0, le=1000),
        "Maximum age of a contribution in versions. Older work is discarded, unless it began "
        "less than ten minutes ago.",
    ] = 8
    norm_max_ratio: Annotated[
        Annotated[float, Meta(gt=0.0)] | Literal["off"],
        "Maximum norm of a contribution relative to the usual norm, which follows from the "
        "other contributions and the last merges; a longer one is refused. Or 'off'.",
    ] = 50.0
    alone_s: Annotated[
        float,
        Meta(ge=1.0, le=1e7),
        "Seconds after which a peer that has lost sight of all others merges its work alone; when "
        "they have said goodbye, it does so at once.",
    ] = 600.0


class Mixing(Section, frozen=True, kw_only=True):
    """How states travel where members of a round stand on several, as groups do when there are more
    peers than rounds.group_size."""

    theta: Annotated[Literal["f32", "f16"], "Encoding of slow weights on the wire."] = "f32"
    momentum: Annotated[Literal["f32", "f16", "int8"], "Encoding of momentum on the wire."] = "f16"
