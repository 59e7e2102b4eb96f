"""The settings of a run: every section of the run file, and ``RunFile``, which holds them all.

A setting is declared once, here, with its type, its default, its limits and the description that
``peer.run_file.writing`` prints as a comment. The defaults of a schema are frozen, because a
setting that is left out is part of the run's id: a changed default needs a new ``SCHEMA``.
Descriptions are not part of the id.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from blake3 import blake3
from msgspec import Meta, Struct
from multiaddr import Multiaddr

from dht import addresses
from dht.identity import RunId

SCHEMA = 1
"""The only number of ``schema`` that this version reads."""

SEEDS_MAX = 32


def _text(pattern: str, rule: str, description: str, *, length_max: int) -> Meta:
    return Meta(
        pattern=pattern, max_length=length_max, description=description, extra={"rule": rule}
    )


# No control characters anywhere: these texts are shown on other people's terminals.
_PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f]*\Z"
_HEX_64 = r"^[0-9a-f]{64}\Z"
_HUB_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?\Z"
_OWNED_HUB_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*\Z"
"""A dataset without an owner may be a reader of files instead: 'text' is what lies around here."""
_PEER_ID = r"^[1-9A-HJ-NP-Za-km-z]{40,64}\Z"


class _Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


# --- what is trained ------------------------------------------------------------------------


class _Model(_Section, frozen=True, kw_only=True):
    layout_hash: Annotated[
        Annotated[str, _text(_HEX_64, "64 hex digits", "", length_max=64)] | None,
        Meta(
            description="Digest of the names, shapes and fragments of the trained parameters, as "
            "`shoal run check` prints it. When set, a peer whose model differs is refused before "
            "it joins."
        ),
    ] = None


class GptModel(_Model, frozen=True, kw_only=True, tag_field="recipe", tag="gpt"):
    """The built-in decoder: RMSNorm, rotary positions, causal attention."""

    layers: Annotated[int, Meta(ge=1, le=512, description="Blocks.")] = 4
    width: Annotated[
        int, Meta(ge=8, le=65536, description="Features of a token between the blocks.")
    ] = 128
    heads: Annotated[
        int, Meta(ge=1, le=1024, description="Attention heads; they divide the width evenly.")
    ] = 4
    context: Annotated[int, Meta(ge=2, le=1 << 20, description="Most tokens in one sequence.")] = (
        128
    )
    vocabulary: Annotated[
        int, Meta(ge=2, le=1 << 20, description="Kinds of tokens; 256 for bytes.")
    ] = 256
    mlp: Annotated[
        Literal["swiglu", "gelu"], Meta(description="The feed-forward part of a block.")
    ] = "swiglu"
    mlp_width: Annotated[
        Annotated[int, Meta(ge=8, le=1 << 18)] | None,
        Meta(
            description="Features inside the feed-forward part; unset: 4 x width for gelu, "
            "8/3 x width rounded up to a multiple of 32 for swiglu."
        ),
    ] = None
    tied_head: Annotated[
        bool, Meta(description="The output head shares the embedding's weights.")
    ] = True
    rotary_base: Annotated[
        float, Meta(ge=1.0, le=1e9, description="Base of the rotary position's wavelengths.")
    ] = 10000.0


class HfModel(_Model, frozen=True, kw_only=True, tag_field="recipe", tag="hf"):
    """A causal language model of the transformers package, from its configuration alone."""

    config: Annotated[
        dict[str, Any],
        Meta(
            description="The configuration's keys; model_type is required. Remote code is "
            "never trusted."
        ),
    ]


class CustomModel(_Model, frozen=True, kw_only=True, tag_field="recipe", tag="custom"):
    """The model is the caller's own, handed to peer.join."""


Model: TypeAlias = GptModel | HfModel | CustomModel


# --- on what --------------------------------------------------------------------------------


class _Data(_Section, frozen=True, kw_only=True):
    sequence_length: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Tokens predicted in one sequence.")
    ] = 128
    held_out: Annotated[
        float,
        Meta(
            gt=0.0,
            le=0.5,
            description="Share of the data that nobody trains on; loss is measured on it.",
        ),
    ] = 0.05


class PythonStdlibData(_Data, frozen=True, kw_only=True, tag_field="recipe", tag="python_stdlib"):
    """The sources of the Python standard library, as bytes: on every machine, no download."""


class TextData(_Data, frozen=True, kw_only=True, tag_field="recipe", tag="text"):
    """Local text files, as bytes. Every peer has a copy; ``--data`` says where."""

    files: Annotated[
        list[Annotated[str, _text(_PRINTABLE, "a printable text", "", length_max=256)]],
        Meta(
            min_length=1,
            max_length=64,
            description="Patterns relative to the data folder, such as 'corpus/**/*.txt'.",
        ),
    ]


