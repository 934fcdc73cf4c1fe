"""Saved tensors come back bit for bit, whatever they are views of, and changes in place are noticed."""

import copy
import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.offload.activation_store import DiskStore
from manyhands.offload.offloader import Offload
from manyhands.offload.saved_tensors import SavedTensorLog


@pytest.fixture
def store(emptied):
    found = DiskStore()
    yield found
    empty = emptied(found)
    found.close()
    assert empty, "slots were not given back"


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request):
    return request.param


def moved(store, function, *leaves, held=(), ahead=1 << 20, **options):
    """What the function gives with everything moved."""
    log = SavedTensorLog(store, held, min_bytes=1, ahead=ahead, **options)
    with torch.autograd.graph.saved_tensors_hooks(log.pack, log.unpack):
        return function(*leaves), log


def gradients(function, *leaves) -> list[Tensor]:
    return list(torch.autograd.grad(function(*leaves).sum(), leaves))


def same(ones, others) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def leaf(*size, dtype=torch.float32) -> Tensor:
    return torch.randn(*size, dtype=dtype, requires_grad=True)


FUNCTIONS = {
    "transpose": lambda x: (x * 1).t().exp() @ (x * 1).exp(),
    "one storage, two views": lambda x: (lambda y: y.sin() * y.t().cos() * y[1:, :].sum().sin())(x * 2),
    "expanded": lambda x: (x[:, :1] * 1).expand(-1, 16).sin() * x.sin(),
    "slice at an odd offset": lambda x: (x * 1)[1:, 3:].sin(),
    "channels last": lambda x: (x * 1).reshape(1, 4, 8, -1).to(memory_format=torch.channels_last).sin().cos(),
    "bool mask": lambda x: torch.where(x > 0, (x * 1).sin(), (x * 2).cos()),
    "indices": lambda x: functional.max_pool2d((x * 1).reshape(1, 1, 16, -1), 2).sin(),
    "empty": lambda x: torch.cat([(x * 1)[:0].sin(), (x * 1).sin()]),
    "complex": lambda x: torch.view_as_real(torch.complex(x * 1, x * 2).exp()).sin(),
    "conjugate": lambda x: (torch.complex(x * 1, x * 2).conj() * torch.complex(x * 3, x)).abs(),
    "other width": lambda x: (x * 1).double().sin().float().cos(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_views_and_kinds(store, dtype, name):
    function = FUNCTIONS[name]
    x = leaf(16, 16, dtype=dtype)
    expected = gradients(function, x)
    outputs, _ = moved(store, function, x)
    assert same(torch.autograd.grad(outputs.sum(), x), expected)


def test_a_storage_is_moved_once_however_many_views_of_it_are_saved(store):
    x = leaf(64, 64)

    def function(x):
        y = x.exp()  # saves y
        return y.sin() + y.t().cos() + y.view(-1)[10:].sum()

    outputs, log = moved(store, function, x, held=[x])
    assert len([r for r in log.spans if r() is not None]) == 1
    assert same(torch.autograd.grad(outputs.sum(), x), gradients(function, x))


def test_parameters_and_their_transposes_stay(store):
    weight = nn.Parameter(torch.randn(32, 32))
    x = leaf(8, 32)
    outputs, log = moved(store, lambda x: functional.linear(x, weight) @ weight.t(), x, held=[weight, x])
    pointers = {r().stored.nbytes for r in log.spans}
    assert pointers == {8 * 32 * 4}  # what is between the two products
    outputs.sum().backward()


def test_a_leaf_that_the_module_does_not_call_its_own_stays(store):
    weight = leaf(32, 32)
    _, log = moved(store, lambda x: x @ weight.t(), leaf(8, 32))
    assert log.spans == []


def test_parts_of_a_storage_that_count_changes_by_themselves(store):
    x = leaf(8, 64)

    def function(x):
        one, two = (x * 1).unsafe_chunk(2, dim=0)
        return one.sigmoid_().sum() + two.tanh_().sum()  # the second changes the storage of the first

    expected = gradients(function, x)
    outputs, _ = moved(store, function, x)
    assert same(torch.autograd.grad(outputs, x), expected)


def test_unpacked_twice(store, dtype):
    x = leaf(32, 32, dtype=dtype)
    outputs, _ = moved(store, lambda x: x.exp().sin().cos(), x)
    expected = gradients(lambda x: x.exp().sin().cos(), x)
    for _ in range(3):
        assert same(torch.autograd.grad(outputs.sum(), x, retain_graph=True), expected)


def test_double_backward_is_right(store, dtype):
    x = leaf(16, 16, dtype=dtype)

    def second(outputs):
        (first,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)

    outputs, _ = moved(store, lambda x: (x * 2).exp().sin(), x)
    assert same(second(outputs), second((x * 2).exp().sin()))


@pytest.mark.parametrize("moving", [True, False])
@pytest.mark.parametrize("small", [True, False])
def test_a_saved_tensor_changed_in_place_is_noticed(store, moving, small):
    x = leaf(32, 32)
    log = SavedTensorLog(store, [], min_bytes=1 << 20 if small else 1, moving=moving)
    with torch.autograd.graph.saved_tensors_hooks(log.pack, log.unpack):
        y = x.exp()
        outputs = y.sin()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()


def test_a_small_view_does_not_keep_a_large_storage(store):
    x = leaf(1 << 20)
    log = SavedTensorLog(store, [x], min_bytes=256 * 1024)
    with torch.autograd.graph.saved_tensors_hooks(log.pack, log.unpack):
        large = x * 1
        alive = torch.multiprocessing.reductions.StorageWeakRef(large.untyped_storage())
        outputs = large[5:100].sin()
        del large
    assert alive.expired()
    outputs.sum().backward()
    assert torch.equal(x.grad[5:100], x.detach()[5:100].cos())


def test_memory_is_freed_while_the_graph_waits(store):
    x = leaf(1 << 18)
    log = SavedTensorLog(store, [x], min_bytes=1)
    with torch.autograd.graph.saved_tensors_hooks(log.pack, log.unpack):
        y = x.exp()
        alive = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
        outputs = y.sin()
        del y
    span = log.spans[0]()
    for _ in range(500):
        if alive.expired():
            break
        time.sleep(0.01)
    assert alive.expired()
    assert span.stored.state == "stored"
    del span
    outputs.sum().backward()


def test_a_new_tensor_at_an_old_address_is_not_taken_for_the_old_one(store):
    torch.manual_seed(0)
    x = leaf(1 << 16)

    def function(x):
        total = 0
        for number in range(20):  # each is freed and the next gets its address
            total = total + (x * number).sin().sum()
        return total

    outputs, log = moved(store, function, x, held=[x])
    assert len(log.spans) == 20
    assert same(torch.autograd.grad(outputs, x), gradients(function, x))


def test_graphs_in_flight_and_graphs_that_are_dropped(store):
    x = leaf(128, 128)
    function = lambda x: x.exp().sin().cos()  # noqa: E731
    expected = gradients(function, x)
    graphs = [moved(store, function, x)[0] for _ in range(4)]
    del graphs[1]
    for outputs in (graphs[2], graphs[0], graphs[1]):
        assert same(torch.autograd.grad(outputs.sum(), x), expected)
    assert moved(store, function, x)[0].requires_grad  # dropped without backward


def test_sparse_tensors_stay(store):
    x = leaf(16, 16)
    matrix = torch.eye(16).to_sparse()
    outputs, log = moved(store, lambda x: torch.sparse.mm(matrix, x.exp()), x)
    assert same(
        torch.autograd.grad(outputs.sum(), x), gradients(lambda x: torch.sparse.mm(matrix, x.exp()), x)
    )
    assert len(log.spans) == 1


def test_an_exception_in_forward_gives_everything_back(store, emptied):
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError("broken")

    x = leaf(64, 64)
    with pytest.raises(ValueError, match="broken"):
        moved(store, lambda x: Broken()(x.exp().sin()), x)
    assert emptied(store)


def test_deep_copies_are_modules_of_their_own():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))
    offload, inputs = Offload("all"), torch.randn(256, 64)
    twin = copy.deepcopy(model)
    offload.run(model, inputs).sum().backward()
    third = copy.deepcopy(model)
    third.zero_grad()
    for other in (twin, third):
        offload.run(other, inputs).sum().backward()
        assert same([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
    offload.close()
