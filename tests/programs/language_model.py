"""An LSTM that carries its hidden state from batch to batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import peer
from tests.programs import here

BATCH, LENGTH = 8, 24


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 32)
        self.lstm = nn.LSTM(32, 48, batch_first=True)
        self.head = nn.Linear(48, 32)

    def forward(self, tokens: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, Any]:
        outputs, hidden = self.lstm(self.words(tokens), hidden)
        return self.head(outputs).reshape(-1, 32), hidden


def main() -> None:
    torch.manual_seed(1111)
    model = Model()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    text = here.letters(BATCH, 4096, here.generator())
    with peer.join(here.run(), model=model, optimizer=optimizer, settings=here.SETTINGS) as run:
        hidden, place = None, 0
        for _ in range(here.LAST_STEP):
            if place + LENGTH >= text.shape[1]:
                hidden, place = None, 0
            given, wanted = (text[:, place + n : place + n + LENGTH] for n in (0, 1))
            place += LENGTH
            optimizer.zero_grad()
            if hidden is not None:
                hidden = tuple(each.detach() for each in hidden)
            predicted, hidden = model(given, hidden)
            loss = criterion(predicted, wanted.reshape(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            run.log(loss=loss, tokens=given.numel())
            optimizer.step()
            if run.over:
                break
    held_out = here.letters(64, LENGTH + 1, torch.Generator().manual_seed(7))
    with torch.no_grad():
        predicted, _ = model(held_out[:, :-1], None)
        here.end(model, float(criterion(predicted, held_out[:, 1:].reshape(-1))), run)


if __name__ == "__main__":
    main()
