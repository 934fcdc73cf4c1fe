"""What people bring: one task per row, each as a person would write it, with small public shapes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

import manyhands as mh

os.environ.setdefault("KERAS_BACKEND", "torch")  # as Keras wants it: before it is imported

N, FEATURES, CLASSES, LENGTH, WORDS = 37, 6, 3, 5, 11


def numbers() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (N,), generator=generator)


def words() -> tuple[Tensor, Tensor]:
    """Sentences padded with 0, and their lengths as a mask."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(1, WORDS, (N, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (N, 1), generator=generator)
    mask = torch.arange(LENGTH)[None] < lengths
    return ids * mask, mask.long()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def task(train: Any, test: Any = None, **parts: Any) -> mh.Task:
    usual: dict[str, Any] = {"model": net, "loss": cross_entropy, "target": 0.9}
    return mh.Task(name="brought", train=train, test=train if test is None else test, **usual | parts)


# ---- data


def tensor_dataset() -> mh.Task:
    return task(TensorDataset(*numbers()))


class Squares(Dataset[Any]):
    """A map-style data set; the second half of its classes is random."""

    def __init__(self, *, noisy: bool = False) -> None:
        self.x, self.y = numbers()
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = self.x[index]
        if self.noisy:
            x = x + 0.1 * torch.randn(FEATURES) + random.random() + float(np.random.rand())
        return x, int(self.y[index])


def map_style() -> mh.Task:
    return task(Squares())


def random_transform() -> mh.Task:
    return task(Squares(noisy=True), Squares())


def subset() -> mh.Task:
    train, _ = random_split(Squares(), [30, N - 30], torch.Generator().manual_seed(0))
    return task(train)  # the classes are random: nothing can be learned of the others


def list_of_pairs() -> mh.Task:
    x, y = numbers()
    return task(list(zip(x, y.tolist(), strict=True)))


def loader() -> mh.Task:
    return task(DataLoader(Squares(), batch_size=4, shuffle=True))


def loader_with_workers() -> mh.Task:
    return task(DataLoader(Squares(noisy=True), batch_size=4, num_workers=2), Squares())


def arrays() -> mh.Task:
    x, y = numbers()
    return task((x.double().numpy(), y.numpy()))


def regression() -> mh.Task:
    x, _ = numbers()
    y = x.double().numpy().sum(1, keepdims=True)
    error = mh.Metric(name="error", scores=lambda o, t: (o - t).square().flatten(), higher_is_better=False)
    return task((x.numpy(), y), model=lambda: nn.Linear(FEATURES, 1), loss=nn.MSELoss(), metric=error)


class OwnData:
    """The interface itself."""

    def __len__(self) -> int:
        return N

    def stream(self, requests: Iterable[mh.Request], seed: int) -> Generator[mh.Batch, None, None]:
        x, y = numbers()
        for request in requests:
            yield mh.Batch(x[request.samples.copy()], y[request.samples.copy()])


def own_data() -> mh.Task:
    return task(OwnData())


def hugging_face_data() -> mh.Task:
    import datasets

    x, y = numbers()
    columns = {"x": list(x.numpy()), "label": y.tolist()}
    return task(datasets.Dataset.from_dict(columns), model=Named)


# ---- trees


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(FEATURES, CLASSES), nn.Linear(2, CLASSES)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        out: Tensor = self.left(left).tanh() + self.right(right)
        return out


def two_inputs_by_name() -> mh.Task:
    x, y = numbers()
    return task(mh.ArrayData({"right": x[:, :2], "left": x}, y), model=TwoInputs)


def two_inputs_by_position() -> mh.Task:
    x, y = numbers()
    return task(TensorDataset(x, x[:, :2], y), model=TwoInputs)


@dataclass
class Pair:
    left: Tensor
    right: Tensor


class OfPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoInputs()

    def forward(self, pair: Pair) -> Pair:
        out = self.inner(pair.left, pair.right)
        return Pair(out, out.exp())


