"""A Hugging Face classifier: pip install 'manyhands[huggingface]'; manyhands train examples/bert.py:bert

The model is built from a configuration, without a download. The data are a Hugging Face data set in memory:
the columns are the arguments of the model, and `label` is the target.
"""

import random

from datasets import Dataset
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification

import manyhands as mh

LENGTH, WORDS = 12, 50


def sentences(n: int, seed: int) -> Dataset:
    """Sequences of numbers; the class is whether a 7 is among them. Padded with 0."""
    chance = random.Random(seed)
    rows: dict[str, list] = {"input_ids": [], "attention_mask": [], "label": []}
    for _ in range(n):
        ids = [chance.randrange(1, WORDS) for _ in range(chance.randrange(4, LENGTH + 1))]
        if chance.random() < 0.5:
            ids[chance.randrange(len(ids))] = 7
        rows["label"].append(int(7 in ids))
        rows["input_ids"].append(ids + [0] * (LENGTH - len(ids)))
        rows["attention_mask"].append([1] * len(ids) + [0] * (LENGTH - len(ids)))
    return Dataset.from_dict(rows)


def network() -> nn.Module:
    """A small BERT."""
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def bert(n: int = 2000) -> mh.Task:
    """Is there a 7?"""
    return mh.Task(
        name="bert",
        model=network,
        train=sentences(n, seed=1),
        test=sentences(400, seed=2),
        loss=lambda output, labels: cross_entropy(output.logits, labels),
        target=0.9,
        defaults=mh.Defaults(
            batch=32, epochs=2, recipe="constant", recipe_options={"optimizer": "adamw", "lr": 0.002}
        ),
    )
