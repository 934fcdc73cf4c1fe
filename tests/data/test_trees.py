"""Trees keep their form, travel without code, and are taken by models as people write them."""

from __future__ import annotations

import json
from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from manyhands.core.errors import UsageError
from manyhands.data import trees
from manyhands.data.call import call


@dataclass(frozen=True)
class Point:
    x: Any
    y: Any = None


class Both(NamedTuple):
    one: Any
    other: Any


LEAVES = st.one_of(
    st.integers(0, 3).map(lambda n: torch.arange(n + 1.0)),
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=3),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.builds(Point, inner, inner),
        st.builds(Both, inner, inner),
    ),
    max_leaves=8,
)


@given(TREES)
def test_a_tree_travels_as_json_and_tensors(tree: Any) -> None:
    sent = json.loads(json.dumps(trees.structure(tree)))
    parts = iter(trees.tensors(tree))
    found = trees.rebuild(sent, parts)
    assert trees.equal(found, tree)
    assert next(parts, None) is None
    assert type(found) is type(tree) or isinstance(tree, Tensor)


@given(TREES)
def test_a_map_changes_tensors_and_nothing_else(tree: Any) -> None:
    doubled = trees.mapped(lambda tensor: tensor * 2, tree)
    assert trees.structure(doubled) == trees.structure(tree)
    for one, two in zip(trees.tensors(tree), trees.tensors(doubled), strict=True):
        assert torch.equal(two, one * 2)
    assert (
        not trees.tensors(tree)
        or not trees.equal(tree, doubled)
        or all(not tensor.any() for tensor in trees.tensors(tree))
    )


@pytest.mark.parametrize("mapping", [OrderedDict, UserDict])
def test_any_mapping_becomes_a_dict(mapping: Any) -> None:
    found = trees.mapped(Tensor.neg, mapping({"a": torch.ones(2)}))
    assert type(found) is dict
    assert found["a"].tolist() == [-1, -1]


def test_leaves_have_names() -> None:
    tree = {"mask": torch.ones(1), "pair": (1, Point(None, "text"))}
    assert [name for name, _ in trees.named(tree, "inputs")] == [
        "inputs.mask", "inputs.pair[0]", "inputs.pair[1].x", "inputs.pair[1].y",
    ]  # fmt: skip


def test_rows_of_a_tree_and_its_size() -> None:
    tree = Point(torch.tensor(3.0), {"a": torch.arange(5)})
    assert trees.size(None, tree) == 5
    few = trees.rows(tree, slice(1, 3))
    assert (few.x.item(), few.y["a"].tolist()) == (3.0, [1, 2])
    assert trees.size("nothing") == 0


def test_no_class_is_loaded_because_a_message_names_it() -> None:
    for name in ("subprocess:Popen", "not_loaded:Thing", f"{__name__}:Named", "os:system"):
        with pytest.raises(UsageError, match="not a dataclass or a named tuple that every worker has loaded"):
            trees.rebuild({"class": name, "fields": []}, iter(()))
    with pytest.raises(UsageError, match=r"^a set cannot be sent between stages: send tensors$"):
        trees.structure({1, 2})


class Named(nn.Module):
    def forward(self, left: Tensor, right: Tensor | None = None) -> Any:
        return left, right


class One(nn.Module):
    def forward(self, batch: Any) -> Any:
        return batch


class Anything(nn.Module):
    def forward(self, *values: Tensor, **named: Tensor) -> Any:
        return values, named


A, B = torch.zeros(1), torch.ones(1)


@pytest.mark.parametrize(
    ("module", "inputs", "gets"),
    [
        (Named(), A, (A, None)),
        (Named(), (A, B), (A, B)),
        (Named(), [A, B], (A, B)),
        (Named(), {"right": B, "left": A}, (A, B)),
        (Named(), (A,), (A, None)),
        (Named(), Point(A, B), (Point(A, B), None)),
        (One(), (A, B), (A, B)),
        (One(), {"left": A}, {"left": A}),
        (One(), {"batch": A}, A),
        (nn.Sequential(One()), (A, B), (A, B)),
        (nn.Sequential(One()), {"left": A}, {"left": A}),
        (Anything(), (A, B), ((A, B), {})),
        (Anything(), {"left": A}, ((), {"left": A})),
        (Anything(), Both(A, B), ((Both(A, B),), {})),
        (nn.DataParallel(Named()), {"right": B, "left": A}, (A, B)),
        (nn.DataParallel(One()), {"right": B, "left": A}, {"right": B, "left": A}),
    ],
)
def test_how_a_model_takes_its_inputs(module: nn.Module, inputs: Any, gets: Any) -> None:
    assert repr(call(module, inputs)) == repr(gets)
    assert repr(call(module, inputs)) == repr(gets)  # as decided the first time
