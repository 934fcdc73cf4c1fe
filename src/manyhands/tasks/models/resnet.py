"""Residual networks (He et al. 2015) as a flat sequence of blocks, for pipelines."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.core.errors import UsageError


def conv_norm(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution without bias, padded to keep the size (with stride 1), and a batch norm."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]


class PadShortcut(nn.Module):
    """Option A of He et al.: every second pixel, and zeros for new channels. No parameters."""

    uses_all_members = True  # strategies/data_parallel/used_parameters.py

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.before = (outputs - inputs) // 2
        self.after = outputs - inputs - self.before

    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


class Residual(nn.Module):
    """relu(shortcut(x) + body(x)). The last gamma of the body starts at 0, so a new block is its shortcut."""

    uses_all_members = True  # in every call

    def __init__(self, body: list[nn.Module], shortcut: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.shortcut(x) + self.body(x))


def basic(inputs: int, outputs: int, stride: int) -> Residual:
    """Two 3x3 convolutions, with a shortcut that has no parameters."""
    body = [
        *conv_norm(inputs, outputs, 3, stride),
        nn.ReLU(inplace=True),
        *conv_norm(outputs, outputs, 3),
    ]
    same = stride == 1 and inputs == outputs
    return Residual(body, nn.Identity() if same else PadShortcut(inputs, outputs, stride))


def bottleneck(inputs: int, width: int, stride: int) -> Residual:
    """1x1, 3x3, 1x1 convolutions with the stride in the 3x3 one (Goyal et al. 2017)."""
    outputs = 4 * width
    body = [
        *conv_norm(inputs, width, 1),
        nn.ReLU(inplace=True),
        *conv_norm(width, width, 3, stride),
        nn.ReLU(inplace=True),
        *conv_norm(width, outputs, 1),
    ]
    same = stride == 1 and inputs == outputs
    return Residual(body, nn.Identity() if same else nn.Sequential(*conv_norm(inputs, outputs, 1, stride)))


def head(features: int, classes: int) -> nn.Sequential:
    """The mean over all pixels, then one linear layer."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, classes))


DEEPEST = 6_002  # layers: several times the deepest published network; far more would take too long to build


def small_resnet(
    *, depth: int = 20, classes: int = 10, channels: int = 3, width: int = 1, stride: int = 1
) -> nn.Sequential:
    """For small images (He et al. 2015, section 4.2): 6n + 2 layers, widths 16, 32 and 64 times `width`.

    `stride` is that of the first convolution: with 2, a step takes about a fourth of the time.
    """
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise UsageError(
            f"a residual network for small images has 8, 14, 20, ... (6n + 2) layers, not {depth}"
        )
    if depth > DEEPEST:
        raise UsageError(f"a residual network for small images has at most {DEEPEST:,} layers, not {depth:,}")
    layers: list[nn.Module] = [
        nn.Sequential(*conv_norm(channels, 16 * width, 3, stride), nn.ReLU(inplace=True))
    ]
    features = 16 * width
    for stage, outputs in enumerate((16 * width, 32 * width, 64 * width)):
        for block in range(blocks):
            layers.append(basic(features, outputs, stride=2 if stage > 0 and block == 0 else 1))
            features = outputs
    return initialize(nn.Sequential(*layers, head(features, classes)))


def resnet50(*, classes: int = 1000) -> nn.Sequential:
    """ResNet-50 for images of about 224 x 224 pixels: 25,557,032 parameters with 1000 classes."""
    stem = nn.Sequential(*conv_norm(3, 64, 7, stride=2), nn.ReLU(inplace=True))
    layers: list[nn.Module] = [stem, nn.MaxPool2d(3, stride=2, padding=1)]
    features = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            layers.append(bottleneck(features, width, stride=2 if stage > 0 and block == 0 else 1))
            features = 4 * width
    return initialize(nn.Sequential(*layers, head(features, classes)))


def initialize(network: nn.Sequential) -> nn.Sequential:
    """He's normal for convolutions, std 0.01 for the head, gamma 0 at each block's end (Goyal et al.)."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
        elif isinstance(module, Residual):
            last = module.body[-1]
            assert isinstance(last, nn.BatchNorm2d)
            nn.init.zeros_(last.weight)
    return network
