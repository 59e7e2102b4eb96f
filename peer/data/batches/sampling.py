"""A seed of its own for the sampler of each peer, where a framework draws the order of a dataset.

Frameworks draw the order from a seed that is the same at every peer, so that all peers would train
on the same batches.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from blake3 import blake3
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

logger = logging.getLogger(__name__)


def order_for_peer(loader: Any, *, run_id: str, peer_id: str, seed: int) -> bool:
    """Seed the sampler of a ``DataLoader`` for this peer; the seed is the same after a restart.

    Returns ``False``, with a warning that says what to do, if the loader has no sampler that
    draws an order. All processes of one peer must call it alike.
    """
    key = f"{seed}/{run_id}/{peer_id}".encode()
    own_seed = int.from_bytes(blake3(key).digest(length=7), "little")
    sampler = _sampler_of(loader)
    if hasattr(sampler, "initial_seed"):  # of accelerate, which adds the epoch
        sampler.initial_seed = own_seed
    elif isinstance(sampler, RandomSampler):
        sampler.generator = torch.Generator().manual_seed(own_seed)
    elif isinstance(sampler, DistributedSampler) and sampler.shuffle:
        sampler.seed = own_seed
    else:
        logger.warning(
            "order_not_ours sampler=%s; make sure that every peer trains on different data: "
            "shuffle, or give each peer a part of the dataset",
            type(sampler).__name__,
        )
        return False
    return True


def _sampler_of(loader: Any) -> Any:
    """The innermost sampler: batch samplers wrap it, and sharding samplers wrap those."""
    found = getattr(loader, "sampler", None)
    if found is None or isinstance(found, BatchSampler):
        found = getattr(loader, "batch_sampler", found)
    outer = getattr(loader, "batch_sampler", None)
    while outer is not None:
        found = getattr(outer, "sampler", found)
        outer = getattr(outer, "batch_sampler", None)
    return found
