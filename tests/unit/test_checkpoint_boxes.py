"""boxes_of_range: a flat range of any tensor, as boxes."""

import itertools
import random

import pytest
import torch

from ds4d.checkpoint.logical import boxes_of_range

SHAPES = [(), (1,), (7,), (5, 3), (1, 9), (9, 1), (2, 3, 4), (3, 1, 5), (2, 2, 3, 2), (1, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_range_is_tiled_in_order_by_few_boxes(shape):
    flat = torch.arange(torch.Size(shape).numel())
    full = flat.view(shape)
    for start, stop in itertools.combinations_with_replacement(range(flat.numel() + 1), 2):
        boxes = boxes_of_range(shape, start, stop)
        taken = [
            full[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))].reshape(-1)
            for offsets, sizes in boxes
        ]
        assert torch.equal(torch.cat([*taken, flat[:0]]), flat[start:stop])
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_large_random_ranges():
    rng = random.Random(0)
    for _ in range(200):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 5)))
        flat = torch.arange(torch.Size(shape).numel())
        start, stop = sorted(rng.randint(0, flat.numel()) for _ in range(2))
        at = start
        for offsets, sizes in boxes_of_range(shape, start, stop):
            box = flat.view(shape)[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))]
            count = box.numel()
            assert torch.equal(box.reshape(-1), flat[at : at + count])
            at += count
        assert at == stop


def test_an_empty_tensor_has_no_boxes():
    assert boxes_of_range((0,), 0, 0) == []
    assert boxes_of_range((3, 0), 0, 0) == []
