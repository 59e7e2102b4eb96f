"""Fine-tuning of an adapter (peft): prompts have no loss, answers have several lengths."""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer

import peer.hf
from tests.programs import here
from tests.programs.causal_lm import arguments, llama

LENGTH, PROMPT = 24, 8


def examples(count: int, source: torch.Generator) -> list[dict[str, torch.Tensor]]:
    lengths = torch.randint(PROMPT + 4, LENGTH + 1, (count,), generator=source)
    found = []
    for tokens, length in zip(here.letters(count, LENGTH, source), lengths, strict=True):
        places = torch.arange(LENGTH)
        mask = (places < length).long()
        answer = (places >= PROMPT) & (places < length)
        labels = torch.where(answer, tokens, -100)
        found.append({"input_ids": tokens * mask, "attention_mask": mask, "labels": labels})
    return found


def main() -> None:
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]
    adapter = LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type="CAUSAL_LM")
    with peer.hf.ShoalCallback(here.run(), settings=here.SETTINGS) as shoal:
        trainer = Trainer(
            model=get_peft_model(llama(), adapter),
            args=arguments(gradient_accumulation_steps=2),
            train_dataset=examples(4096, torch.Generator().manual_seed(1)),
            eval_dataset=examples(64, torch.Generator().manual_seed(7)),
            callbacks=[shoal],
        )
        trainer.train()
    trainer.save_model(str(here.DIRECTORY / "model"))
    here.end(trainer.model, trainer.evaluate()["eval_loss"], shoal.run)


if __name__ == "__main__":
    main()
