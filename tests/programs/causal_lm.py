"""A small Llama, trained by transformers' Trainer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed

import peer.hf
from tests.programs import here

LENGTH = 32


def llama() -> Any:
    set_seed(42)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    return AutoModelForCausalLM.from_config(config)


def arguments(**own: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(here.DIRECTORY / "out"),
        max_steps=min(here.LAST_STEP, 100_000),
        per_device_train_batch_size=8,
        per_device_eval_batch_size=64,
        learning_rate=3e-3,
        logging_steps=50,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        **own,
    )


def texts(count: int, source: torch.Generator) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": t, "labels": t} for t in here.letters(count, LENGTH, source)]


def main() -> None:
    with peer.hf.ShoalCallback(here.run(), settings=here.SETTINGS) as shoal:
        trainer = Trainer(
            model=llama(),
            args=arguments(),
            train_dataset=texts(4096, torch.Generator().manual_seed(1)),
            eval_dataset=texts(64, torch.Generator().manual_seed(7)),
            callbacks=[shoal],
        )
        trainer.train()
    trainer.save_model(str(here.DIRECTORY / "model"))
    here.end(trainer.model, trainer.evaluate()["eval_loss"], shoal.run)


if __name__ == "__main__":
    main()
