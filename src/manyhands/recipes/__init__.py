"""A recipe turns a batch size into an optimizer and a learning-rate schedule; these are the known ones."""

from __future__ import annotations

from manyhands.core.registry import Entry

RECIPES: dict[str, Entry] = {
    "constant": Entry("manyhands.recipes.members:constant", "the rate as given, whatever the batch"),
    "large-batch": Entry(
        "manyhands.recipes.members:large_batch", "linear scaling, gradual warm-up, decay (Goyal et al. 2017)"
    ),
    "lars": Entry("manyhands.recipes.members:lars", "momentum with a rate for each layer (You et al. 2017)"),
    "lamb": Entry("manyhands.recipes.members:lamb", "Adam with a rate for each layer (You et al. 2019)"),
}
