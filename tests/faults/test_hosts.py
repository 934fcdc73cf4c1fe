"""Two hosts, as network namespaces with names of their own: memory within a host, slices between them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import manyhands as mh

TOOLS = ("ip", "unshare", "hostname")
BIN = Path(sys.executable).parent


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Two namespaces joined by a virtual cable: {namespace: address}."""
    if os.geteuid() != 0 or not all(shutil.which(tool) for tool in TOOLS):
        pytest.skip("network namespaces need root, ip and unshare")
    names = [f"mh{os.getpid()}{letter}" for letter in "ab"]
    try:
        cable = [
            "link",
            "add",
            "cable",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            names[1],
        ]
        if not all(ip("netns", "add", name) for name in names) or not ip(*cable):
            pytest.skip("this system does not allow network namespaces")
        for number, name in enumerate(names, 1):
            for words in (
                ["addr", "add", f"10.77.0.{number}/24", "dev", "cable"],
                ["link", "set", "cable", "up"],
            ):
                assert ip("-n", name, *words)
            assert ip("-n", name, "link", "set", "lo", "up")
        yield {name: f"10.77.0.{number}" for number, name in enumerate(names, 1)}
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "each"), [("quadratic", 1), pytest.param("digits-mlp", 2, marks=pytest.mark.soak)]
)
def test_torchrun_over_two_hosts(hosts: dict[str, str], tmp_path: Path, task: str, each: int) -> None:
    """One worker on each host, or two, which share memory there."""
    leader = next(iter(hosts.values()))
    started = []
    for number, name in enumerate(hosts):
        torchrun = [
            str(BIN / "torchrun"),
            "--nnodes",
            "2",
            "--node-rank",
            str(number),
            "--nproc-per-node",
            str(each),
        ]
        settings = [task, "--epochs", "2", "--batch", "50"]
        torchrun += ["--master-addr", leader, "--master-port", "29600", "-m", "manyhands", "train", *settings]
        script = f'hostname host{number}; exec "$@"'
        command = ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", script, "sh", *torchrun]
        child = subprocess.Popen(
            [*command, "--out", "run"],
            cwd=tmp_path,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "cable", "MANYHANDS_KEY": "a secret of both hosts"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(child)
    output = [child.communicate(timeout=120)[0] for child in started]
    assert [child.returncode for child in started] == [0, 0], "\n".join(output)
    record = json.loads((tmp_path / "run/result.json").read_text())
    assert record["hosts"] == ["host0"] * each + ["host1"] * each
    assert record["spec"]["transport"] == "torch"
    slices = record["traffic"][0]["all_reduce"]["bytes"] / record["steps"]
    whole = 4 * record["parameters"]
    if each == 2:
        assert slices < 0.6 * whole, (
            "each worker sends its slice, half of the gradient, and a few step headers"
        )
    here = mh.train(task, epochs=2, batch=50, workers=2 * each, out=tmp_path / "here", quiet=True)
    assert record["loss"] == pytest.approx(here.loss, rel=1e-3)
