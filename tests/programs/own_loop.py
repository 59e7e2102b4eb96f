"""A small GPT with its own loop, seed, GradScaler and accumulation."""

from __future__ import annotations

import torch
from torch import nn

import peer
from tests.programs import here

BATCH, LENGTH, ACCUMULATION = 8, 32, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 48)
        self.places = nn.Embedding(LENGTH, 48)
        block = nn.TransformerEncoderLayer(
            48, 4, 96, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(48, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        hidden = self.words(tokens) + self.places.weight[:length]
        ahead = nn.Transformer.generate_square_subsequent_mask(length)
        return self.head(self.blocks(hidden, mask=ahead, is_causal=True))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(batch[:, :-1])
    return nn.functional.cross_entropy(logits.reshape(-1, 32), batch[:, 1:].reshape(-1))


def main() -> None:
    torch.manual_seed(1337)
    model = Model()
    held_out = here.letters(64, LENGTH + 1, torch.Generator().manual_seed(7))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with peer.join(here.run(), model=model, optimizer=optimizer, settings=here.SETTINGS) as run:
        if not here.SAME_SEED:
            run.seed(1337)
        run.schedule(optimizer)
        for _ in range(here.LAST_STEP):
            for _ in range(ACCUMULATION):
                batch = here.letters(BATCH, LENGTH + 1)
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(model, batch) / ACCUMULATION
                scaler.scale(loss).backward()
                run.log(loss=loss * ACCUMULATION, tokens=BATCH * LENGTH)
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if run.over:
                break
    model.eval()
    with torch.no_grad():
        here.end(model, float(loss_of(model, held_out)), run)


if __name__ == "__main__":
    main()