class HfData(_Data, frozen=True, kw_only=True, tag_field="recipe", tag="hf"):
    """A dataset of the Hugging Face hub, streamed."""

    dataset: Annotated[
        str, _text(_OWNED_HUB_NAME, "a name such as 'owner/name'", "Its name.", length_max=128)
    ]
    subset: Annotated[
        Annotated[str, _text(_PRINTABLE, "a printable text", "", length_max=128)] | None,
        Meta(description="The dataset's configuration, where it has several."),
    ] = None
    split: Annotated[
        str, _text(_PRINTABLE, "a printable text", "Which part of it.", length_max=64)
    ] = "train"
    revision: Annotated[
        Annotated[str, _text(_PRINTABLE, "a printable text", "", length_max=128)] | None,
        Meta(description="A commit of the dataset, so that every peer sees the same one."),
    ] = None
    text_field: Annotated[
        str, _text(_PRINTABLE, "a printable text", "The column with the text.", length_max=64)
    ] = "text"
    tokenizer: Annotated[
        str,
        _text(
            _HUB_NAME,
            "'bytes' or a name such as 'owner/name'",
            "'bytes', or a tokenizer of the hub.",
            length_max=128,
        ),
    ] = "bytes"


class CustomData(_Data, frozen=True, kw_only=True, tag_field="recipe", tag="custom"):
    """The data is the caller's own, handed to run.data."""


Data: TypeAlias = PythonStdlibData | TextData | HfData | CustomData


# --- how one peer learns --------------------------------------------------------------------


class _Inner(_Section, frozen=True, kw_only=True):
    learning_rate: Annotated[
        float, Meta(gt=0.0, le=100.0, description="At its peak; see [schedule].")
    ] = 1e-3
    batch_size: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Sequences in one optimizer step of one peer.")
    ] = 32
    clip_norm: Annotated[
        float | Literal["off"],
        Meta(description="Gradients longer than this are shortened to it, or 'off'."),
    ] = 1.0


class AdamwInner(_Inner, frozen=True, kw_only=True, tag_field="optimizer", tag="adamw"):
    """Adam with decoupled weight decay (matrices only)."""

    beta1: Annotated[float, Meta(ge=0.0, lt=1.0, description="Decay of the first moment.")] = 0.9
    beta2: Annotated[float, Meta(ge=0.0, lt=1.0, description="Decay of the second moment.")] = 0.95
    epsilon: Annotated[float, Meta(gt=0.0, le=1.0, description="Keeps the division finite.")] = 1e-8
    weight_decay: Annotated[float, Meta(ge=0.0, le=10.0, description="Of the matrices.")] = 0.1


class SgdInner(_Inner, frozen=True, kw_only=True, tag_field="optimizer", tag="sgd"):
    """Stochastic gradient descent with momentum."""

    momentum: Annotated[float, Meta(ge=0.0, lt=1.0, description="0 for none.")] = 0.9
    nesterov: Annotated[bool, Meta(description="Look ahead along the momentum.")] = False
    weight_decay: Annotated[float, Meta(ge=0.0, le=10.0, description="Of the matrices.")] = 0.0


class CustomInner(_Inner, frozen=True, kw_only=True, tag_field="optimizer", tag="custom"):
    """The optimizer is the caller's own; learning_rate is what run.schedule gives it."""


Inner: TypeAlias = AdamwInner | SgdInner | CustomInner


class Schedule(_Section, frozen=True, kw_only=True):
    """The learning rate over the run's global tokens, so that a late joiner has the right one."""

    shape: Annotated[
        Literal["cosine", "linear", "constant"], Meta(description="From the peak to the end.")
    ] = "cosine"
    warmup_tokens: Annotated[
        int, Meta(ge=0, le=1 << 60, description="Global tokens from zero to the peak.")
    ] = 1_000_000
    decay_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 60)] | None,
        Meta(description="Global tokens at which the rate has reached its end; unset: end.tokens."),
    ] = None
    final_fraction: Annotated[
        float, Meta(ge=0.0, le=1.0, description="Rate at the end, as a share of the peak.")
    ] = 0.1


# --- how peers agree ------------------------------------------------------------------------


