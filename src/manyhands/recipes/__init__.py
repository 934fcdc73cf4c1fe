"""A recipe turns a batch size into an optimiser and a learning-rate schedule; these are the known ones."""

from __future__ import annotations

from manyhands.axes import Member

RECIPES: dict[str, Member] = {
    "constant": Member("manyhands.recipes.members:constant", "the rate as given, whatever the batch"),
    "large-batch": Member(
        "manyhands.recipes.members:large_batch", "linear scaling, gradual warm-up, decay (Goyal et al. 2017)"
    ),
    "lars": Member("manyhands.recipes.members:lars", "momentum with a rate for each layer (You et al. 2017)"),
    "lamb": Member("manyhands.recipes.members:lamb", "Adam with a rate for each layer (You et al. 2019)"),
}
