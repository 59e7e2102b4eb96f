"""The Trainer of transformers in a run: one callback makes it a peer.

    python examples/hf_trainer/train.py                        # founds the run, prints its link
    python examples/hf_trainer/train.py 'shoal://...'          # another terminal or machine

``--lora`` trains and exchanges a LoRA adapter of the same model instead, in a run of its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

import peer
import peer.hf

HERE = Path(__file__).parent


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}, default=str), flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("run", nargs="?", help="a link or a run file; unset: found the run")
    arguments.add_argument("--lora", action="store_true", help="train a LoRA adapter")
    arguments.add_argument("--directory", type=Path, help="unset: a new temporary folder")
    arguments.add_argument(
        "--steps", type=int, default=1_000_000, help="maximum; the run may end earlier"
    )
    arguments.add_argument("--pace", type=float, default=0.0, help="minimum seconds per step")
    arguments.add_argument("--accumulate", type=int, default=1)
    arguments.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    arguments.add_argument("--listen", default="/ip4/0.0.0.0/tcp/0")
    arguments.add_argument("--resume", action="store_true", help="from the last checkpoint")
    chosen = arguments.parse_args()

    directory = chosen.directory or Path(tempfile.mkdtemp(prefix="shoal-hf-"))
    torch.set_num_threads(1)
    where = chosen.run or str(HERE / ("lora.toml" if chosen.lora else "run.toml"))
    model: Any = peer.build_model(peer.read_run(where))  # or your own, such as from_pretrained(...)
    if chosen.lora:
        lora = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    exchanged = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say("model", parameters=sum(p.numel() for p in model.parameters()), exchanged=exchanged)

    def on_event(fields: Mapping[str, Any]) -> None:
        if fields["event"] in ("link", "round", "peer_joined", "over", "optimizer_not_restored"):
            say(**fields)

    shoal = peer.hf.ShoalCallback(
        where,
        directory=directory / "peer",
        quiet=True,  # on_event prints the link
        on_event=on_event,
        pace_s=chosen.pace,
        listen=(chosen.listen,),
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(directory / "checkpoints"),
            max_steps=chosen.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=chosen.accumulate,
            bf16=chosen.bf16,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=20,
            save_steps=100,
            save_total_limit=2,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=shoal.dataset(),  # or your own; every peer reads it in its own order
        callbacks=[shoal],
    )
    with shoal:
        trainer.train(resume_from_checkpoint=chosen.resume or None)
    trainer.save_model(str(directory / "model"))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if not isinstance(shoal.run, peer.Run):
        return  # under torchrun rank 0 is the peer and reports
    stats = shoal.run.status
    say(
        "done",
        steps=stats.steps,
        tokens=stats.tokens,
        rounds=stats.rounds,
        bytes_sent=stats.bytes_sent,
        blocked=f"{stats.blocked_fraction:.2%}",
        fates=dict(stats.fates),
    )


if __name__ == "__main__":
    main()
