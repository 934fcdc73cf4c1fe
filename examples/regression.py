"""A regression on a torch Dataset: manyhands train examples/regression.py:diabetes"""

import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.utils.data import Dataset, random_split

import manyhands as mh


class Patients(Dataset):
    """Ten measurements of each patient, and how the disease went on."""

    def __init__(self) -> None:
        features, progress = load_diabetes(return_X_y=True, scaled=False)
        self.features = torch.tensor((features - features.mean(0)) / features.std(0))
        self.progress = torch.tensor((progress - progress.mean()) / progress.std())

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.05 * torch.randn(10)  # the same for the same seed, epoch and patient, whoever reads it
        return self.features[index] + noise, self.progress[index : index + 1]


def diabetes(width: int = 32) -> mh.Task:
    """Predict the progress of diabetes: 442 patients, of which 342 are learned from."""
    train, test = random_split(Patients(), [342, 100], torch.Generator().manual_seed(0))
    return mh.Task(
        name="diabetes",
        model=lambda: nn.Sequential(nn.Linear(10, width), nn.Tanh(), nn.Linear(width, 1)),
        train=train,
        test=test,
        loss=nn.functional.mse_loss,
        target=0.6,
        metric=mh.Metric(
            name="squared error",
            scores=lambda outputs, targets: (outputs - targets).square().flatten(),
            higher_is_better=False,
        ),
        defaults=mh.Defaults(batch=32, epochs=10, recipe_options={"lr": 0.1, "decay": "cosine"}),
    )
