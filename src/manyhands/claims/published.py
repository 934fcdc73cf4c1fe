"""Published numbers that findings are compared with, and where they are from."""

from __future__ import annotations

# Goyal et al. 2017 (arXiv 1706.02677), table 1 and 2 and figure 1: top-1 error in percent of ResNet-50 on
# ImageNet by batch, with linear scaling and gradual warm-up; standard deviation over five runs
GOYAL = {
    256: (23.60, 0.12), 512: (23.48, 0.09), 1024: (23.53, 0.08), 2048: (23.49, 0.11), 4096: (23.56, 0.12),
    8192: (23.74, 0.09), 16384: (24.79, 0.27), 32768: (27.55, 0.28), 65536: (33.96, 0.80),
}  # fmt: skip
GOYAL_NO_WARM_UP = {8192: (24.84, 0.37)}

# Shallue et al. 2018 (arXiv 1811.03600), figure 1, digitized (+-0.065 in log2): steps to 99 % with a simple
# CNN on MNIST, Nesterov momentum, tuned for each batch
SHALLUE = {
    1: 65536, 2: 32043, 8: 9161, 32: 2395, 128: 685, 512: 306, 2048: 179, 8192: 196, 32768: 164, 55000: 137,
}  # fmt: skip

# McCandlish et al. 2018 (arXiv 1812.06162), table 1: critical batch and simple noise scale, early in training
# and averaged over training
MCCANDLISH = {
    "MNIST": ((20, 50), (200, 900)),
    "SVHN": ((50, 300), (500, 4000)),
    "CIFAR-10": ((300, 400), (900, 2000)),
    "ImageNet": ((1000, 4000), (15000, 30000)),
}

# TensorFlow benchmarks page, 2017: images/s of VGG-16 (synthetic data, replicated, NCCL) on one to eight
# P100 of a DGX-1 (64 per GPU), and with a parameter server on K80 of EC2 (32 per GPU)
VGG16 = {
    "DGX-1, P100": {1: 154.0, 2: 295.0, 4: 584.0, 8: 1081.0},
    "EC2, K80": {1: 36.3, 2: 69.4, 4: 141.0, 8: 260.0},
}

# Zhang et al. 2016 (arXiv 1511.05950): mean staleness is about the number of learners; with 30 of them plain
# asynchronous SGD fails on CIFAR-10, and with rates divided by the staleness it equals the synchronous one.

# vDNN, Rhu et al. 2016 (arXiv 1602.08124): share of the average GPU memory that is saved, and the time lost
# by VGG-16 at batch 256, which needs 28 GB, on 12 GB
VDNN_SAVED = {"AlexNet": 0.89, "OverFeat": 0.91, "GoogLeNet": 0.95}
VDNN_SLOWER = 0.18
