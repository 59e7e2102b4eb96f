"""The section ``[model.lora]``: adapters that are trained instead of a whole model."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

_MODULE = r"^[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*\Z"


class Lora(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Low-rank adapters (arXiv 2106.09685) of linear layers; the base is frozen."""

    rank: Annotated[
        int, Meta(ge=1, le=1024, description="Rank of the two matrices of an adapter.")
    ] = 16
    alpha: Annotated[
        float,
        Meta(
            gt=0.0,
            le=65536.0,
            description="Scale of the adapters: their product is multiplied by alpha / rank.",
        ),
    ] = 32.0
    targets: Annotated[
        list[
            Annotated[
                str,
                Meta(
                    pattern=_MODULE,
                    max_length=128,
                    extra={"rule": "the name of a layer such as 'q_proj'"},
                ),
            ]
        ],
        Meta(
            min_length=1,
            max_length=64,
            description="Linear layers that get adapters, by the ends of their names, such as "
            "'q_proj' or 'mlp.up_proj'.",
        ),
    ]
    base_dtype: Annotated[
        Literal["bf16", "fp32", "int8", "nf4"],
        Meta(
            description="Type in which peers hold the frozen base: 2, 4, 1 or half a byte for a "
            "parameter. 'int8' and 'nf4' need the package bitsandbytes at every peer."
        ),
    ] = "bf16"
