"""A small GPT on sentences of any length: manyhands verify examples/gpt.py:gpt --workers 2

The loss is the mean over tokens, not over sentences: it returns the sum and the number of tokens, so that the
result does not depend on how the sentences are divided over workers.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import manyhands as mh

TEXT = Path(__file__).read_text() * 3  # this file, letter by letter
LETTERS = sorted(set(TEXT))
LINES = [torch.tensor([LETTERS.index(c) for c in line + "\n"]) for line in TEXT.split("\n") if line]


class Gpt(nn.Module):
    """Letters before a place predict the letter there."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(200, width)
        layer = nn.TransformerEncoderLayer(
            width, 2, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits, one row per place."""
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, ids.device, self.head.weight.dtype)
        return self.head(self.body(self.letters(ids) + self.places.weight[:length], mask, is_causal=True))


def padded(lines: list[Tensor]) -> tuple[Tensor, Tensor]:
    """As long as the longest of the batch; -100 does not count."""
    ids = nn.utils.rnn.pad_sequence(lines, batch_first=True)
    targets = nn.utils.rnn.pad_sequence(lines, batch_first=True, padding_value=-100)
    return ids[:, :-1], targets[:, 1:]


def per_token(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over all letters, and how many there are."""
    total = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def right(logits: Tensor, targets: Tensor) -> Tensor:
    """The share of right letters of each line."""
    counts = targets != -100
    return ((logits.argmax(2) == targets) & counts).sum(1) / counts.sum(1).clamp(min=1)


def gpt(width: int = 32, layers: int = 2) -> mh.Task:
    """Predict the next letter of this file."""
    return mh.Task(
        name="gpt",
        model=lambda: Gpt(width, layers),
        train=DataLoader(LINES, batch_size=16, shuffle=True, collate_fn=padded),
        test=DataLoader(LINES[:40], batch_size=16, collate_fn=padded),
        loss=per_token,
        target=0.5,
        metric=mh.Metric(name="letters", scores=right),
        unit="lines",
        defaults=mh.Defaults(
            batch=16, epochs=20, recipe="constant", recipe_options={"optimizer": "adam", "lr": 0.003}
        ),
    )
