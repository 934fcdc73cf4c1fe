"""Flags are made from the spec and the strategies' options: each is there once, in its group, and arrives."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, get_args

import pytest

from conftest import Answer
from manyhands.cli import flags
from manyhands.core import registry
from manyhands.core.registry.strategies import STRATEGIES
from manyhands.records.spec import RunSpec
from manyhands.runs import train as running

OPTIONS = [
    (name, option) for name, row in STRATEGIES.items() for option in registry.options(row.options).values()
]


def sections(text: str) -> dict[str, str]:
    """The help of a command by group, each as one line; the examples at its end are left out."""
    text = text.partition("Examples:")[0]
    found = re.split(r"^(\S.*):$", text, flags=re.MULTILINE)
    return {title: " ".join(body.split()) for title, body in zip(found[1::2], found[2::2], strict=True)}


def test_every_field_of_a_spec_has_a_row() -> None:
    assert set(flags.SETTINGS) == set(RunSpec.model_fields)


def test_no_option_of_a_strategy_hides_a_setting_or_means_two_things() -> None:
    by_name: dict[str, set[Any]] = {}
    for _, option in OPTIONS:
        assert option.name not in RunSpec.model_fields
        assert option.description.endswith("."), option.name
        by_name.setdefault(option.name, set()).add((str(option.type), option.default))
    assert {name for name, kinds in by_name.items() if len(kinds) > 1} == set()


@pytest.mark.parametrize(
    ("strategy", "option"), OPTIONS, ids=[f"{name}-{option.name}" for name, option in OPTIONS]
)
def test_help_and_list_explain_it(
    strategy: str, option: registry.Option, typed: Callable[..., Answer]
) -> None:
    flag = f"--{option.name.replace('_', '-')}"
    groups = {
        title: body
        for title, body in sections(typed("train", "--help").out).items()
        if f" {flag} " in f" {body}"
    }
    (title,) = groups
    assert title.startswith("Strategy ")
    assert strategy in title.split()
    listed = typed("list", strategy).out
    assert flag in listed
    assert " ".join(option.description.split()) in " ".join(listed.split())


def test_the_groups_are_in_order(typed: Callable[..., Answer]) -> None:
    titles = list(sections(typed("train", "--help").out))
    assert titles[1 : 1 + len(flags.GROUPS)] == list(flags.GROUPS)


def example(option: registry.Option) -> tuple[list[str], Any]:
    """A value other than the default: how it is given, and what arrives."""
    flag, kinds = f"--{option.name.replace('_', '-')}", get_args(option.type) or (option.type,)
    if bool in kinds:
        return [flag], True
    if option.default == ():
        return [flag, "2,5"], (2, 5)
    if all(isinstance(kind, str) for kind in kinds):  # a Literal
        other = next(kind for kind in kinds if kind != option.default)
        return [flag, other], other
    value = 3 if int in kinds else 0.25
    return [flag, str(value)], value


@pytest.mark.parametrize(
    ("strategy", "option"), OPTIONS, ids=[f"{name}-{option.name}" for name, option in OPTIONS]
)
def test_it_reaches_the_strategy_in_its_own_type(
    strategy: str, option: registry.Option, typed: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    class SeenError(Exception):
        pass

    def run(task: str, **settings: Any) -> None:
        seen.update(settings)
        raise SeenError

    monkeypatch.setattr(running, "train", run)
    words, value = example(option)
    typed("train", "digits-mlp", "--strategy", strategy, *words)
    assert set(seen["strategy_options"]) == {option.name}  # what is not given is not written into the spec
    parsed = registry.parse(strategy, STRATEGIES[strategy].options, seen["strategy_options"])
    assert STRATEGIES[strategy].options.normalize(parsed) == {option.name: value}
    assert seen["strategy"] == strategy
    assert "batch" not in seen
