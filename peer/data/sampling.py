"""Walking a dataset in an order of this peer's own, where a framework draws the order.

Frameworks draw it from a seed that is the same at every peer: all would train on the same batches.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from blake3 import blake3
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler

logger = logging.getLogger(__name__)


def order_for_peer(loader: Any, *, run_id: str, peer_id: str, seed: int) -> bool:
    """Give the sampler of a ``DataLoader`` a seed of this peer's, the same after a restart.

    Returns whether there is a sampler that draws an order; if not, it is told how to help.
    All processes of one peer must do it alike.
    """
    key = f"{seed}/{run_id}/{peer_id}".encode()
    own_seed = int.from_bytes(blake3(key).digest(length=7), "little")
    sampler = _sampler_of(loader)
    if hasattr(sampler, "initial_seed"):  # accelerate's, which adds the epoch to it
        sampler.initial_seed = own_seed
    elif isinstance(sampler, RandomSampler):
        sampler.generator = torch.Generator().manual_seed(own_seed)
    elif isinstance(sampler, DistributedSampler) and sampler.shuffle:
        sampler.seed = own_seed
    else:
        logger.warning(
            "order_not_ours sampler=%s; see to it that every peer trains on other data: shuffle, "
            "or give each a part of the dataset",
            type(sampler).__name__,
        )
        return False
    return True


def _sampler_of(loader: Any) -> Any:
    """The innermost one: batch samplers are wrapped around it, and shards around those."""
    found = getattr(loader, "sampler", None)
    if found is None or isinstance(found, BatchSampler):
        found = getattr(loader, "batch_sampler", found)
    outer = getattr(loader, "batch_sampler", None)
    while outer is not None:
        found = getattr(outer, "sampler", found)
        outer = getattr(outer, "batch_sampler", None)
    return found
