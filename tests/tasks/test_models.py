import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from manyhands.core.errors import UsageError
from manyhands.tasks.models.resnet import PadShortcut, Residual, resnet50, small_resnet
from manyhands.tasks.models.vgg import vgg19


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def on_paper(build, *arguments, **options) -> nn.Sequential:
    """A model of which only the shapes exist: as quick to build as it is to describe."""
    with torch.device("meta"):
        return build(*arguments, **options)


def seeded(build, *arguments, **options) -> nn.Sequential:
    torch.manual_seed(3)
    return build(*arguments, **options)


# Residual networks


@pytest.mark.parametrize(
    ("depth", "count"),  # table 6 of He et al. in exact numbers: 0.27M, 0.46M, 0.66M, 0.85M, 1.7M
    [(8, 75_290), (20, 269_722), (32, 464_154), (44, 658_586), (56, 853_018), (110, 1_727_962)],
)
def test_residual_networks_for_small_images_have_the_published_sizes(depth, count):
    assert parameters(on_paper(small_resnet, depth=depth)) == count


def test_resnet50_has_the_published_size():
    assert parameters(on_paper(resnet50)) == 25_557_032


def test_width_channels_and_classes_of_a_small_residual_network():
    model = seeded(small_resnet, depth=8, classes=7, channels=1, width=2)
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 7)
    assert [layer.body[0].out_channels for layer in model if isinstance(layer, Residual)] == [32, 64, 128]


@pytest.mark.parametrize("depth", [-4, 2, 7, 21])
def test_a_depth_that_no_such_network_has(depth):
    with pytest.raises(UsageError) as error:
        small_resnet(depth=depth)
    sentence = f"a residual network for small images has 8, 14, 20, ... (6n + 2) layers, not {depth}"
    assert str(error.value) == sentence


def test_the_shortcut_without_parameters_takes_every_second_pixel_and_pads_with_zeros():
    x = torch.randn(2, 2, 5, 5)
    y = PadShortcut(2, 5, stride=2)(x)
    assert y.shape == (2, 5, 3, 3)
    assert torch.equal(y[:, 1:3], x[:, :, ::2, ::2])
    assert not y[:, [0, 3, 4]].any()


@pytest.mark.parametrize("build", [small_resnet, resnet50])
def test_a_new_residual_block_is_its_shortcut(build):
    model = seeded(build)
    blocks = [layer for layer in model if isinstance(layer, Residual)]
    assert len(blocks) == {small_resnet: 9, resnet50: 16}[build]
    for block in blocks:
        x = torch.randn(2, block.body[0].in_channels, 4, 4)
        assert torch.equal(block(x), torch.relu(block.shortcut(x)))


def test_resnet50_has_its_strides_in_the_three_by_three_convolutions():
    model = on_paper(resnet50)
    strided = [layer for layer in model[0].modules() if isinstance(layer, nn.Conv2d)]
    assert [layer.stride for layer in strided] == [(2, 2)]
    bodies = [layer.body for layer in model if isinstance(layer, Residual)]
    strides = [[part.stride[0] for part in body if isinstance(part, nn.Conv2d)] for body in bodies]
    assert [place for place, stride in enumerate(strides) if stride == [1, 2, 1]] == [3, 7, 13]
    assert strides.count([1, 1, 1]) == 13
    assert model(torch.empty(1, 3, 224, 224, device="meta")).shape == (1, 1000)
    assert model[:-1](torch.empty(1, 3, 224, 224, device="meta")).shape == (1, 2048, 7, 7)


def test_residual_networks_start_as_goyal_says():
    model = seeded(resnet50, classes=10)
    convolution, head = model[-2].body[3], model[-1][-1]
    assert convolution.kernel_size == (3, 3)
    assert convolution.weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 512)), rel=0.01)
    assert head.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert not head.bias.any()


# VGG-19


def test_vgg19_has_the_published_size():
    assert parameters(on_paper(vgg19, 1000, norm=False)) == 143_667_240
    # batch norm: 2 numbers a channel instead of 1 bias
    assert parameters(on_paper(vgg19, 1000)) == 143_667_240 + 5_504


@pytest.mark.parametrize(("size", "features"), [(32, 512), (64, 2048), (224, 25_088)])
def test_the_classifier_of_vgg19_is_made_for_the_size_of_the_images(size, features):
    model = on_paper(vgg19, 4, size=size, hidden=8)
    first, second, last = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
    assert (first.in_features, second.in_features, last.in_features) == (features, 8, 8)
    assert model(torch.empty(2, 3, size, size, device="meta")).shape == (2, 4)


def test_vgg19_has_sixteen_convolutions_and_the_dropout_asked_for():
    model = on_paper(vgg19, 4, dropout=0.25)
    assert sum(isinstance(layer, nn.Conv2d) for layer in model.modules()) == 16
    assert [layer.p for layer in model.modules() if isinstance(layer, nn.Dropout)] == [0.25, 0.25]


@pytest.mark.parametrize("size", [-32, 0, 16, 31, 100])
def test_a_size_that_vgg19_cannot_have(size):
    with pytest.raises(UsageError) as error:
        vgg19(4, size=size)
    sentence = f"VGG-19 needs images whose size is a multiple of 32 and at least 32, not {size}"
    assert str(error.value) == sentence


def test_vgg19_starts_with_loud_convolutions_and_a_quiet_classifier():
    model = seeded(vgg19, 4, size=32, norm=False, hidden=64)
    convolutions = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]
    assert convolutions[-1].weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 512)), rel=0.01)
    assert not any(layer.bias.any() for layer in convolutions)
    first = model[-3][0]
    assert first.weight.std().item() == pytest.approx(0.01, rel=0.05)


def test_without_batch_norm_two_pictures_still_differ_after_the_convolutions():
    # with torch's own start what tells them apart shrinks to a few parts in a hundred million
    model = seeded(vgg19, 4, size=32, norm=False, hidden=8)
    pictures = torch.randn(2, 3, 32, 32)
    seen = model[:21](pictures)
    assert 0.001 < (seen[0] - seen[1]).std() / (pictures[0] - pictures[1]).std() < 10


# Both


@pytest.mark.parametrize(
    ("build", "options", "size"),
    [
        (small_resnet, {"depth": 8}, 32),
        (resnet50, {"classes": 4}, 64),
        (vgg19, {"classes": 4, "size": 32, "hidden": 8}, 32),
        (vgg19, {"classes": 4, "size": 32, "hidden": 8, "norm": False}, 32),
    ],
)
def test_models_can_be_cut_between_any_two_layers_and_learn_in_all_of_them(build, options, size):
    model = seeded(build, **options)
    x = torch.randn(2, 3, size, size)
    model.eval()
    with torch.no_grad():
        whole = model(x)
        for cut in range(1, len(model), 3):
            assert torch.equal(model[cut:](model[:cut](x)), whole)
    # a stage of a pipeline receives a leaf that wants a gradient: nothing may be done to it in place
    for cut in range(1, len(model)):
        received = model[:cut](x).detach().requires_grad_()
        model[cut](received)
    model.train()
    functional.cross_entropy(model(x), torch.tensor([0, 1])).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@pytest.mark.parametrize("build", [lambda: small_resnet(depth=8), lambda: vgg19(4, size=32, hidden=8)])
def test_the_same_seed_builds_the_same_model(build):
    first, second = seeded(build).state_dict(), seeded(build).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_small_residual_network_learns_eight_pictures_by_heart():
    model = seeded(small_resnet, depth=8, classes=4)
    x, y = torch.randn(8, 3, 16, 16), torch.arange(8) % 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(60):
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
