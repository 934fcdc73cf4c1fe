"""A residual network on numpy arrays: manyhands train examples/residual.py:residual --workers 2"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import manyhands as mh


class Block(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.inner = nn.Sequential(*layers, nn.Conv2d(width, width, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        """The input and what the convolutions make of it."""
        return torch.relu(x + self.inner(x))


def residual(width: int = 16, depth: int = 2) -> mh.Task:
    """Tell handwritten digits apart."""
    pixels, digits = load_digits(return_X_y=True)  # numpy arrays, 8 x 8 pixels each
    images = pixels.reshape(-1, 1, 8, 8)

    def model() -> nn.Module:
        stem, head = nn.Conv2d(1, width, 3, padding=1), nn.Linear(width, 10)
        blocks = [Block(width) for _ in range(depth)]
        return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)

    return mh.Task(
        name="residual",
        model=model,
        train=(images[:1500], digits[:1500]),
        test=(images[1500:], digits[1500:]),
        loss=nn.functional.cross_entropy,
        target=0.9,
        preprocess=mh.Scale(mean=0.02, std=0.024),
        defaults=mh.Defaults(
            batch=64, epochs=10, recipe_options={"lr": 0.4, "decay": "cosine", "warmup": 0.5}
        ),
    )
