import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from conftest import MORE
from manyhands.core.errors import ManyhandsError, UsageError
from manyhands.data import readable
from manyhands.data.base import Request
from manyhands.data.image_folder import ImageFolder
from manyhands.data.transforms import CenterCrop, Resize, compose
from pictures import gray

pytestmark = pytest.mark.usefixtures("cache")
PLAIN = compose(Resize(8), CenterCrop(8))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def opened(folder: Path, transform=PLAIN, decoders: int = 2, **options) -> ImageFolder:
    return ImageFolder.open(folder, "train", transform, decoders, **options)


def request(*samples: int, epoch: int = 0) -> Request:
    return Request(epoch, np.array(samples, dtype=np.int64))


def test_one_unreadable_image_is_named(folder):
    truncate(folder / "train/cat/1.jpg")
    with pytest.raises(UsageError) as error:
        opened(folder)
    assert str(error.value) == (
        f"1 image of {folder}/train cannot be read: cat/1.jpg; "
        "use --set skip_unreadable=true to skip unreadable images"
    )


def test_several_unreadable_images_are_counted_and_the_first_is_named(folder):
    (folder / "train/ant/2.jpg").write_text("<html>not found</html>")
    (folder / "train/cat/0.jpg").write_bytes(b"")
    (folder / "train/cat/link.png").symlink_to(folder / "nowhere.png")
    with pytest.raises(UsageError) as error:
        opened(folder)
    assert str(error.value) == (
        f"3 images of {folder}/train cannot be read, the first is ant/2.jpg; "
        "use --set skip_unreadable=true to skip unreadable images"
    )


def test_unreadable_images_are_left_out_on_request_with_a_notice(folder, capsys):
    (folder / "train/ant/2.jpg").write_text("")
    truncate(folder / "train/cat/0.jpg")
    data = opened(folder, skip_unreadable=True)
    assert data.names == ("ant/0.jpg", "ant/1.jpg", "cat/1.jpg", "cat/2.jpg")
    assert data.targets.tolist() == [0, 0, 1, 1]
    assert data.skipped == ("ant/2.jpg", "cat/0.jpg")
    assert [batch.size for batch in data.stream([request(0, 1, 2, 3)], seed=0)] == [4]
    notice = f"skipped 2 images of {folder}/train that cannot be read: ant/2.jpg, cat/0.jpg\n"
    assert capsys.readouterr() == ("", notice)


def test_the_notice_names_three_and_counts_the_rest(folder, capsys):
    for number in range(5):
        gray(folder / f"train/ant/[bad]{number}.png", 0)
        truncate(folder / f"train/ant/[bad]{number}.png")
    opened(folder, skip_unreadable=True)
    names = "ant/[bad]0.png, ant/[bad]1.png, ant/[bad]2.png and 2 more"
    assert capsys.readouterr().err == f"skipped 5 images of {folder}/train that cannot be read: {names}\n"


def test_a_class_of_which_nothing_can_be_read_is_not_skipped(folder):
    for number in range(3):
        truncate(folder / f"train/cat/{number}.jpg")
    with pytest.raises(UsageError) as error:
        opened(folder, skip_unreadable=True)
    assert str(error.value) == f"class 'cat' of {folder}/train has no readable image"


def test_the_check_is_remembered_until_a_file_changes(folder, monkeypatch):
    checked = []
    check = readable.can_read
    monkeypatch.setattr(readable, "can_read", lambda path: checked.append(path.name) or check(path))
    opened(folder)
    assert len(checked) == 6
    opened(folder, decoders=1)
    assert len(checked) == 6
    os.utime(folder / "train/cat/0.jpg", ns=(0, 12345))
    opened(folder)
    assert len(checked) == 12


def test_unreadable_images_are_remembered_and_only_they_are_asked_again(folder, monkeypatch):
    bad = {"1.jpg"}
    checked = []
    monkeypatch.setattr(readable, "can_read", lambda path: checked.append(path.name) or path.name not in bad)
    assert len(opened(folder, skip_unreadable=True)) == 4
    checked.clear()
    assert len(opened(folder, skip_unreadable=True)) == 4
    assert checked == ["1.jpg", "1.jpg"]
    bad.clear()  # permissions were given: neither the size nor the time of the files has changed
    assert len(opened(folder)) == 6


@pytest.mark.parametrize("content", ["", "[]", '{"unreadable": [1]}', '{"unreadable": "ant"}'])
def test_a_damaged_memory_is_not_believed(folder, cache, content):
    opened(folder)
    (memory,) = (cache / "checked-images").iterdir()
    whole = memory.read_text()
    memory.write_text(content)
    assert len(opened(folder)) == 6
    assert memory.read_text() == whole


def test_a_cache_that_cannot_be_written_costs_a_notice_only(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MANYHANDS_CACHE", str(tmp_path / "file"))
    assert len(opened(folder)) == 6
    assert "the result of the image check cannot be cached" in capsys.readouterr().err


def test_an_image_that_breaks_during_training_is_named(folder):
    opened(folder)
    path = folder / "train/cat/1.jpg"
    status = path.stat()
    path.write_bytes(b"x" * status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    data = opened(folder)  # the same size and time: a second start trusts the first and decodes nothing
    with pytest.raises(ManyhandsError) as error:
        list(data.stream([request(0, 4)], seed=0))
    assert str(error.value).startswith(
        f"{path} could be read before training, but cannot be read now: cannot identify"
    )
    path.unlink()
    with pytest.raises(ManyhandsError) as error:
        list(data.stream([request(4)], seed=0))
    assert (
        str(error.value)
        == f"{path} could be read before training, but cannot be read now: No such file or directory"
    )
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("decoder")]


@pytest.mark.parametrize(
    ("many", "terminal", "shown"), [(5, True, True), (5, False, False), (6, True, False)]
)
def test_a_long_check_shows_its_progress_on_a_terminal(folder, monkeypatch, capsys, many, terminal, shown):
    monkeypatch.setattr(readable, "PROGRESS_FROM", many)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich believe in one
    opened(folder)
    output = capsys.readouterr()
    assert output.out == ""
    assert ("checking 6 images" in output.err) == shown
    assert shown or output.err == ""


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about damaged TIFF tags
@settings(max_examples=40 * MORE, deadline=None)
@given(
    kind=st.sampled_from(["JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF"]),
    place=st.floats(0, 1, exclude_max=True),
    damage=st.binary(min_size=1, max_size=12),
    cut=st.booleans(),
)
def test_damage_of_any_kind_is_an_answer_and_never_a_crash(tmp_path_factory, kind, place, damage, cut):
    path = tmp_path_factory.getbasetemp() / f"damaged.{kind.lower()}"
    Image.effect_noise((16, 16), 50).convert("RGB").save(path, kind)
    content = path.read_bytes()
    start = int(place * len(content))
    path.write_bytes(content[:start] + damage + (b"" if cut else content[start + len(damage) :]))
    assert readable.can_read(path) in (True, False)