def dataclasses_in_and_out() -> mh.Task:
    x, y = numbers()
    correct = mh.Metric(name="correct", scores=lambda o, t: (o.left.argmax(1) == t.right).float())
    return task(
        (Pair(x, x[:, :2]), Pair(x[:, :1], y)),
        model=OfPair,
        loss=lambda o, t: cross_entropy(o.left, t.right) + mse_loss(o.right[:, :1], t.left),
        metric=correct,
    )


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = self.body(x).tanh()
        return self.kind(hidden), {"size": self.size(hidden)}


def several_targets() -> mh.Task:
    x, y = numbers()
    return task(
        (x, {"kind": y, "size": x[:, :1]}),
        model=TwoHeads,
        loss=lambda o, t: cross_entropy(o[0], t["kind"]) + mse_loss(o[1]["size"], t["size"]),
        metric=mh.Metric(name="kind", scores=lambda o, t: o[0].argmax(1) == t["kind"]),
    )


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(WORDS, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.rows(input_ids), attention_mask


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, held: tuple[Tensor, Tensor]) -> dict[str, Any]:
        hidden, mask = held
        return {"hidden": self.inner(hidden).tanh() + hidden, "mask": mask, "scale": 2.0, "nothing": None}


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, CLASSES)

    def forward(self, held: dict[str, Any]) -> Tensor:
        mask = held["mask"][..., None].to(held["hidden"].dtype)
        out: Tensor = self.head((held["hidden"] * mask).sum(1) * held["scale"])
        return out


