"""Train ten pinned runs and print a hash of each one's final parameters.

A refactoring must not change a bit. Run it in two trees on the same machine and compare the lines:

    python tools/pinned_runs.py > after.txt
    diff before.txt after.txt

Hashes differ between machines (other CPUs round differently), so none is committed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

# every synchronous strategy, each at the settings that take it through its own code
RUNS = {
    "single": "--strategy single",
    "single accumulated": "--strategy single --accumulate 3",
    "allreduce": "--workers 2",
    "allreduce of three, adamw": "--workers 3 --recipe constant --set recipe.optimizer=adamw",
    "allreduce over torch": "--workers 2 --transport torch",
    "average": "--workers 2 --strategy average --every 4",
    "average, nesterov": "--workers 2 --strategy average --every 4 --outer nesterov",
    "layers": "--workers 2 --strategy layers --set strategy.cut=2",
    "pipeline": "--workers 2 --strategy pipeline --micro-batches 4 --set strategy.cut=2",
    "sharded": "--workers 2 --strategy sharded",
}
COMMON = "--epochs 2 --batch 96 --seed 7 --threads 1 --quiet"


def trained(words: list[str], folder: Path) -> str:
    """Train in a folder and return the hash of the final parameters' bytes."""
    command = [sys.executable, "-m", "manyhands", "train", "digits-mlp", *words, "--out", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"failed: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
    from safetensors import safe_open

    digest = hashlib.sha256()
    with safe_open(folder / "model.safetensors", "pt") as file:
        for name in sorted(file.keys()):
            digest.update(name.encode() + file.get_tensor(name).numpy().tobytes())
    return digest.hexdigest()[:16]


def main() -> None:
    """Print one line per run."""
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, words) in enumerate(RUNS.items()):
            print(
                f"{name:28} {trained([*COMMON.split(), *words.split()], Path(folder) / str(number))}",
                flush=True,
            )


if __name__ == "__main__":
    main()
