"""A small published model in a folder."""

from __future__ import annotations

from pathlib import Path

NAME = "owner/tiny"

CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}


def publish(folder: Path, *, seed: int = 1, shard: str | None = None) -> Path:
    """Write a model as transformers saves it. ``shard``: the largest size of one file."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"})
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder, **({} if shard is None else {"max_shard_size": shard}))
    return folder
