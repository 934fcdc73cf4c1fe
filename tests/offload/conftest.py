"""One thread per test, because the machine may be busy, and a fixture that waits for an empty store."""

import gc
import time

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def emptied():
    """Wait until a store is empty, and return whether it is."""

    def wait(store, seconds=10.0):
        gc.collect()
        end = time.monotonic() + seconds
        while store.used and time.monotonic() < end:
            time.sleep(0.002)
        return store.used == 0

    return wait