class Outer(_Section, frozen=True, kw_only=True):
    """What peers make of each other's work."""

    fragments: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description="P: parts of the model that are merged apart, one after the other.",
        ),
    ] = 8
    steps_per_cycle: Annotated[
        int,
        Meta(ge=1, le=100_000, description="H: every fragment is merged once in so many steps."),
    ] = 24
    overlap_steps: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000,
            description="tau: steps a merge may take while training goes on; 0 waits for it. With "
            "more of them a round waits longer for late peers; `carry` loses nothing by it.",
        ),
    ] = 6
    learning_rate: Annotated[
        float, Meta(gt=0.0, le=10.0, description="eta: of the merged update.")
    ] = 1.0
    momentum: Annotated[float, Meta(ge=0.0, lt=1.0, description="mu: Nesterov's.")] = 0.5
    merge: Annotated[
        Literal["mean", "rda", "clip", "centered_clip"],
        Meta(description="How contributions become one update."),
    ] = "mean"
    codec: Annotated[
        Literal["f32", "f16", "int8", "int4"], Meta(description="How updates travel.")
    ] = "int4"
    adoption: Annotated[
        Literal["carry", "replace", "blend"],
        Meta(
            description="What a learner does with a merged fragment: carry keeps the steps made "
            "meanwhile."
        ),
    ] = "carry"
    blend_alpha: Annotated[
        float, Meta(ge=0.0, le=1.0, description="For blend: the share of the own value.")
    ] = 0.5


Quorum: TypeAlias = (
    Annotated[int, Meta(ge=2, le=64)]
    | Annotated[float, Meta(gt=0.0, le=1.0)]
    | Literal["majority", "all"]
)


class Rounds(_Section, frozen=True, kw_only=True):
    """When a round may close, and what it may contain."""

    quorum: Annotated[
        Quorum,
        Meta(
            description="Who must have joined: a number of peers, a fraction of the live peers of "
            "the group, 'majority' or 'all'. Never fewer than two."
        ),
    ] = "majority"
    grace: Annotated[
        float,
        Meta(
            ge=0.0,
            lt=1.0,
            description="After the quorum, wait for late peers during this share of the time that "
            "training hides anyway.",
        ),
    ] = 0.8
    quorum_deadline_s: Annotated[
        float,
        Meta(ge=0.1, le=86_400.0, description="A round without a quorum by then is void."),
    ] = 30.0
    round_deadline_s: Annotated[
        float, Meta(ge=1.0, le=86_400.0, description="A round that has not ended by then is void.")
    ] = 300.0
    group_size: Annotated[
        int,
        Meta(
            ge=2,
            le=64,
            description="Most peers that merge with each other at once. More are dealt into "
            "groups that change with every version: see [mixing].",
        ),
    ] = 16
    stale_max: Annotated[
        int,
        Meta(ge=0, le=1000, description="Work begun more versions ago than this is discarded."),
    ] = 8
    norm_max_ratio: Annotated[
        float | Literal["off"],
        Meta(
            description="Whoever reduces refuses a contribution so many times longer than usual, "
            "or 'off'. Usual is what the others send and what the last merges moved."
        ),
    ] = 50.0
    alone_s: Annotated[
        float,
        Meta(
            ge=1.0,
            le=1e7,
            description="A peer that met nobody for so long goes on as a run of one.",
        ),
    ] = 600.0


class Mixing(_Section, frozen=True, kw_only=True):
    """Rounds of a swarm with more peers than rounds.group_size, where groups change."""

    every: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Slow weights are mixed, as updates are merged, in the rounds that make "
            "every so many versions; 0: never, and peers drift apart. Where one group holds "
            "everybody nothing is mixed.",
        ),
    ] = 1
    dispersion_max: Annotated[
        float | Literal["off"],
        Meta(
            description="Mix only when a peer is about to be further than this from its group, as "
            "the distance over the norm, or 'off': whenever `every` says so."
        ),
    ] = "off"
    theta: Annotated[
        Literal["f32", "f16"], Meta(description="How slow weights travel when they are mixed.")
    ] = "f32"
    momentum: Annotated[
        Literal["f32", "f16", "int8"], Meta(description="How momentum travels then.")
    ] = "f16"


class Membership(_Section, frozen=True, kw_only=True):
    """How peers notice each other."""

    heartbeat_s: Annotated[
        float, Meta(ge=0.5, le=600.0, description="Time between two signs of life.")
    ] = 10.0
    expiry_s: Annotated[
        float, Meta(ge=1.0, le=3600.0, description="A peer silent for so long counts as gone.")
    ] = 30.0


class Limits(_Section, frozen=True, kw_only=True):
    """What no peer may exceed."""

    step_tokens_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1 << 40,
            description="Most tokens one optimizer step of one peer may count in a merge.",
        ),
    ] = 1 << 18


class Evaluation(_Section, frozen=True, kw_only=True):
    """Held-out loss, measured by one peer at a time and published."""

    sequences: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Held-out sequences per measurement.")
    ] = 128
    every_versions: Annotated[
        int, Meta(ge=1, le=1 << 20, description="Merges of a fragment between two measurements.")
    ] = 1


