"""The store on disk: buffers are not mixed up, no file is left behind, a full disk is an error."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conftest import MORE
from manyhands.core.errors import StorageError, UsageError
from manyhands.offload.activation_store import DiskStore
from manyhands.offload.budget import probe
from manyhands.offload.file_slots import PAGE, FileSlots
from manyhands.offload.scratch_file import choose, file_system


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=60))
def test_slots_never_overlap_and_are_used_again(orders):
    slots, taken = FileSlots(), {}
    for number, (choice, pages) in enumerate(orders):
        if choice < 2 and taken:
            start, size = taken.pop(sorted(taken)[choice % len(taken)])
            slots.give(start, size)
        else:
            size = pages * PAGE
            start = slots.take(size)
            assert all(start + size <= other or other + length <= start for other, length in taken.values())
            taken[number] = start, size
        assert slots.end - slots.free == sum(size for _, size in taken.values())
    for start, size in taken.values():
        slots.give(start, size)
    assert slots.free == slots.end


@settings(max_examples=6 * MORE, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["send", "prefetch", "load", "release", "drop"]),
            st.integers(0, 30),
            st.integers(1, 40000),
        ),
        max_size=40,
    ),
    st.sampled_from([0, 10000, 1 << 20]),
)
def test_any_order_of_orders(emptied, orders, in_flight):
    store, alive = DiskStore(in_flight=in_flight), []
    try:
        for name, which, nbytes in orders:
            if name == "send" or not alive:
                content = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
                alive.append((store.send(content.clone()), content))
                continue
            item, content = alive[which % len(alive)]
            if name == "prefetch":
                store.prefetch(item)
            elif name == "load":
                assert torch.equal(store.load(item), content)
            elif name == "release":
                store.release(item)
            else:
                store.drop(item)
                alive.pop(which % len(alive))
        for item, content in alive:
            assert torch.equal(store.load(item), content)
            store.drop(item)
        alive.clear()
        assert emptied(store)
    finally:
        store.close()


def offload_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("offload")]


def test_no_thread_and_no_file_is_left(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    store = DiskStore(str(tmp_path))
    store.send(torch.zeros(100000, dtype=torch.uint8))
    assert list(tmp_path.iterdir()) == []  # it never has a name
    assert len(offload_threads()) == 2
    store.close()
    store.close()  # twice is once
    assert offload_threads() == []
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_full_disk_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    def full(fd, offset, length):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = DiskStore(str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"need 3 GB in .*, which has .* free \(No space.*--offload-to"):
        store.reserve(3_000_001_536)
    with pytest.raises(StorageError, match="--offload-to"):
        store.send(torch.zeros(100000, dtype=torch.uint8))
    assert store.used == 0
    store.close()


def test_a_disk_error_is_raised_when_the_bytes_are_needed(monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = DiskStore()
    item = store.send(torch.zeros(100000, dtype=torch.uint8))
    while item.state != "stored":
        threading.Event().wait(0.001)
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StorageError, match="Input/output error"):
        store.load(item)
    store.close()


def test_a_disk_that_fails_while_it_is_measured(monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = DiskStore()
    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(StorageError, match="Input/output error"):
        probe(store)
    store.close()


def test_a_folder_that_is_memory_is_refused():
    memory = Path("/dev/shm")
    if not memory.is_dir() or file_system(memory) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    with pytest.raises(UsageError, match=r"/dev/shm is in memory \(tmpfs\).*--offload-to"):
        choose(str(memory))


def test_a_folder_that_is_missing_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"is not a folder.*--offload-to"):
        DiskStore(str(tmp_path / "nowhere"))


def test_the_page_cache_is_left_alone_where_the_file_system_allows_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "O_DIRECT", 0)
    store = DiskStore(str(tmp_path))
    assert not store.direct
    content = torch.randint(0, 256, (300000,), dtype=torch.uint8)
    item = store.send(content.clone())
    while item.state != "stored":
        threading.Event().wait(0.001)
    assert torch.equal(store.load(item), content)
    store.close()


def test_a_killed_process_leaves_nothing(tmp_path):
    program = f"""
import os, signal, torch
from manyhands.offload.activation_store import DiskStore
store = DiskStore({str(tmp_path)!r})
store.send(torch.zeros(1 << 20, dtype=torch.uint8))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == -9
    assert list(tmp_path.iterdir()) == []
