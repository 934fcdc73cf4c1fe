"""Every recipe passes the conformance suite, and its options and description are right."""

import subprocess
import sys

import pytest

from manyhands.core.errors import UsageError
from manyhands.core.registry import member, options, parse
from manyhands.recipes import RECIPES
from manyhands.recipes.members import constant, lamb, large_batch, lars
from manyhands.testing.recipes import RecipeSuite


@pytest.mark.parametrize("name", list(RECIPES), scope="class")
class TestMembers(RecipeSuite):
    @pytest.fixture(autouse=True)
    def _row(self, name):
        self.name = name


def test_null_member_comes_first():
    assert list(RECIPES) == ["constant", "large-batch", "lars", "lamb"]


def test_recipes_are_named_without_torch():
    script = "import sys, manyhands.recipes, manyhands.recipes.members; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("name", list(RECIPES))
def test_options_are_keywords_with_types_and_defaults(name):
    builder = member("recipe", RECIPES, name)
    known = options(builder)
    assert {"lr", "weight_decay", "clip"} <= set(known)
    defaults = {option.name: option.default for option in known.values()}
    assert builder(**parse(name, builder, defaults)) == builder()


def test_options_are_read_from_text():
    given = {"lr": "0.4", "milestones": "0.5, 0.75", "nesterov": "false", "clip": "none", "decay": "step"}
    recipe = large_batch(**parse("recipe large-batch", large_batch, given))
    assert (recipe.lr, recipe.milestones, recipe.nesterov, recipe.clip) == (0.4, (0.5, 0.75), False, None)


@pytest.mark.parametrize(
    ("recipe", "lr"),
    [
        (constant(), 0.1),
        (large_batch(), 0.1),
        (large_batch(optimizer="adam"), 1e-3),
        (constant(optimizer="adamw"), 1e-3),
        (lars(), 0.3),
        (lamb(), 0.0035),
        (lars(lr=2.0), 2.0),
    ],
)
def test_default_rate_follows_the_optimizer(recipe, lr):
    assert recipe.lr == lr


@pytest.mark.parametrize(
    ("recipe", "batch", "line"),
    [
        (constant(lr=0.05), 512, "sgd · lr 0.05, constant"),
        (constant(optimizer="adam", momentum=0.5), 512, "adam · lr 0.001, constant"),
        (
            large_batch(),
            512,
            "sgd · lr 0.1 per 256 samples = 0.2 at batch 512, warm-up 5 epochs, step decay"
            " · nesterov momentum 0.9 · weight decay 0.0001",
        ),
        (
            large_batch(weight_decay=0.0, nesterov=False),
            128,
            "sgd · lr 0.1 per 256 samples = 0.05 at batch 128, step decay · momentum 0.9",
        ),
        (
            large_batch(warmup=1, decay="cosine", momentum=0.0, nesterov=False, weight_decay=0, clip=1.0),
            1024,
            "sgd · lr 0.1 per 256 samples = 0.4 at batch 1,024, warm-up 1 epoch, cosine decay · clip 1",
        ),
        (
            large_batch(optimizer="adamw", scaling="sqrt", warmup=0.5, decay="none"),
            1024,
            "adamw · lr 0.001 per 256 samples = 0.002 at batch 1,024 (square root), warm-up 0.5 epochs"
            " · weight decay 0.0001",
        ),
        (
            large_batch(scaling="none", decay="none"),
            1024,
            "sgd · lr 0.1, constant · nesterov momentum 0.9 · weight decay 0.0001",
        ),
        (
            lars(),
            512,
            "lars · lr 0.3 per 256 samples = 0.6 at batch 512, warm-up 5 epochs from 0, cosine decay"
            " · momentum 0.9 · weight decay 0.0001",
        ),
        (
            lamb(),
            256,
            "lamb · lr 0.0035 at batch 256, warm-up 5 epochs from 0, cosine decay · weight decay 0.01",
        ),
    ],
)
def test_describe(recipe, batch, line):
    assert recipe.describe(batch, 60_000) == line


