"""SGD on sparse gradients: only the rows that they name are written, and never decayed."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from children import Child
from manyhands.core.errors import UsageError
from manyhands.recipes.base import Recipe
from manyhands.recipes.members import constant, lamb, large_batch, lars
from manyhands.recipes.optimizers import SparseSgd, build, set_lr, undecayed

SPARSE = {"embedding.weight"}


class Reader(nn.Module):
    """A sparse embedding, and dense parameters after it."""

    def __init__(self, width: int, *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, width, sparse=sparse)
        self.linear = nn.Linear(width, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding(rows))


def optimizer_of(model: nn.Module, recipe: Recipe) -> SparseSgd:
    made = build(recipe, model.named_parameters(), undecayed(model), sparse=SPARSE)
    assert isinstance(made, SparseSgd)
    return made


widths = pytest.mark.parametrize("width", [1, 4])


@widths
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_steps_equal_those_of_torch_on_whole_gradients(width: int, decay: float) -> None:
    """Rows that a batch reads twice included."""
    ours, theirs = Reader(width).double(), Reader(width, sparse=False).double()
    optimizer = optimizer_of(ours, constant(lr=0.5, weight_decay=decay))
    spared = [p for name, p in theirs.named_parameters() if name != "linear.weight"]
    reference = SGD(
        [{"params": [theirs.linear.weight], "weight_decay": decay}, {"params": spared}], lr=0.5, fused=False
    )
    for step, rows in enumerate([[1, 1, 4], [4, 0, 11], [1], [2, 2, 2, 2]]):
        rate = 0.5 / (1 + step)
        set_lr(optimizer, rate)
        set_lr(reference, rate)
        for model, chosen in ((ours, optimizer), (theirs, reference)):
            model(torch.tensor(rows)).square().sum().backward()
            chosen.step()
            chosen.zero_grad()
        for name, parameter in ours.named_parameters():
            assert parameter.grad is None
            other = theirs.get_parameter(name)
            torch.testing.assert_close(parameter, other, rtol=1e-13, atol=1e-15, msg=name)


@widths
def test_rows_that_no_gradient_names_keep_their_bits(width: int) -> None:
    """NaN survives no arithmetic with its payload: whatever is computed on a row would show."""
    model = Reader(width)
    optimizer = optimizer_of(model, constant(lr=0.5, weight_decay=0.1))
    canary = torch.tensor(0x7FC0BEE5, dtype=torch.int32).view(torch.float32)
    with torch.no_grad():
        model.embedding.weight[[0, 2, 3, 5, 6, 7, 8, 9, 10, 11]] = canary
    before = model.embedding.weight.detach().clone().view(torch.int32)
    for rows in ([1, 4], [4, 4], [1]):
        model(torch.tensor(rows)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = model.embedding.weight.detach().view(torch.int32)
    assert [row for row in range(12) if not torch.equal(before[row], after[row])] == [1, 4]


PROTECTED = """
import ctypes, itertools, mmap, os
import torch
from manyhands.recipes.members import constant
from manyhands.recipes.optimizers import build

torch.set_num_threads(1)
page, libc = mmap.PAGESIZE, ctypes.CDLL(None)
for width, kind in itertools.product((1, 4), ("sparse", "whole")):
    memory = mmap.mmap(-1, 2 * page)
    weight = torch.frombuffer(memory, dtype=torch.float32).view(-1, width)
    gradient = torch.sparse_coo_tensor([[0, 3, 3]], torch.ones(3, width), weight.shape, check_invariants=True)
    weight.grad = gradient if kind == "sparse" else gradient.to_dense()
    optimizer = build(constant(lr=1.0), [("weight", weight)], {"weight"}, sparse={"weight"})
    if not (child := os.fork()):
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert libc.mprotect(ctypes.c_void_p(address + page), page, mmap.PROT_READ) == 0
        optimizer.step()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(width, kind, code, weight[:4, 0].tolist() if code == 0 else "", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="pages are protected the way Linux does it")
