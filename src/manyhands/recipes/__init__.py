"""A recipe turns a batch size into an optimizer and a learning-rate schedule. One row per recipe."""

from __future__ import annotations

from manyhands.core.registry import Entry

RECIPES: dict[str, Entry] = {
    "constant": Entry("manyhands.recipes.members:constant", "the learning rate as given, for any batch size"),
    "large-batch": Entry(
        "manyhands.recipes.members:large_batch", "linear scaling, gradual warm-up, decay (Goyal et al. 2017)"
    ),
    "lars": Entry(
        "manyhands.recipes.members:lars", "momentum with a learning rate per layer (You et al. 2017)"
    ),
    "lamb": Entry("manyhands.recipes.members:lamb", "Adam with a learning rate per layer (You et al. 2019)"),
}
