import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from manyhands.core.errors import UsageError
from manyhands.data.base import Request
from manyhands.data.image_folder import MOST_AHEAD, ImageFolder
from manyhands.data.order import Order
from manyhands.data.transforms import CenterCrop, RandomFlip, RandomResizedCrop, Resize, compose
from pictures import gray, write

pytestmark = pytest.mark.usefixtures("cache")
PLAIN = compose(Resize(8), CenterCrop(8))
AUGMENT = compose(RandomResizedCrop(16), RandomFlip(vertical=True))
BLOOD = Path(__file__).parents[3] / "shared/data/blood-cells"


def opened(folder: Path, transform=PLAIN, decoders: int = 2, **options) -> ImageFolder:
    return ImageFolder.open(folder, "train", transform, decoders, **options)


def request(*samples: int, epoch: int = 0) -> Request:
    return Request(epoch, np.array(samples, dtype=np.int64))


def decoder_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("decoder")]


# What is found


def test_classes_are_sorted_and_targets_are_their_numbers(folder):
    data = opened(folder)
    assert data.classes == ("ant", "cat")
    assert data.names == ("ant/0.jpg", "ant/1.jpg", "ant/2.jpg", "cat/0.jpg", "cat/1.jpg", "cat/2.jpg")
    assert data.targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.targets.dtype == torch.int64
    assert len(data) == 6


def test_images_are_found_in_subfolders_by_any_known_extension_and_nothing_else_is(tmp_path):
    root = tmp_path / "data/train/cell"
    for name in ("b.JPG", "a.jpeg", "deep/er/c.Png", "d.bmp", "e.gif", "f.webp", "g.tif", "h.TIFF"):
        gray(root / name, 100)
    (root / "notes.txt").write_text("not an image")
    (root / "._b.jpg").write_bytes(b"left by a Mac")
    (tmp_path / "data/train/.hidden").mkdir()
    (tmp_path / "data/train/stray.jpg").write_bytes(b"beside the classes")
    data = opened(tmp_path / "data")
    assert data.classes == ("cell",)
    assert [name.removeprefix("cell/") for name in data.names] == [
        "a.jpeg", "b.JPG", "d.bmp", "deep/er/c.Png", "e.gif", "f.webp", "g.tif", "h.TIFF"
    ]  # fmt: skip
    (batch,) = data.stream([request(*range(8))], seed=0)
    assert batch.inputs.shape == (8, 3, 8, 8)
    assert (batch.inputs.int() - 100).abs().max() <= 2  # JPEG and WebP are not exact


# The stream


def test_batches_come_in_the_order_of_ragged_requests(tmp_path):
    for level in range(20):
        gray(tmp_path / f"data/train/class{level % 2}/{level:02}.png", level)
    data = opened(tmp_path / "data", decoders=3)
    levels = [int(Path(name).stem) for name in data.names]
    asked = [(3, 1, 2), (7,), (), (19, 0, 5, 5, 8, 11, 13), (4, 6), ()]
    batches = list(data.stream([request(*samples) for samples in asked], seed=0))
    assert [batch.size for batch in batches] == [3, 1, 0, 7, 2, 0]
    for samples, batch in zip(asked, batches, strict=True):
        assert batch.inputs.shape == (len(samples), 3, 8, 8)
        assert batch.inputs.dtype == torch.uint8
        assert batch.inputs[:, 1, 3, 3].tolist() == [levels[sample] for sample in samples]
        assert batch.targets.tolist() == [levels[sample] % 2 for sample in samples]


@pytest.mark.parametrize("decoders", [2, 5])
def test_the_number_of_decoders_changes_no_bit(folder, decoders):
    requests = list(itertools.islice(Order(n=6, batch=4, seed=1).batches(), 6))
    one = list(opened(folder, AUGMENT, decoders=1).stream(requests, seed=1))
    many = list(opened(folder, AUGMENT, decoders=decoders).stream(requests, seed=1))
    assert len(one) == len(many) == 6
    for left, right in zip(one, many, strict=True):
        assert torch.equal(left.inputs, right.inputs)
        assert torch.equal(left.targets, right.targets)


