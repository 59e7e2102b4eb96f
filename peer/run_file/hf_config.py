"""What a transformers configuration may say that comes from a stranger, in a run file. Pure.

It is made into a model here, so it may point at no code, weights or files, and repeat nothing so
often that making it would not end. How much memory it takes ``peer.trainer.preflight`` counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

REFUSED = (
    "_attn_implementation_internal",
    "_name_or_path",
    "auto_map",
    "backbone",
    "custom_pipelines",
    "experts_implementation",
    "_experts_implementation",
    "kernel_config",
    "name_or_path",
    "quantization_config",
    "trust_remote_code",
    "use_kernels",
    "use_pretrained_backbone",
)
"""Keys by which a configuration could point at code or weights elsewhere."""

ATTENTION = ("attn_implementation", "_attn_implementation")
ATTENTION_ALLOWED = (None, "eager", "sdpa")
"""Any other one transformers may load from the hub, as compiled code."""

REPEATED = ("layer", "expert", "block", "label", "codebook", "quantizer", "stage")
REPEATED_MAX = 4096
"""Things that are made one by one: their number is bounded before anything is built."""

EXPERTS_MAX = 1 << 16
"""Of all layers. The largest model that anybody can train so has a third of it."""


def config_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Why a configuration may not be used; nothing where it may."""
    if not isinstance(config.get("model_type"), str):
        yield "has no model_type, such as 'llama'"
    yield from dict.fromkeys(_forbidden(config, depth=0))
    layers, experts = (_largest(config, word) for word in ("layer", "expert"))
    if layers * experts > EXPERTS_MAX:
        yield f"has {layers} layers and {experts} experts; at most {EXPERTS_MAX} in all are made"
    try:
        json.dumps(config, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        yield f"can hold texts, finite numbers, booleans, lists and tables: {error}"


def _forbidden(value: Any, *, depth: int) -> Iterator[str]:
    """What may not be in a configuration, in tables and lists within it as well."""
    if depth > 16:
        yield "has tables within tables more than 16 deep"
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key in REFUSED:
                yield f"has {key!r}; nothing outside the run file may be named there"
            elif key in ATTENTION and inner not in ATTENTION_ALLOWED:
                yield f"has {key} = {inner!r}; without code from the network: 'eager' or 'sdpa'"
            elif isinstance(inner, int) and inner > REPEATED_MAX and _is_repeated(key):
                yield f"has {key} = {inner}; at most {REPEATED_MAX} are made"
            else:
                yield from _forbidden(inner, depth=depth + 1)
    elif isinstance(value, list):
        for inner in value:
            yield from _forbidden(inner, depth=depth + 1)
    elif isinstance(value, str) and ("/" in value or "\\" in value):
        # A repository, a path or an address: an architecture needs none.
        yield f"has {value[:80]!r}; nothing outside the run file may be named there"


def _largest(value: Any, word: str, *, depth: int = 0) -> int:
    """The highest number of what ``word`` names, anywhere in a configuration."""
    if depth > 16:
        return 0
    if isinstance(value, list):
        return max((_largest(inner, word, depth=depth + 1) for inner in value), default=0)
    if not isinstance(value, Mapping):
        return 0
    return max(
        (
            inner
            if isinstance(inner, int) and word in key and _is_repeated(key)
            else _largest(inner, word, depth=depth + 1)
            for key, inner in value.items()
        ),
        default=0,
    )


def _is_repeated(key: str) -> bool:
    return any(word in key for word in REPEATED) and not key.endswith(("_size", "_dim"))
