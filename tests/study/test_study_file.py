"""Study files: which cells they mean, and the sentence for everything that is wrong with one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT
from manyhands.core import environment
from manyhands.core.errors import UsageError
from manyhands.study import study_file
from manyhands.study.study_file import Study
from manyhands.study.toml_lines import TomlLines

Read = Callable[[str], Study]

GRID = "[[grid]]\ntask = 'quadratic'\n"
BAD = {
    "no grid": ("name = 'x'", "s.toml has no cells: it needs at least one [[grid]]"),
    "not toml": ("[[grid]\n", "s.toml is not TOML: expected ']]' at the end of "),
    "a key at the top": (
        "nam = 'x'\n" + GRID,
        "s.toml, line 1: a study has no key 'nam' (did you mean 'name'? known: name, title, about, fallback, "
        "claim, price, currency, budget, block, rounds, min_rounds, repeats, keep_models, jobs, defaults, "
        "grid, exclude)",
    ),
    "a table": (
        "\n[[gird]]\ntask = 'quadratic'",
        "s.toml, line 2: a study has no key 'gird' (did you mean 'grid'? known: name, ",
    ),
    "a key of a grid": (
        "name = 'x'\n\n[[grid]]\ntask = 'quadratic'\n[[grid]]\ntask = 'quadratic'\nworker = 2",
        "s.toml, line 7: a grid has no key 'worker' (did you mean 'workers'? known: task, ",
    ),
    "a key of the defaults": (
        "[defaults]\nbacth = 2\n" + GRID,
        "s.toml, line 2: [defaults] has no key 'bacth' (did you mean 'batch'? known: task, ",
    ),
    "a key of an exclude": (
        GRID + "[[exclude]]\nworkers = 1\n[[exclude]]\nrepeats = 1",
        "s.toml, line 6: an exclude has no key 'repeats' (",
    ),
    "no task": ("\n[[grid]]\nbatch = 3", "s.toml, line 2: a grid needs a task"),
    "no such task": (
        "[[grid]]\nbatch = 3\ntask = ['quadratic', 'quadratik']",
        "s.toml, line 3: unknown task 'quadratik' (did you mean 'quadratic'? known: ",
    ),
    "no such strategy": (
        GRID + "strategy = 'alreduce'",
        "s.toml, line 3: unknown strategy 'alreduce' (did you mean 'allreduce'? known: ",
    ),
    "no such recipe": (
        GRID + "recipe = 'larsen'",
        "s.toml, line 3: unknown recipe 'larsen' (did you mean 'lars'?",
    ),
    "no such transport": (GRID + "transport = 'sm'", "s.toml, line 3: unknown transport 'sm' ("),
    "no such option of a strategy": (
        GRID + "workers = 2\nstrategy = 'average'\n[grid.strategy_options]\nevery = 1\nevry = 2",
        "s.toml, line 7: strategy average has no option 'evry' (did you mean 'every'? known: ",
    ),
    "an option of another strategy": (
        GRID + "workers = 2\nstrategy = 'allreduce'\nstrategy_options.every = 2",
        "s.toml, line 5: strategy allreduce has no option 'every': it is average's",
    ),
    "no such option of a recipe": (
        GRID + "recipe_options = {warmp = 1}",
        "s.toml, line 3: no recipe has an option 'warmp' (did you mean 'warmup'? known: ",
    ),
    "no such option of the recipe": (
        GRID + "recipe = 'constant'\nrecipe_options.warmup = [0, 1]",
        "s.toml, line 4: recipe constant has no option 'warmup' (",
    ),
    "no such option of the task": (
        "[[grid]]\ntask = 'digits-mlp'\noptions.widht = [16, 32]",
        "s.toml, line 3: digits-mlp has no option 'widht' (",
    ),
    "a value": (
        GRID + "batch = [\n  100, # good\n  0,\n]",
        "s.toml, line 3: batch must be at least 1, got 0",
    ),
    "a type": (GRID + "workers = 'two'", "s.toml, line 3: workers should be a valid integer, got 'two'"),
    "threads": (
        GRID + "threads = 'many'",
        "s.toml, line 3: threads must be a whole number or \"all\", got 'many'",
    ),
    "a value of the defaults": (
        "[defaults]\nseed = -1\n" + GRID,
        "s.toml, line 2: seed must be from 0 to 2**63 - 1, got -1",
    ),
    "an empty list": (
        GRID + "batch = []",
        "s.toml, line 3: batch is an empty list: give at least one value",
    ),
    "batch and share": (
        GRID + "batch = 100\nshare = 50",
        "s.toml, line 4: share is the batch per worker and batch is the global batch: give one of them",
    ),
    "a share of nothing": (
        GRID + "share = 0.5",
        "s.toml, line 3: share must be a whole number of at least 1, got 0.5",
    ),
    "a rate that is a list": (
        GRID + "lr = [[0.1], 0.2]",
        "s.toml, line 3: lr must be a number, got [0.1]",
    ),
    "a rate in words": (
        GRID + "recipe_options.lr = ['fast', 0.2]",
        "s.toml, line 1: lr must be a number, got 'fast'",  # the grid's
    ),
    "two rates": (
        GRID + "lr = 0.1\nrecipe_options.lr = 0.2",
        "s.toml, line 3: lr is short for recipe_options.lr: give one of them",
    ),
    "options that are no table": (
        GRID + "strategy_options = 3",
        "s.toml, line 3: strategy_options is a table of options, got 3",
    ),
    "repeats": (GRID + "repeats = 0", "s.toml, line 3: repeats must be a whole number of at least 1, got 0"),
    "repeats of all": (
        "repeats = 'x'\n" + GRID,
        "s.toml, line 1: repeats must be a whole number of at least 1, got 'x'",
    ),
    "several repeats": (
        GRID + "repeats = [1, 2]",
        "s.toml, line 3: repeats is one value for all cells of a grid, not a list",
    ),
    "timed": (GRID + "timed = 1", "s.toml, line 3: timed must be true or false, got 1"),
    "one grid": (
        "[grid]\ntask = 'quadratic'",
        "s.toml, line 1: grid is a list of tables: write [[grid]]",
    ),
    "several defaults": (
        "[[defaults]]\nbatch = 1\n" + GRID,
        "s.toml, line 1: defaults is a table: write [defaults]",
    ),
    "budget": (
        "budget = '5 moons'\n" + GRID,
        's.toml, line 1: budget must be a time such as 300, "90 s", "5 min" or "2 h", got \'5 moons\'',
    ),
    "no budget": ("budget = 0\n" + GRID, "s.toml, line 1: budget must be a time such as "),
    "price": ("price = -1\n" + GRID, "s.toml, line 1: price must be a number above 0, got -1"),
    "claim": ("claim = 3\n" + GRID, "s.toml, line 1: claim must be text, got 3"),
    "unknown claim": (
        "claim = 'ofload'\n" + GRID,
        "s.toml, line 1: unknown claim 'ofload' (did you mean 'offload'? known: large-batch, critical-batch, "
        "noise-scale, data-or-model, more-workers, asynchrony, averaging, offload)",
    ),
    "name": ("name = 'a/b'\n" + GRID, "s.toml, line 1: name must be a valid folder name, got 'a/b'"),
    "fallback": (
        "fallback = 'digit-mlp'\n" + GRID,
        "s.toml, line 1: unknown task 'digit-mlp' (did you mean 'digits-mlp'? known: ",
    ),
    "keep_models": ("keep_models = 1\n" + GRID, "s.toml, line 1: keep_models must be true or false, got 1"),
    "no jobs": ("jobs = 0\n" + GRID, "s.toml, line 1: jobs must be a whole number from 1 on, got 0"),
    "jobs that are no number": (
        "jobs = true\n" + GRID,
        "s.toml, line 1: jobs must be a whole number from 1 on, got True",
    ),
    "few rounds": ("rounds = 2\n" + GRID, "s.toml, line 1: rounds must be at least 3, got 2"),
    "more rounds at least than at most": (
        "rounds = 6\nmin_rounds = 7\n" + GRID,
        "s.toml, line 2: min_rounds must be a whole number from 3 to rounds (6), got 7",
    ),
    "nothing can work": (
        GRID + "\n[[grid]]\ntask = 'quadratic'\nstrategy = 'single'\nworkers = [2, 4]",
        "s.toml, line 4: no cell of this grid can work: strategy single has one worker, but workers is 2",
    ),
    "everything is left out": (
        GRID + "[[exclude]]\ntask = 'quadratic'",
        "s.toml has no cells: [[exclude]] leaves none of them",
    ),
    "too many": (
        GRID + f"seed = {list(range(200))}\nbatch = {list(range(1, 101))}",
        "s.toml, line 1: this grid has 20,000 cells, but a study has at most 10,000",
    ),
}


@pytest.mark.parametrize(("text", "sentence"), BAD.values(), ids=BAD)
def test_a_bad_file_is_answered_in_one_sentence(here: Path, text: str, sentence: str) -> None:
    (here / "s.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        study_file.read(Path("s.toml"))
    said = str(caught.value)
    assert said.startswith(sentence), said
    assert "\n" not in said


def fields(study: Study, *names: str) -> list[tuple[Any, ...]]:
    return [tuple(getattr(cell.spec, name) for name in names) for cell in study.cells]


def test_lists_become_cells_the_last_key_first(study: Read) -> None:
    found = study(GRID + "batch = [50, 100]\nseed = [0, 1]")
    assert (found.name, found.title) == ("s", "s")
    assert fields(found, "batch", "seed") == [(50, 0), (50, 1), (100, 0), (100, 1)]


def test_a_study_says_how_many_of_its_cells_may_run_at_a_time(study: Read) -> None:
    assert study("jobs = 2\n" + GRID).jobs == 2
    assert study(GRID).jobs == 1


def test_facts(study: Read) -> None:
    found = study(
        "name = 'n'\ntitle = 'T'\nabout = 'A.'\nclaim = 'offload'\nprice = 0.9\ncurrency = 'EUR'\n\n"
        "budget = '1 h 30 min'\nkeep_models = true\nfallback = 'digits-mlp'\n" + GRID
    )
    assert (found.name, found.title, found.about, found.claim) == ("n", "T", "A.", "offload")
    assert (found.price, found.currency, found.budget, found.keep_models) == (0.9, "EUR", 5400.0, True)


@pytest.mark.parametrize(
    ("value", "seconds"), [(300, 300), (0.5, 0.5), ("90 s", 90), ("5 min", 300), ("2h", 7200)]
)
def test_budgets(value: object, seconds: float) -> None:
    assert study_file.seconds(value) == seconds


def test_options_expand_and_lists_are_written_as_lists_of_lists(study: Read) -> None:
    found = study(
        "[[grid]]\ntask = 'digits-mlp'\nstrategy = 'layers'\nworkers = 2\n"
        "strategy_options.cut = [[1], [2]]\nlr = [0.1, 0.2]\nrecipe_options.warmup = [0, 1]\n"
    )
    assert fields(found, "strategy_options", "recipe_options") == [
        ({"cut": cut}, {"lr": lr, "warmup": warmup})
        for cut in ([1], [2])
        for lr in (0.1, 0.2)
        for warmup in (0, 1)
    ]


def test_a_list_of_tables_is_a_choice_of_tables(study: Read) -> None:
    found = study(GRID + "recipe_options = [{lr = 0.1}, {lr = 0.2, warmup = 1}]")
    assert fields(found, "recipe_options") == [({"lr": 0.1},), ({"lr": 0.2, "warmup": 1},)]


def test_a_share_is_the_batch_a_worker(study: Read) -> None:
    found = study("[defaults]\nbatch = 7\n" + GRID + "workers = [1, 2, 4]\nshare = [64, 128]")
    assert fields(found, "workers", "batch") == [(1, 64), (1, 128), (2, 128), (2, 256), (4, 256), (4, 512)]


def test_all_threads_are_this_machines(study: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "cores", lambda: 6)
    found = study(GRID + "threads = [1, 'all', 2]\n[[exclude]]\nthreads = [2, 'all']")
    assert fields(found, "threads") == [(1,)]
    assert found.left_out == 2


def test_defaults_are_for_grids_that_do_not_say_otherwise(study: Read) -> None:
    found = study(
        "[defaults]\nepochs = 2\nbatch = [50, 100]\nlr = 0.3\n" + GRID + "lr = 0.1\n" + GRID + "batch = 7"
    )
    assert fields(found, "batch", "epochs", "recipe_options") == [
        (50, 2.0, {"lr": 0.1}),
        (100, 2.0, {"lr": 0.1}),
        (7, 2.0, {"lr": 0.3}),
    ]


def test_an_option_is_for_the_strategies_that_have_it(study: Read) -> None:
    found = study(GRID + "strategy = ['allreduce', 'average']\nworkers = 2\nstrategy_options.every = [1, 8]")
    assert fields(found, "strategy", "strategy_options") == [
        ("allreduce", {}),
        ("average", {"every": 1}),
        ("average", {"every": 8}),
    ]


def test_identical_cells_are_one_timed_if_one_of_them_is(study: Read) -> None:
    found = study(GRID + "batch = [50, 100]\ntimed = false\nrepeats = 2\n" + GRID + "batch = [100, 200]")
    assert [(cell.spec.batch, cell.repeat, cell.timed) for cell in found.cells] == [
        (50, 0, False),
        (100, 0, True),
        (200, 0, True),
        (50, 1, False),
        (100, 1, False),
    ]


def test_repeats_of_the_study_and_of_a_grid(study: Read) -> None:
    found = study("repeats = 2\n" + GRID + "batch = 50\n" + GRID + "batch = 100\nrepeats = 3")
    assert [(cell.spec.batch, cell.repeat) for cell in found.cells] == [
        (50, 0), (100, 0), (50, 1), (100, 1), (100, 2),
    ]  # fmt: skip
    assert len({cell.key for cell in found.cells}) == 5


def test_excludes_match_all_of_their_values(study: Read) -> None:
    found = study(
        GRID + "workers = [1, 2]\nstrategy = 'average'\nbatch = [50, 100]\nstrategy_options.every = [1, 8]\n"
        "[[exclude]]\nworkers = 2\nbatch = [100, 200]\n[[exclude]]\nworkers = 1\nstrategy_options.every = 8\n"
    )
    assert [(spec.workers, spec.batch, spec.strategy_options["every"]) for (spec, *_) in found.cells] == [
        (1, 50, 1), (1, 100, 1), (2, 50, 1), (2, 50, 8),
    ]  # fmt: skip
    assert (found.left_out, found.excluded) == (4, [])


def test_what_cannot_work_is_excluded_with_its_reason(study: Read) -> None:
    found = study(GRID + "strategy = ['single', 'hogwild']\nworkers = [1, 2]\ntransport = ['solo', 'shm']")
    assert fields(found, "strategy", "workers", "transport") == [
        ("single", 1, "solo"), ("single", 1, "shm"), ("hogwild", 1, "solo"), ("hogwild", 1, "shm"),
        ("hogwild", 2, "shm"),
    ]  # fmt: skip
    assert {without.reason for without in found.excluded} == {
        "strategy single has one worker, but workers is 2",
        "transport solo has one rank, but workers is 2: use shm, torch or mpi",
    }


def test_options_that_do_not_go_together_are_excluded(study: Read) -> None:
    found = study(
        GRID + "strategy = 'average'\nworkers = 2\nstrategy_options.outer = ['mean', 'elastic']\n"
        "strategy_options.elasticity = 0.2"
    )
    assert len(found.cells) == 1
    assert [without.reason for without in found.excluded] == [
        "strategy average: elasticity is for outer elastic, and outer is mean"
    ]


def test_a_study_by_its_name(here: Path) -> None:
    assert study_file.find("default") == ROOT / "studies/default.toml"
    (here / "studies").mkdir()
    (here / "studies/default.toml").write_text(GRID)
    assert study_file.find("default") == Path("studies/default.toml")
    (here / "default").write_text(GRID)
    assert study_file.find("default") == Path("default")
    with pytest.raises(
        UsageError, match=r"unknown study 'defalt' \(did you mean 'default'\? known: .*default"
    ):
        study_file.find("defalt")
    with pytest.raises(UsageError, match=r"^cannot read the study none\.toml: no such file or directory$"):
        study_file.read(study_file.find("none.toml"))


def test_every_study_that_is_shipped_is_valid() -> None:
    for path in sorted((ROOT / "studies").glob("*.toml")):
        assert study_file.read(path).cells, path


def test_lines() -> None:
    found = TomlLines(
        'about = """\nname = 3\n"""\nname = "x # y"\n[[grid]]\nbatch = [\n  1,\n]\n[grid.options]\n'
        "width = 2\n"
        '[[grid]]  # second\noptions.width = 1\n"batch" = 2\n'
    )
    assert [found.of("", 0, "about"), found.of("", 0, "name")] == [1, 4]
    assert [found.of("grid", 0), found.of("grid", 0, "batch"), found.of("grid", 0, "options.width")] == [
        5,
        6,
        10,
    ]
    assert [found.of("grid", 1), found.of("grid", 1, "options"), found.of("grid", 1, "batch")] == [11, 12, 13]
    assert [found.of("grid", 1, "options.depth"), found.of("grid", 2, "batch")] == [12, None]
