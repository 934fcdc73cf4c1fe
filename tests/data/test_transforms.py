import io
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from conftest import MORE
from manyhands.data.order import key
from manyhands.data.transforms import (
    CenterCrop,
    CropView,
    RandomFlip,
    RandomResizedCrop,
    Resize,
    colors,
    compose,
    generator,
    show,
)

sides = st.integers(1, 3000)
seeds = st.integers(0, 2**64 - 1)


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def waves(width: int, height: int) -> Image.Image:
    """A smooth picture with no symmetry, so that a shift or a scale that is wrong shows."""
    y, x = np.mgrid[0:height, 0:width] / 40
    channels = [np.sin(x + 0.3 * y), np.cos(0.7 * y - 0.2 * x), np.sin(x * y / 10)]
    return Image.fromarray((127 + 120 * np.stack(channels, axis=2)).astype(np.uint8))


def jpeg(image: Image.Image) -> Image.Image:
    """The image as a file that is opened and not decoded yet."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95)
    return Image.open(file)


def chw(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


@given(sides, sides, st.integers(1, 400), seeds)
def test_a_random_crop_lies_inside_an_image_of_any_size(width, height, size, seed):
    view = compose(RandomResizedCrop(size)).view(width, height, generator(seed, 0, 0))
    assert (view.width, view.height) == (size, size)
    assert 0 <= view.left < view.right <= width * (1 + 1e-12)
    assert 0 <= view.top < view.bottom <= height * (1 + 1e-12)
    assert 3 / 4 - 1e-9 <= (view.right - view.left) / (view.bottom - view.top) <= 4 / 3 + 1e-9


@given(st.integers(300, 400), st.integers(300, 400), seeds)
def test_a_random_crop_has_an_area_between_the_bounds(width, height, seed):
    view = RandomResizedCrop(8, area=(0.25, 0.5))(CropView.whole(width, height), generator(seed, 0, 0))
    share = (view.right - view.left) * (view.bottom - view.top) / (width * height)
    assert 0.25 - 1e-9 <= share <= 0.5 + 1e-9


def test_an_image_too_narrow_for_any_crop_gives_its_middle():
    view = RandomResizedCrop(8, area=(0.5, 1.0))(CropView.whole(30, 3000), generator(0, 0, 0))
    assert (view.left, view.right) == (0, 30)
    assert (view.top, view.bottom) == pytest.approx((1480, 1520))
    view = RandomResizedCrop(8, area=(0.5, 1.0))(CropView.whole(3000, 30), generator(0, 0, 0))
    assert (view.top, view.bottom) == (0, 30)
    assert (view.left, view.right) == pytest.approx((1480, 1520))


def test_crops_differ_by_seed_epoch_and_sample_and_repeat_for_the_same_three():
    step, whole = RandomResizedCrop(8), CropView.whole(640, 480)
    numbers = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    views = [step(whole, generator(*three)) for three in numbers]
    assert len(set(views)) == 4
    assert views == [step(whole, generator(*three)) for three in numbers]


def test_a_sample_draws_from_philox_keyed_by_seed_epoch_and_sample():
    expected = np.random.Generator(np.random.Philox(key=key(7, 2, 5))).random(4)
    assert generator(7, 2, 5).random(4).tolist() == expected.tolist()


def test_flips_happen_half_of_the_time_and_independently_of_each_other():
    step, whole = RandomFlip(vertical=True), CropView.whole(4, 4)
    views = [step(whole, generator(seed, 0, 0)) for seed in range(2000)]
    across = np.array([view.mirrored for view in views])
    down = np.array([view.upside_down for view in views])
    # four standard deviations of 2000 tosses
    assert abs(across.sum() - 1000) < 90
    assert abs(down.sum() - 1000) < 90
    assert abs((across == down).sum() - 1000) < 90


def test_a_flip_that_is_not_asked_for_never_happens_and_changes_nothing_else():
    whole = CropView.whole(4, 4)
    for seed in range(50):
        both = RandomFlip(vertical=True)(whole, generator(seed, 0, 0))
        only = RandomFlip()(whole, generator(seed, 0, 0))
        assert not only.upside_down
        assert only.mirrored == both.mirrored
        assert RandomFlip(horizontal=False)(whole, generator(seed, 0, 0)) == whole


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("upside_down", [False, True])
def test_what_is_shown_of_a_whole_image_is_its_pixels_flipped_as_asked(mirrored, upside_down):
    image = noise(7, 5)
    axes = [2] * mirrored + [1] * upside_down
    shown = show(image, CropView(0, 0, 7, 5, 7, 5, mirrored=mirrored, upside_down=upside_down))
    assert shown.dtype == torch.uint8
    assert shown.is_contiguous()
    assert torch.equal(shown, chw(image).flip(axes))


def test_resize_and_center_crop_look_at_the_middle():
    view = compose(Resize(30), CenterCrop(20)).view(100, 60, generator(0, 0, 0))
    assert view == CropView(30, 10, 70, 50, 20, 20)


def test_resize_sets_the_shorter_side_and_keeps_the_shape():
    assert Resize(30)(CropView.whole(100, 60), generator(0, 0, 0)) == CropView(0, 0, 100, 60, 50, 30)
    assert Resize(30)(CropView.whole(60, 100), generator(0, 0, 0)) == CropView(0, 0, 60, 100, 30, 50)


def test_resize_and_center_crop_in_one_step_equal_the_two_done_by_pillow():
    image = waves(200, 100)
    together = compose(Resize(50), CenterCrop(40))(image, generator(0, 0, 0))
    resized = image.resize((100, 50), Image.Resampling.BILINEAR)
    apart = chw(resized.crop((30, 5, 70, 45)))
    assert (together.int() - apart.int()).abs().max() <= 1


def test_a_center_crop_of_an_image_that_is_too_small_enlarges_it():
    view = compose(CenterCrop(40)).view(30, 20, generator(0, 0, 0))
    assert view == CropView(5, 0, 25, 20, 40, 40)


@settings(max_examples=20 * MORE, deadline=None)
@given(st.integers(1, 120), st.integers(1, 120), st.integers(1, 40), seeds, st.booleans())
def test_every_image_gives_a_square_of_the_size_asked_for(width, height, size, seed, compressed):
    image = noise(width, height)
    training = compose(RandomResizedCrop(size), RandomFlip(vertical=True))
    testing = compose(Resize(size + 3), CenterCrop(size))
    for transform in (training, testing):
        opened = jpeg(image) if compressed else image
        assert transform(opened, generator(seed, 0, 0)).shape == (3, size, size)


@pytest.mark.parametrize(("size", "decoded"), [(75, (100, 75)), (76, (200, 150)), (301, (800, 600))])
def test_a_jpeg_is_decoded_at_the_coarsest_scale_that_is_fine_enough(size, decoded):
    image = jpeg(waves(800, 600))
    compose(Resize(size))(image, generator(0, 0, 0))
    assert image.size == decoded


@settings(max_examples=20 * MORE, deadline=None)
@given(st.integers(8, 700), st.integers(8, 700), st.integers(1, 100), seeds)
def test_a_decoded_jpeg_has_every_pixel_the_crop_needs(width, height, size, seed):
    image = jpeg(Image.new("RGB", (width, height)))
    view = compose(RandomResizedCrop(size)).view(width, height, generator(seed, 0, 0))
    show(image, view)
    scale = 2 ** round(math.log2(width / image.width)) if width > image.width else 1
    wide, high = (view.right - view.left) / scale, (view.bottom - view.top) / scale
    assert scale == 1 or (wide >= size - 1e-6 and high >= size - 1e-6)


@pytest.mark.parametrize("width", [720, 723, 727])
def test_a_coarsely_decoded_jpeg_shows_the_same_place(width):
    # sizes that 8 does not divide: a box scaled by the rounded size would drift by up to a pixel
    transform = compose(Resize(64), CenterCrop(56))
    fine = transform(waves(width, 590), generator(0, 0, 0)).int()
    coarse = transform(jpeg(waves(width, 590)), generator(0, 0, 0)).int()
    assert (fine - coarse).abs().float().mean() < 2.0


def test_grays_of_sixteen_bits_keep_their_high_byte():
    image = Image.fromarray(np.array([[0, 0x1234, 0xFFFF]], dtype=np.uint16))
    assert np.asarray(colors(image))[0].tolist() == [[0] * 3, [0x12] * 3, [0xFF] * 3]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "HSV", "LAB"])
def test_every_mode_becomes_three_channels(mode):
    image = Image.new(mode, (4, 4)) if mode in ("HSV", "LAB") else noise(4, 4).convert(mode)
    assert compose(Resize(6))(image, generator(0, 0, 0)).shape == (3, 6, 6)


def test_a_palette_with_transparency_is_no_reason_to_warn():
    image = noise(4, 4).convert("P")
    image.info["transparency"] = bytes(range(256))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert colors(image).mode == "RGB"


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_a_known_range_are_refused(mode):
    with pytest.raises(ValueError, match=f"pixels of mode {mode} have no known maximum"):
        colors(Image.new(mode, (2, 2)))
