"""Whose run it is: the account's key, the signature under spec.json, and --trust (D9)."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import manyhands as mh
from conftest import ROOT, Answer
from manyhands.callbacks.base import Callback
from manyhands.core.errors import UsageError
from manyhands.records import signing
from manyhands.records.run_folder import RunFolder
from manyhands.records.spec import RunSpec
from manyhands.runs import train as running
from manyhands.runs.train import resume_folder

Typed = Callable[..., Answer]
SHORT = ("--epochs", "1", "--threads", "1", "--set", "n=200", "--batch", "100")
EVIL = "import pathlib\npathlib.Path('pwned').touch()\n"
NOT_KNOWN = "it was started by another account, or by a version of manyhands that did not sign runs"
NOT_OURS = "its signature was not made by this account, or not for this spec.json"


@pytest.fixture(autouse=True)
def _key(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key for each test."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))


@pytest.fixture
def own(here: Path, typed: Typed) -> Path:
    """A run of a task file of one's own, half done."""
    shutil.copy(ROOT / "examples/spirals.py", "mine.py")
    assert typed("train", "mine.py:spirals", *SHORT, "--samples", "100", "--out", "run", "-q").code == 0
    return Path("run")


def going_on(typed: Typed, *words: str, folder: str = "run") -> Answer:
    return typed("train", "--resume", folder, "--samples", "200", "--allow-changes", *words)


def refused(folder: str, why: str, file: Path) -> str:
    return (
        f"error: {folder} is not known to be yours ({why}), and resuming it imports {file}: look at "
        "that file, and if you trust it, add --trust\n"
    )


def test_ones_own_run_goes_on_and_names_the_file(own: Path, here: Path, typed: Typed) -> None:
    answer = going_on(typed)
    assert answer.code == 0
    assert answer.err.splitlines()[0] == f"importing {here}/mine.py, the task file of run"


@pytest.mark.parametrize("where", ["/{0}/evil.py:x", "../{1}/evil.py:x", "run/evil.py:x"])
def test_a_strangers_code_is_not_run(where: str, here: Path, typed: Typed) -> None:
    """It once was, at once and without a word."""
    spec = RunSpec.of(task=where.format(here, here.name), batch=10, epochs=1.0)
    Path("run").mkdir()
    Path("run/spec.json").write_text(spec.to_json())
    for folder in (here, Path("run")):
        (folder / "evil.py").write_text(EVIL)
    file = (here / next(iter(spec.user_files))).absolute()
    answer = typed("train", "--resume", "run")
    assert (answer.code, answer.err) == (2, refused("run", NOT_KNOWN, file))
    with pytest.raises(UsageError, match="add --trust"):
        mh.train("run", resume=True, quiet=True)
    assert not Path("pwned").exists()
    answer = typed("train", "--resume", "run", "--trust")
    assert answer.err.splitlines()[0] == f"importing {file}, the task file of run", "before it is"
    assert Path("pwned").exists()


def test_a_run_of_an_older_version_asks_once(own: Path, here: Path, typed: Typed) -> None:
    (own / "spec.sig").unlink()
    assert going_on(typed).err == refused("run", NOT_KNOWN, here / "mine.py")
    assert going_on(typed, "--trust").code == 0
    assert (own / "spec.sig").is_file()
    answer = typed("train", "--resume", "run", "--samples", "300", "--epochs", "2", "--allow-changes")
    assert answer.code == 0, answer.err


def test_trust_in_python(own: Path) -> None:
    (own / "spec.sig").unlink()
    record = mh.train("run", resume=True, samples=200, allow_changes=True, trust=True, quiet=True)
    assert record.samples == 200
    assert RunFolder(own).spec_and_signature()[1]


def test_a_finished_run_that_is_trusted_is_signed(here: Path, typed: Typed) -> None:
    shutil.copy(ROOT / "examples/spirals.py", "mine.py")
    typed("train", "mine.py:spirals", *SHORT, "--out", "run", "-q")
    Path("run/spec.sig").unlink()
    assert "is already finished" in typed("train", "--resume", "run", "--trust").err
    assert typed("train", "--resume", "run").code == 0


@pytest.mark.parametrize(
    "tamper",
    [
        lambda run: (run / "spec.json").write_text((run / "spec.json").read_text().replace("mine", "evil")),
        lambda run: (run / "spec.sig").write_text("0" * 64 + "\n"),
        lambda run: (run / "spec.sig").write_bytes(b"\xff" * 9),
        lambda run: (run / "spec.sig").write_text(""),
        lambda run: (run / "spec.sig").write_text("0" * 5000),
        lambda run: signing.key_path().unlink(),
        lambda run: signing.key_path().write_bytes(b"k" * 32),
    ],
    ids=["spec", "signature", "bytes", "empty", "long", "no key", "another key"],
)
def test_a_signature_is_of_this_spec_and_this_account(
    tamper: Callable[[Path], object], own: Path, here: Path, typed: Typed
) -> None:
    (here / "evil.py").write_text(EVIL)
    tamper(own)
    answer = going_on(typed)
    file = here / f"{'evil' if 'evil' in (own / 'spec.json').read_text() else 'mine'}.py"
    assert (answer.code, answer.err) == (2, refused("run", NOT_OURS, file))
    assert not Path("pwned").exists()


def test_a_copy_is_as_trusted_as_what_it_is_a_copy_of(own: Path, here: Path, typed: Typed) -> None:
    Path("sub").mkdir()
    shutil.move("run", "sub/moved")
    answer = going_on(typed, folder="sub/moved")
    assert answer.code == 0
    assert answer.err.splitlines()[0] == f"importing {here}/mine.py, the task file of sub/moved"