class End(_Section, frozen=True, kw_only=True):
    """When the run is over."""

    tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 60)] | Literal["unlimited"],
        Meta(description="Global tokens to train on, or 'unlimited'."),
    ] = 100_000_000
    date: Annotated[
        Annotated[datetime, Meta(tz=True)] | None,
        Meta(description="Ends at this moment at the latest, such as 2027-03-31T12:00:00Z."),
    ] = None

    def __post_init__(self) -> None:
        if self.date is not None:  # one moment, one spelling: the id depends on it
            moment = self.date.astimezone(UTC).replace(microsecond=0)
            msgspec.structs.force_setattr(self, "date", moment)


class Policy(_Section, frozen=True, kw_only=True):
    """Who may take part."""

    admission: Annotated[
        Literal["open", "listed"], Meta(description="Everybody, or only the peers listed.")
    ] = "open"
    peers: Annotated[
        list[Annotated[str, _text(_PEER_ID, "a peer id", "", length_max=64)]],
        Meta(max_length=128, description="Peer ids, for admission = 'listed'."),
    ] = msgspec.field(default_factory=list)
    owner: Annotated[
        Annotated[str, _text(_PEER_ID, "a peer id", "", length_max=64)] | None,
        Meta(
            description="The peer id that speaks for the run. Shown to people; nothing "
            "acts on it yet."
        ),
    ] = None


class RunFile(_Section, frozen=True, kw_only=True):
    """All settings of a run. Equal immutable parts have equal ``run_id``."""

    schema: Annotated[
        int, Meta(ge=1, description="The version of this format. Its defaults never change.")
    ] = SCHEMA
    name: Annotated[
        str,
        _text(
            r"^[a-z0-9][a-z0-9._-]*\Z",
            "lower-case letters, digits, '-', '_' and '.', at most 64",
            "What people call it.",
            length_max=64,
        ),
    ] = "my-run"
    description: Annotated[
        str,
        _text(_PRINTABLE, "at most 1000 printable characters", "What it is for.", length_max=1000),
    ] = ""
    licence: Annotated[
        str,
        _text(_PRINTABLE, "at most 100 printable characters", "Of the weights.", length_max=100),
    ] = ""
    random_seed: Annotated[
        int,
        Meta(ge=0, le=(1 << 63) - 1, description="Every founder draws the same first weights."),
    ] = 0
    seeds: Annotated[
        list[str],
        Meta(
            max_length=SEEDS_MAX,
            description="Where the run can be found: addresses of bootstrap or other peers, such "
            "as '/dns4/seed.example.org/tcp/7700/p2p/12D3Koo...'. Not part of the run's id.",
        ),
    ] = msgspec.field(default_factory=list)
    model: Model = GptModel()
    data: Data = PythonStdlibData()
    inner: Inner = AdamwInner()
    schedule: Schedule = Schedule()
    outer: Outer = Outer()
    rounds: Rounds = Rounds()
    mixing: Mixing = Mixing()
    membership: Membership = Membership()
    limits: Limits = Limits()
    evaluation: Evaluation = Evaluation()
    end: End = End()
    policy: Policy = Policy()

    def canonical(self) -> bytes:
        """The immutable part in its only spelling: what is hashed, and what peers serve."""
        plain = msgspec.to_builtins(self)
        del plain["seeds"]
        return json.dumps(
            plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        ).encode()

    @property
    def run_id(self) -> RunId:
        """The blake3 digest, in hex, of the canonical form."""
        return RunId(blake3(self.canonical()).hexdigest())

    @property
    def seed_addresses(self) -> tuple[Multiaddr, ...]:
        return tuple(addresses.parse_seed(seed) for seed in self.seeds)

    @property
    def synchronous(self) -> bool:
        """The trainer waits for every merge of its own."""
        return self.outer.overlap_steps == 0

    @property
    def decay_tokens(self) -> int | None:
        """Global tokens at which the learning rate has reached its end; ``None``: never."""
        if self.schedule.shape == "constant":
            return None
        if self.schedule.decay_tokens is not None:
            return self.schedule.decay_tokens
        assert isinstance(self.end.tokens, int)  # a run file without either is refused
        return self.end.tokens


def vocabulary(model: Model) -> int | None:
    """How many kinds of tokens a model knows, where that is said."""
    if isinstance(model, GptModel):
        return model.vocabulary
    size = model.config.get("vocab_size") if isinstance(model, HfModel) else None
    return size if isinstance(size, int) and size > 0 else None
