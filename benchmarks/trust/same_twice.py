"""Measure the same cell twice, in real studies: how often are the two told apart?

python benchmarks/trust/same_twice.py --studies 10 --out results/same-twice

Each study has one cell under two labels, in pairs, as the default study measures. Two workers with
`allreduce` are one thing, so every difference that is told is wrong. Law 11 allows 5 % of them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from manyhands.analysis.pairs import compare
from manyhands.records.study_results import StudyFolder

STUDY = """
name = "same-twice"
block = {block}
rounds = {rounds}

[[grid]]
task = "{task}"
threads = [1, "all"]
batch = 256
paired = true

[[grid]]
task = "{task}"
strategy = "allreduce"
workers = 2
batch = 256
label = ["one", "other"]
paired = true
"""


def run(folder: Path, file: Path) -> None:
    """Run one study."""
    command = [sys.executable, "-m", "manyhands", "study", str(file), "--out", str(folder)]
    subprocess.run([*command, "--no-report", "--quiet"], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Run the studies that are missing, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=10)
    parser.add_argument("--task", default="mnist-mlp")
    parser.add_argument("--block", type=float, default=0.8, help="seconds")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("results/same-twice"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "same-twice.toml"
    file.write_text(STUDY.format(block=given.block, rounds=given.rounds, task=given.task))
    told = 0
    print("study  rounds  other / one            spread of the pairs  told apart")
    for number in range(given.studies):
        folder = given.out / str(number)
        run(folder, file)
        results = StudyFolder(folder).read()
        one, other = (
            next(each for each in results.records if each.paired and each.label == label)
            for label in ("one", "other")
        )
        found = compare(results, other, one)
        assert found is not None
        told += found.apart
        ratio = f"{found.ratio.median:.3f} ({found.ratio.low:.3f} to {found.ratio.high:.3f})"
        apart = "yes" if found.apart else "no"
        print(f"{number:>5}  {found.rounds:>6}  {ratio:21}  {found.spread:>18.1%}  {apart}", flush=True)
    print(f"told apart: {told} of {given.studies}")


if __name__ == "__main__":
    main()
