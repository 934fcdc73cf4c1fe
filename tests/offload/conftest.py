"""One thread a test, as the machine may have other work; and a store that is watched until it is empty."""

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
    """Whether a store is empty as soon as its writer has put down what it has in hand."""

    def wait(store, seconds=10.0):
        gc.collect()
        end = time.monotonic() + seconds
        while store.used and time.monotonic() < end:
            time.sleep(0.002)
        return store.used == 0

    return wait