def test_describe_shortens_the_warm_up_to_the_run():
    recipe = large_batch(momentum=0, nesterov=False, weight_decay=0)
    line = "sgd · lr 0.1 per 256 samples = 0.2 at batch 512, warm-up 3 epochs, step decay"
    assert recipe.describe(512, 60_000, horizon=180_000) == line


def test_describe_names_what_an_update_uses_if_it_is_not_the_batch():
    recipe = large_batch(lr=0.4, decay="cosine", momentum=0, nesterov=False, weight_decay=0)
    line = "sgd · lr 0.4 per 256 samples = 0.05 for each update of 32, cosine decay"
    assert recipe.describe(32, 60_000, where="for each update of 32") == line


NUMBERS = [
    ("lr", -0.1, "lr must be a positive number, got -0.1"),
    ("lr", 0, "lr must be a positive number, got 0"),
    ("lr", float("nan"), "lr must be a positive number, got nan"),
    ("lr", float("inf"), "lr must be a positive number, got inf"),
    ("lr", "fast", "lr must be a positive number, got 'fast'"),
    ("lr", True, "lr must be a positive number, got True"),
    ("momentum", 1.0, "momentum must be at least 0 and below 1, got 1.0"),
    ("momentum", -0.5, "momentum must be at least 0 and below 1, got -0.5"),
    ("momentum", float("nan"), "momentum must be at least 0 and below 1, got nan"),
    ("beta1", 1.0, "beta1 must be at least 0 and below 1, got 1.0"),
    ("beta2", -0.1, "beta2 must be at least 0 and below 1, got -0.1"),
    ("weight_decay", -1e-4, "weight_decay must be 0 or a positive number, got -0.0001"),
    ("weight_decay", float("inf"), "weight_decay must be 0 or a positive number, got inf"),
    ("warmup", -1.0, "warmup must be 0 or a positive number of epochs, got -1.0"),
    ("warmup", float("inf"), "warmup must be 0 or a positive number of epochs, got inf"),
    ("factor", 0.0, "factor must be above 0 and at most 1, got 0.0"),
    ("factor", 1.5, "factor must be above 0 and at most 1, got 1.5"),
    ("clip", 0.0, "clip must be a positive number or none, got 0.0"),
    ("clip", float("nan"), "clip must be a positive number or none, got nan"),
    ("milestones", (0.5, 0.25), "milestones must be increasing fractions between 0 and 1, got (0.5, 0.25)"),
    ("milestones", (0.5, 0.5), "milestones must be increasing fractions between 0 and 1, got (0.5, 0.5)"),
    ("milestones", (30, 60), "milestones must be increasing fractions between 0 and 1, got (30, 60)"),
    ("milestones", (0.0,), "milestones must be increasing fractions between 0 and 1, got (0.0,)"),
    ("milestones", (float("nan"),), "milestones must be increasing fractions between 0 and 1, got (nan,)"),
    ("milestones", 0.5, "milestones must be increasing fractions between 0 and 1, got 0.5"),
    (
        "optimizer",
        "sdg",
        "unknown optimizer 'sdg' (did you mean 'sgd'? known: sgd, adam, adamw, "
        "adadelta, adafactor, adagrad, adamax, asgd, muon, nadam, radam, rmsprop, rprop, lars, lamb)",
    ),
    ("scaling", "lin", "unknown scaling 'lin' (did you mean 'linear'? known: linear, sqrt, none)"),
    ("decay", "steps", "unknown decay 'steps' (did you mean 'step'? known: none, step, cosine)"),
    ("momentum", 0.0, "nesterov needs a momentum above 0, got 0.0"),
]


@pytest.mark.parametrize(("option", "value", "sentence"), NUMBERS)
def test_bad_option_is_answered_in_one_sentence(option, value, sentence):
    with pytest.raises(UsageError) as caught:
        large_batch(**{option: value})
    assert str(caught.value) == sentence


def test_bad_options_of_the_layerwise_recipes():
    with pytest.raises(UsageError, match=r"^coefficient must be a positive number, got 0$"):
        lars(coefficient=0)
    with pytest.raises(UsageError, match=r"^clamp must be a positive number or none, got -1$"):
        lamb(clamp=-1)


def test_nesterov_matters_to_sgd_only():
    assert large_batch(optimizer="adam", momentum=0.0).optimizer == "adam"