def test_the_memory_of_other_rows_is_not_written_to(tmp_path: Path) -> None:
    """Hogwild: a row written back as it was read would undo what another worker wrote in between.

    The second page may only be read, so a kernel that writes every row dies of it; a whole gradient shows
    that it would.
    """
    (tmp_path / "protected.py").write_text(PROTECTED)
    child = Child(str(tmp_path / "protected.py"), folder=tmp_path)
    assert child.end() == 0, child.output
    rows, killed = "[-1.0, 0.0, 0.0, -2.0]", -signal.SIGSEGV
    expected = f"1 sparse 0 {rows}\n1 whole {killed:d} \n4 sparse 0 {rows}\n4 whole {killed:d} \n"
    assert child.output == expected


def test_sparse_parameters_are_never_decayed() -> None:
    model = Reader(3)
    assert undecayed(model) == {"embedding.weight", "linear.bias"}
    assert undecayed(Reader(3, sparse=False)) == {"linear.bias"}
    recipe = constant(weight_decay=0.1)
    decayed, spared = build(recipe, model.named_parameters(), set(), sparse=SPARSE).param_groups
    assert (decayed["names"], decayed["weight_decay"]) == (["linear.weight", "linear.bias"], 0.1)
    assert (spared["names"], spared["weight_decay"]) == (["embedding.weight"], 0.0)


def test_a_sparse_parameter_may_have_a_whole_gradient() -> None:
    """As it does where a layer reads all of it too: tied to the last layer of a language model."""
    model = Reader(3)
    optimizer = optimizer_of(model, constant(lr=0.5))
    before = model.embedding.weight.detach().clone()
    (model.embedding(torch.tensor([1])).sum() + model.embedding.weight.sum()).backward()
    assert not model.embedding.weight.grad.is_sparse
    optimizer.step()
    moved = before - model.embedding.weight
    torch.testing.assert_close(moved[:, 0], torch.where(torch.arange(12) == 1, 1.0, 0.5))


def test_without_sparse_names_nothing_changes() -> None:
    model = Reader(3, sparse=False)
    made = build(constant(), model.named_parameters(), undecayed(model), sparse=())
    assert isinstance(made, SGD)
    assert all(group["fused"] for group in made.param_groups)
    frozen = Reader(3)
    frozen.embedding.requires_grad_(False)
    assert isinstance(build(large_batch(), frozen.named_parameters(), set(), sparse=SPARSE), SGD)


def test_gradients_may_be_missing_and_zeroed_in_place() -> None:
    model = Reader(1)
    optimizer = optimizer_of(model, constant(lr=0.5))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))

    def closure() -> float:
        loss = model(torch.tensor([1, 1])).sum()
        loss.backward()
        return loss.item()

    assert isinstance(optimizer.step(closure), float)
    optimizer.zero_grad(set_to_none=False)
    assert not model.linear.weight.grad.any()
    optimizer.zero_grad()
    assert [parameter.grad for parameter in model.parameters()] == [None] * 3


@pytest.mark.parametrize(
    ("recipe", "got"),
    [
        (constant(momentum=0.9), "sgd with momentum 0.9"),
        (large_batch(), "sgd with nesterov momentum 0.9"),
        (constant(optimizer="adam"), "adam"),
        (large_batch(optimizer="adamw"), "adamw"),
        (lars(), "lars"),
        (lamb(), "lamb"),
    ],
    ids=lambda value: value.optimizer if isinstance(value, Recipe) else "",
)
def test_what_would_move_every_row_is_refused(recipe: Recipe, got: str) -> None:
    with pytest.raises(UsageError) as error:
        build(recipe, Reader(3).named_parameters(), set(), sparse=SPARSE)
    sentence = f"sparse gradients (embedding.weight) need plain sgd without momentum, got {got}"
    assert str(error.value) == sentence


def test_all_sparse_parameters_are_named() -> None:
    model = nn.ModuleList([nn.Embedding(2, 2, sparse=True), nn.EmbeddingBag(2, 2, sparse=True)])
    with pytest.raises(UsageError, match=r"^sparse gradients \(0\.weight, 1\.weight\) need plain sgd"):
        build(lamb(), model.named_parameters(), set(), sparse={"1.weight", "0.weight"})