def test_a_sample_is_a_function_of_seed_and_epoch_and_not_of_the_batch_around_it(folder):
    data = opened(folder, AUGMENT)
    (together,) = data.stream([request(0, 1, 2, 3, 4, 5, epoch=3)], seed=9)
    alone = [batch.inputs[0] for batch in data.stream([request(n, epoch=3) for n in range(6)], seed=9)]
    assert torch.equal(together.inputs, torch.stack(alone))
    (other_epoch,) = data.stream([request(0, epoch=4)], seed=9)
    (other_seed,) = data.stream([request(0, epoch=3)], seed=8)
    assert not torch.equal(other_epoch.inputs[0], together.inputs[0])
    assert not torch.equal(other_seed.inputs[0], together.inputs[0])


@pytest.mark.parametrize("batch", [1, 4, 3000])
def test_reading_ahead_is_bounded(folder, batch):
    asked = []

    def endless():
        for number in itertools.count():
            asked.append(number)
            yield request(*([number % 6] * batch))

    data = opened(folder, lambda image, random: torch.zeros(1, dtype=torch.uint8), decoders=2)
    stream = data.stream(endless(), seed=0)
    for taken in (1, 2):
        next(stream)
        ahead = len(asked) * batch - taken * batch
        # whole requests are asked for, so the last of them may go beyond
        assert ahead < max(min(2 * batch, MOST_AHEAD), 4 * 2) + batch
    stream.close()


def test_decoders_work_two_batches_ahead_of_a_slow_reader(folder):
    decoded = threading.Semaphore(0)

    def transform(image, random):
        decoded.release()
        return torch.zeros(1, dtype=torch.uint8)

    data = opened(folder, transform, decoders=1)
    stream = data.stream((request(*range(6)) for _ in itertools.count()), seed=0)
    next(stream)
    for _ in range(6 + 11):  # the batch just read, and all but one image of the next two
        assert decoded.acquire(timeout=10)
    stream.close()


def test_no_thread_is_left_when_the_reader_stops_early(folder):
    before = threading.active_count()
    stream = opened(folder, decoders=5).stream((request(0, 1, 2) for _ in itertools.count()), seed=0)
    next(stream)
    assert decoder_threads()
    stream.close()
    assert decoder_threads() == []
    assert threading.active_count() == before


def test_no_thread_is_left_when_the_stream_ends_or_its_reader_fails(folder):
    data = opened(folder, decoders=5)
    assert len(list(data.stream([request(0), request(1)], seed=0))) == 2
    assert decoder_threads() == []

    def failing():
        yield request(0)
        raise RuntimeError("no more requests")

    with pytest.raises(RuntimeError, match="no more requests"):
        list(data.stream(failing(), seed=0))
    assert decoder_threads() == []


def test_pooled_streams_share_their_threads_and_read_the_same(folder):
    data = opened(folder, AUGMENT, decoders=3)
    pieces = [request(*samples, epoch=epoch) for epoch in range(4) for samples in ((0, 4), (2,), (5, 1, 3))]
    expected = [batch for piece in pieces for batch in data.stream([piece], seed=7)]
    threads = set()
    with data.pooled() as kept:
        for piece, alone in zip(pieces, expected, strict=True):
            (found,) = kept.stream([piece], seed=7)
            assert torch.equal(found.inputs, alone.inputs)
            assert torch.equal(found.targets, alone.targets)
            threads |= {thread for thread in threading.enumerate() if thread.name.startswith("decoder")}
        assert 1 <= len(threads) <= 3
    assert decoder_threads() == []


def test_a_pool_goes_on_with_the_next_stream_where_a_reader_stopped_early(folder):
    read = []

    class Noting(ImageFolder):
        def read(self, sample: int, epoch: int, seed: int):
            read.append((sample, epoch))
            return super().read(sample, epoch, seed)

    plain = opened(folder, decoders=1)
    data = Noting(plain.root, plain.classes, plain.names, plain.targets, plain.transform, 1)
    with data.pooled() as kept:
        stream = kept.stream((request(0, epoch=epoch) for epoch in range(100)), seed=0)
        next(stream)
        stream.close()
        (batch,) = kept.stream([request(5, epoch=200)], seed=0)
        assert batch.size == 1
        (last,) = [number for number, (_, epoch) in enumerate(read) if epoch == 200]
        assert last <= 4 + 1  # at most what was read ahead: images of other requests do not come first
    assert decoder_threads() == []


