"""The tokens of images in a step of an engine without a GPU."""

from __future__ import annotations

from rlhf_suite.engines.whole_images import ImageRows, image_rows


def test_tokens_of_images_are_runs_that_see_their_whole_image():
    """A request without an image; one whose first image comes later, the second cut by the start of the step, the third
    whole; and one with an image in front."""
    images = {0: [], 1: [(0, 3), (8, 12), (15, 16)], 2: [(1, 2)]}
    starts, lengths = [0, 5, 15, 19], [5, 20, 4]  # so the second request computes its tokens 10 to 19
    expected = ImageRows([5, 6, 7, 10, 11, 16, 17], [1, 1, 2], [3, 2, 2], [13, 17, 3])
    assert image_rows(images, starts, lengths) == expected


def test_tokens_of_an_image_beyond_the_step_are_not_seen_yet():
    assert image_rows({0: [(2, 9)]}, [0, 4], [4]) == ImageRows([2, 3], [0], [2], [4])


def test_a_step_of_sampled_tokens_has_no_image():
    assert image_rows({0: [(2, 9)]}, [0, 1], [30]) == ImageRows([], [], [], [])
