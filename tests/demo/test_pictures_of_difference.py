"""The difference of two pictures, on pictures small enough to check by hand."""

from __future__ import annotations

import pytest
from PIL import Image

from dit_graphs.app.demo.compare import difference_of


def test_one_changed_value_of_one_pixel_is_found_and_red() -> None:
    before = Image.new("RGB", (3, 2), (10, 20, 30))
    after = before.copy()
    after.putpixel((2, 1), (10, 21, 30))
    found = difference_of((before,), (after,))
    assert (found.num_pixels, found.num_different, found.largest) == (6, 1, 1)
    assert not found.is_zero
    red, green, blue = found.picture.getpixel((2, 1))
    assert red > green + 60
    assert red > blue + 60
    grey = found.picture.getpixel((0, 0))
    assert len(set(grey)) == 1


def test_equal_pictures_have_no_red() -> None:
    picture = Image.new("RGB", (4, 4), "teal")
    found = difference_of((picture,), (picture.copy(),))
    assert found.is_zero
    assert found.largest == 0


def test_a_difference_of_alpha_alone_counts() -> None:
    before = Image.new("RGBA", (1, 1), (0, 0, 0, 255))
    after = Image.new("RGBA", (1, 1), (0, 0, 0, 250))
    assert difference_of((before,), (after,)).largest == 5


def test_of_a_video_the_frame_that_differs_most_is_shown() -> None:
    frames = [Image.new("L", (2, 1), 0) for _ in range(3)]
    after = [frame.copy() for frame in frames]
    after[1].putpixel((0, 0), 255)
    after[1].putpixel((1, 0), 255)
    after[2].putpixel((0, 0), 9)
    found = difference_of(tuple(frames), tuple(after))
    assert (found.num_pixels, found.num_different, found.largest) == (6, 3, 255)
    assert found.picture.getpixel((1, 0))[0] > 200


def test_pictures_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="different sizes"):
        difference_of((Image.new("L", (2, 1)),), (Image.new("L", (1, 2)),))