def test_what_was_not_begun_is_not_decoded_after_a_stop(folder):
    gate, decoded = threading.Event(), []

    def transform(image, random):
        decoded.append(1)
        if len(decoded) > 1:
            gate.wait(10)
        return torch.zeros(1, dtype=torch.uint8)

    stream = opened(folder, transform, decoders=1).stream([request(0)] + [request(1)] * 50, seed=0)
    next(stream)
    threading.Timer(0.1, gate.set).start()
    stream.close()
    assert len(decoded) <= 2


# Bad input


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UsageError) as error:
        opened(tmp_path / "nowhere")
    assert str(error.value) == f"there is no folder {tmp_path}/nowhere"
    (tmp_path / "file").touch()
    with pytest.raises(UsageError) as error:
        opened(tmp_path / "file")
    assert str(error.value) == f"{tmp_path}/file is not a folder"


def test_a_missing_split_is_named_with_what_was_found(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "readme.txt").touch()
    with pytest.raises(UsageError) as error:
        opened(data)
    assert str(error.value) == f"{data} has no folder 'train' (found: no folders)"
    for name in ("val", "Train", ".git"):
        (data / name).mkdir()
    with pytest.raises(UsageError) as error:
        opened(data)
    assert str(error.value) == f"{data} has no folder 'train' (found: Train, val)"


def test_a_split_without_classes(tmp_path):
    write(tmp_path / "data/train/0.jpg")
    with pytest.raises(UsageError) as error:
        opened(tmp_path / "data")
    assert (
        str(error.value) == f"{tmp_path}/data/train has no classes: it needs one folder of images per class"
    )


def test_classes_without_images_are_named(folder):
    (folder / "train/bee").mkdir()
    (folder / "train/bee/notes.txt").touch()
    formats = "jpg, jpeg, png, bmp, gif, webp, tif, tiff"
    with pytest.raises(UsageError) as error:
        opened(folder)
    assert str(error.value) == f"class 'bee' of {folder}/train has no images ({formats})"
    (folder / "train/elk").mkdir()
    with pytest.raises(UsageError) as error:
        opened(folder)
    assert str(error.value) == f"classes 'bee', 'elk' of {folder}/train have no images ({formats})"


@pytest.mark.parametrize(
    ("wanted", "difference"),
    [
        (("ant", "bee", "cat", "dog"), "missing: bee, dog"),
        (("cat",), "unknown: ant"),
        (("cat", "dog"), "missing: dog; unknown: ant"),
    ],
)
def test_classes_other_than_those_of_training_are_named(folder, wanted, difference):
    with pytest.raises(UsageError) as error:
        opened(folder, classes=wanted)
    where = f"{folder}/train"
    assert (
        str(error.value) == f"the classes of {where} differ from those of the training images ({difference})"
    )
    assert opened(folder, classes=("ant", "cat")).classes == ("ant", "cat")


def test_a_stream_needs_a_decoder(folder):
    with pytest.raises(UsageError, match=r"^decoders must be at least 1, not 0$"):
        opened(folder, decoders=0)


def test_the_blood_cells_are_read_as_they_are():
    if not BLOOD.is_dir():
        pytest.skip(f"the blood cells are not at {BLOOD}")
    test = ImageFolder.open(BLOOD, "test", compose(Resize(64), CenterCrop(56)), 2)
    assert test.classes == ("eosinophil", "lymphocyte", "monocyte", "neutrophil")
    assert torch.bincount(test.targets).tolist() == [60, 60, 60, 60]
    (batch,) = test.stream([request(0, 70, 239)], seed=0)
    assert batch.inputs.shape == (3, 3, 56, 56)
    assert batch.targets.tolist() == [0, 1, 3]
