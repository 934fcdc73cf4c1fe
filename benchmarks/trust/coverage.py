"""Simulate the 95 % intervals that reports print: how often do they hold the truth?

python benchmarks/trust/coverage.py
"""

from __future__ import annotations

import argparse

from manyhands.testing.coverage import cases, coverage


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Simulate the intervals that reports print.")
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(f"{'interval':46}{'holds the truth':>16}")
    for name, case in cases().items():
        print(f"{name:46}{coverage(case, given.times, given.seed):>16.1%}", flush=True)


if __name__ == "__main__":
    main()
