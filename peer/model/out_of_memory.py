"""Recognising the errors of devices that have no memory left."""

from __future__ import annotations

import torch

_ALLOCATION_FAILED = (
    *("out of memory", "can't allocate memory", "not enough memory"),
    "ALLOC_FAILED",
)
"""Words in errors that are no ``OutOfMemoryError``: those of MPS, of a CUDA kernel that is loaded
late ("CUDA error: out of memory"), of the CPU, and of cuBLAS and cuDNN."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in _ALLOCATION_FAILED
    )