def test_a_task_of_ours_needs_no_trust(here: Path, typed: Typed) -> None:
    assert typed("train", "quadratic", *SHORT, "--samples", "100", "--out", "run", "-q").code == 0
    Path("run/spec.sig").unlink()
    answer = going_on(typed)
    assert answer.code == 0
    assert "importing" not in answer.err


def test_who_names_the_file_himself_is_not_asked(own: Path, typed: Typed) -> None:
    (own / "spec.sig").unlink()
    words = ("mine.py:spirals", *SHORT, "--out", "run", "--resume", "--allow-changes")
    assert typed("train", *words, "--samples", "200", "-q").code == 0


def test_a_study_that_goes_on_does_not_ask(here: Path, typed: Typed) -> None:
    shutil.copy(ROOT / "examples/spirals.py", "mine.py")
    text = (
        "[[grid]]\ntask = 'mine.py:spirals'\nthreads = 1\nbatch = 100\noptions = {n = 200}\nepochs = [1, 2]\n"
    )
    Path("s.toml").write_text(text + "timed = false\n")
    answer = typed("study", "s.toml", "--dry-run")
    assert answer.code == 0
    assert answer.err == f"importing {here}/mine.py, a task file of s.toml\n"
    assert typed("study", "s.toml", "--dry-run", "-q").err == ""
    assert typed("study", "s.toml", "-q", "--no-report").code == 0
    for signature in Path("results/s").glob("*/spec.sig"):
        signature.unlink()
    (cell, *_) = Path("results/s").glob("*/result.json")
    cell.write_text("[]")
    answer = typed("study", "s.toml", "--no-report")
    assert answer.code == 0
    assert f"{cell} is damaged: it is a list, not an object; its cell is run again\n" in answer.err
    assert json.loads(cell.read_text())["status"] == "finished"


def test_a_home_that_cannot_be_written_does_not_end_a_run(
    own: Path, here: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "file"))
    answer = typed("train", "mine.py:spirals", *SHORT, "--samples", "100", "--out", "new")
    assert answer.code == 0
    path = here / "file/manyhands/key"
    said = f"cannot read or create {path}: not a directory; so the run cannot be signed, and resuming it will"
    assert f"{said} need --trust\n" in answer.err
    assert not Path("new/spec.sig").exists()
    assert going_on(typed, folder="new").err == refused("new", NOT_KNOWN, here / "mine.py")
    assert going_on(typed, "--trust", folder="new").code == 0
    answer = typed("train", "quadratic", *SHORT, "--out", "ours")
    assert (answer.code, "signed" in answer.err) == (0, False), "nobody will be asked: no need to say so"


class TestKey:
    def test_it_is_made_once_for_this_account_alone(self) -> None:
        with ThreadPoolExecutor(8) as pool:
            keys = set(pool.map(lambda _: signing._key(), range(32)))
        assert len(keys) == 1
        path = signing.key_path()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert [each.name for each in path.parent.iterdir()] == ["key"], "nothing is left behind"

    @pytest.mark.parametrize(
        ("spoil", "reason"),
        [
            (
                lambda path: path.chmod(0o640),
                "is open to other accounts: remove it, and the next run creates a new one",
            ),
            (
                lambda path: path.write_bytes(b"short"),
                "is not a key: remove it, and the next run creates a new one",
            ),
            (lambda path: (path.rename("kept"), path.symlink_to("kept")), "it is a link, not a file"),
        ],
        ids=["mode", "length", "link"],
    )
    def test_one_that_others_may_know_signs_nothing(
        self, spoil: Callable[[Path], object], reason: str, here: Path
    ) -> None:
        assert signing.why_not() is None
        spoil(signing.key_path())
        assert (signing.why_not() or "").endswith(reason)
        assert signing.signatures(b"spec") is None

    def test_one_of_another_account_signs_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert signing.why_not() is None
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        assert signing.why_not() == f"{signing.key_path()} belongs to another account"

    def test_none_is_made_in_another_accounts_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        uid = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: uid + 1)
        assert signing.why_not() == f"{signing.key_path().parent} belongs to another account"
        assert not signing.key_path().exists()

    def test_a_relative_configuration_folder_does_not_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CONFIG_HOME", "here")
        monkeypatch.setenv("HOME", "/home/somebody")
        assert signing.key_path() == Path("/home/somebody/.config/manyhands/key")


def test_a_crash_between_the_two_files_breaks_no_signature(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """spec.sig is written first and holds for the spec that is still there."""
    from manyhands.records import run_folder as folders

    whole = folders.write_atomically

    def crash(path: Path, content: bytes) -> None:
        if path.name == "spec.json":
            raise KeyboardInterrupt
        whole(path, content)

    monkeypatch.setattr(folders, "write_atomically", crash)
    folder = RunFolder(own)
    changed = folder.spec().replace(seed=3)
    with pytest.raises(KeyboardInterrupt):
        folder.write_spec(changed)
    assert folder.spec_and_signature() == (folder.spec(), True)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(signing.key_path().parents[1]))


class ToldError(Exception):
    """Rank 0 was asked."""


def test_beside_others_rank_0_decides(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun a rank that does not lead imports nothing before it is told to, and asks for nothing."""
    (own / "spec.sig").unlink()
    Path("mine.py").write_text(EVIL)
    for name, value in {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)

    def follow(spec: RunSpec, launcher: object) -> None:
        raise ToldError

    monkeypatch.setattr(running, "follow", follow)
    with pytest.raises(ToldError):
        resume_folder(own, {}, callbacks=[Callback()])
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="add --trust"):
        resume_folder(own, {}, callbacks=[Callback()])
    assert not Path("pwned").exists()
