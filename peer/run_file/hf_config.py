"""Checks of a transformers configuration in a run file, which may come from a stranger.

This machine builds a model from it. It must not refer to code, weights or files, and must not
repeat layers so often that building the model would never end. Its parameters are counted by
``peer.model.recipes.counting`` within limits, and the memory that it takes is checked by
``peer.trainer.preflight``.
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
"""Keys with which a configuration can refer to code or weights outside the run file."""

MODEL_TYPES = frozenset(
    (
        *("arcee", "biogpt", "bloom", "codegen", "cohere", "cohere2", "deepseek_v2"),
        *("deepseek_v3", "ernie4_5", "ernie4_5_moe", "exaone4", "falcon", "gemma", "gemma2"),
        *("gemma3_text", "glm", "glm4", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neo"),
        *("gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "helium", "llama", "mistral"),
        *("mixtral", "mpt", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon"),
        *("phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss"),
        *("smollm3", "stablelm", "starcoder2", "xglm"),
    )
)
"""Models of text alone, whose code in transformers loads no kernels, weights or other models."""

ATTENTION = ("attn_implementation", "_attn_implementation")
ATTENTION_ALLOWED = (None, "eager", "sdpa")
"""Values for which transformers loads no compiled code from the hub."""

REPEATED = ("layer", "expert", "block", "label", "codebook", "quantizer", "stage")
REPEATED_MAX = 4096
"""Upper bound on the number of parts that are built one by one; their keys contain ``REPEATED``."""

EXPERTS_MAX = 1 << 16
"""Upper bound on layers times experts. The largest known models have a third of it."""


NOT_SETTINGS = frozenset(
    ("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache")
)
"""Keys of a published configuration that say how it was made or used, and not what it is."""


def published_settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A published configuration for a run file: its settings, and the keys that are null."""
    names = {"_name_or_path", "name_or_path"} | NOT_SETTINGS
    kept = {key: value for key, value in config.items() if key not in names}
    unset = sorted(key for key, value in kept.items() if value is None)
    return {key: value for key, value in kept.items() if value is not None}, unset


def config_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """The reasons to refuse a configuration; none if it is acceptable."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        yield "has no model_type, such as 'llama'"
    elif model_type not in MODEL_TYPES:
        yield (
            f"has model_type = {model_type[:80]!r}, which is none of those examined; a program "
            "can bring such a model with model.recipe = 'custom'. Examined are "
            f"{', '.join(sorted(MODEL_TYPES))}"
        )
    yield from dict.fromkeys(_forbidden(config, depth=0))
    layers, experts = (_largest(config, word) for word in ("layer", "expert"))
    if layers * experts > EXPERTS_MAX:
        yield f"has {layers} layers and {experts} experts; at most {EXPERTS_MAX} in all are allowed"
    try:
        json.dumps(config, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        yield f"may hold only texts, finite numbers, booleans, lists and tables: {error}"


def _forbidden(value: Any, *, depth: int) -> Iterator[str]:
    """Forbidden keys and values, also in nested tables and lists."""
    if depth > 16:
        yield "has tables nested more than 16 deep"
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if depth and key == "model_type":
                yield "has a configuration inside the configuration"
            elif key in REFUSED:
                yield f"has {key!r}; it must not refer to anything outside the run file"
            elif key in ATTENTION and inner not in ATTENTION_ALLOWED:
                yield f"has {key} = {inner!r}; it must be 'eager' or 'sdpa', which load no code"
            elif isinstance(inner, int) and inner > REPEATED_MAX and _is_repeated(key):
                yield f"has {key} = {inner}; at most {REPEATED_MAX} are allowed"
            else:
                yield from _forbidden(inner, depth=depth + 1)
    elif isinstance(value, list):
        for inner in value:
            yield from _forbidden(inner, depth=depth + 1)
    elif isinstance(value, str) and ("/" in value or "\\" in value):
        # A repository, a path or an address.
        yield f"has {value[:80]!r}; it must not refer to anything outside the run file"


def _largest(value: Any, word: str, *, depth: int = 0) -> int:
    """The largest count under a key that contains ``word``, anywhere in a configuration."""
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