class Staged(nn.Module):
    """Blocks that hand over a tuple and a dict, with integers, a number and None in them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Embedded(), Mixed(), Pooled()

    def blocks(self) -> list[nn.Module]:
        return [self.first, self.second, self.third]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.third(self.second(self.first(input_ids, attention_mask)))
        return out


def trees_between_blocks() -> mh.Task:
    ids, mask = words()
    return task(({"input_ids": ids, "attention_mask": mask}, numbers()[1]), model=Staged)


def hugging_face_classifier() -> mh.Task:
    from transformers import BertConfig, BertForSequenceClassification

    def bert() -> nn.Module:
        config = BertConfig(
            vocab_size=WORDS, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=LENGTH, num_labels=CLASSES,
        )  # fmt: skip
        return BertForSequenceClassification(config)

    ids, mask = words()
    return task(
        ({"input_ids": ids, "attention_mask": mask}, numbers()[1]),
        model=bert,
        loss=lambda output, labels: cross_entropy(output.logits, labels),
    )


# ---- losses over weights


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.rows(ids).cumsum(1))
        return out


def per_token(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    total = cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def padded_language_model() -> mh.Task:
    ids, mask = words()
    targets = torch.where(mask.bool(), ids, -100).roll(-1, 1)
    targets[:, -1] = -100
    right = mh.Metric(name="tokens", scores=lambda o, t: (o.argmax(2) == t).float().mean(1))
    return task((ids, targets), model=Language, loss=per_token, metric=right)


class Words(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Tensor:
        ids, mask = words()
        return ids[index][mask[index].bool()]


def padded(batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """As long as the longest of the batch."""
    ids = nn.utils.rnn.pad_sequence(batch, batch_first=True)
    return ids, torch.where(ids == 0, -100, ids)


def padded_by_collate() -> mh.Task:
    data = DataLoader(Words(), batch_size=2, collate_fn=padded)
    right = mh.Metric(name="tokens", scores=lambda o, t: (o.argmax(2) == t).float().mean(1))
    return task(data, model=Language, loss=per_token, metric=right)


def class_weights() -> mh.Task:
    def loss(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.tensor([1.0, 5.0, 0.2]).to(outputs)
        return cross_entropy(outputs, targets, weights, reduction="sum"), weights[targets].sum()

    return task(numbers(), loss=loss)


# ---- models


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.rows.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.rows(ids).mean(1))
        return out


def tied() -> mh.Task:
    ids, _ = words()
    return task((ids, ids[:, 0]), model=Tied)


def frozen() -> mh.Task:
    def model() -> nn.Module:
        made = net()
        made[0].requires_grad_(False)
        return made

    return task(numbers(), model=model)


class Unused(Named):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(2, 2)


def unused() -> mh.Task:
    return task(numbers(), model=Unused)


def dropout() -> mh.Task:
    return task(numbers(), model=lambda: nn.Sequential(net(), nn.Dropout(0.5), nn.Linear(CLASSES, CLASSES)))


def batch_norm() -> mh.Task:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))

    return task(numbers(), model=model)


class Residual(nn.Module):
    """A small residual network, with a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (
            nn.Conv2d(1, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Linear(4, CLASSES),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        out: Tensor = self.head((x + self.second(x)).mean((2, 3)))
        return out


def residual() -> mh.Task:
    x, y = numbers()
    return task((x.view(N, 1, 2, 3).numpy(), y), model=Residual)


def recurrent() -> mh.Task:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.lstm, self.head = nn.Embedding(WORDS, 4), nn.LSTM(4, 5), nn.Linear(5, CLASSES)

        def forward(self, ids: Tensor) -> Tensor:
            states, _ = self.lstm(self.rows(ids).transpose(0, 1))
            out: Tensor = self.head(states[-1])
            return out

    return task((words()[0], numbers()[1]), model=Reader)


# ---- Keras


def keras_sequential() -> mh.Task:
    def model() -> nn.Module:
        import keras
        from keras import layers

        inner = [layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(CLASSES)]
        return keras.Sequential([keras.Input((FEATURES,)), *inner])

    return task(numbers(), model=model)


def keras_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    import keras

    out: Tensor = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(targets, outputs)
    return out


def keras_functional() -> mh.Task:
    def model() -> nn.Module:
        import keras
        from keras import layers

        left, right = keras.Input((FEATURES,), name="left"), keras.Input((2,), name="right")
        hidden = layers.concatenate([layers.Dense(8, activation="tanh")(left), right])
        return keras.Model({"left": left, "right": right}, layers.Dense(CLASSES)(hidden))

    x, y = numbers()
    return task(({"left": x, "right": x[:, :2]}, y), model=model, loss=keras_loss)


def keras_inside_torch() -> mh.Task:
    class Head(nn.Module):
        def __init__(self) -> None:
            import keras
            from keras import layers

            super().__init__()
            self.body = keras.Sequential(
                [keras.Input((FEATURES,)), layers.Dense(8), layers.LayerNormalization()]
            )
            self.head = nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.head(self.body(x).relu())
            return out

    return task(numbers(), model=Head)


class Row(NamedTuple):
    """One thing that people bring, and what takes it."""

    make: Callable[[], mh.Task]
    needs: str = ""  # a package
    staged: bool = False  # its model can be divided into stages
    settings: dict[str, Any] = {}  # noqa: RUF012


ROWS = {
    row.make.__name__: row
    for row in (
        Row(tensor_dataset, staged=True),
        Row(map_style, staged=True),
        Row(random_transform),
        Row(subset),
        Row(list_of_pairs),
        Row(loader),
        Row(loader_with_workers, staged=True),
        Row(arrays, staged=True),
        Row(regression),
        Row(own_data, staged=True),
        Row(hugging_face_data, "datasets"),
        Row(two_inputs_by_name),
        Row(two_inputs_by_position),
        Row(dataclasses_in_and_out),
        Row(several_targets),
        Row(trees_between_blocks, staged=True),
        Row(hugging_face_classifier, "transformers"),
        Row(padded_language_model),
        Row(padded_by_collate),
        Row(class_weights, staged=True),
        Row(tied),
        Row(frozen, staged=True),
        Row(unused),
        Row(dropout, staged=True),
        Row(batch_norm, settings={"drop_last": True}),
        Row(residual),
        Row(recurrent),
        Row(keras_sequential, "keras"),
        Row(keras_functional, "keras"),
        Row(keras_inside_torch, "keras"),
    )
}
