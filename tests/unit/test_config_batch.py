"""Layout and batch arithmetic."""

from __future__ import annotations

import pytest

from ds4d.config.batch import Unsolvable, solve_batch, solve_dp
from ds4d.config.types import BatchSizes


@pytest.mark.parametrize(
    "words, dp, solved",
    [
        ((None, 2, 4), 3, (24, 2, 4)),
        ((24, 2, None), 3, (24, 2, 4)),
        ((24, None, 4), 3, (24, 2, 4)),
        ((24, 2, 4), 3, (24, 2, 4)),
        ((24, None, None), 3, (24, 8, 1)),  # as DeepSpeed does
        ((None, 2, None), 3, (6, 2, 1)),
    ],
)
def test_two_words_give_the_third(words, dp, solved):
    assert solve_batch(*words, dp) == BatchSizes(*solved)


@pytest.mark.parametrize(
    "words, dp, said",
    [
        ((None, None, None), 1, "give a number for train_batch_size or for train_micro"),
        ((None, None, 4), 1, "give a number for train_batch_size or for train_micro"),
        ((25, 2, 4), 3, "25 is not train_micro_batch_size_per_gpu 2 x gradient_accumulation_steps"),
        ((25, 2, None), 3, "25 is not a multiple of train_micro_batch_size_per_gpu 2 x dp 3 = 6; "
         "24 or 30 would be"),
        ((4, 2, None), 3, "4 is not a multiple of train_micro_batch_size_per_gpu 2 x dp 3 = 6; "
         "6 would be"),
        ((25, None, None), 3, "25 is not a multiple of gradient_accumulation_steps 1 x dp 3 = 3"),
    ],
)  # fmt: skip
def test_words_that_do_not_fit(words, dp, said):
    with pytest.raises(Unsolvable) as caught:
        solve_batch(*words, dp)
    assert said in str(caught.value)
    assert caught.value.path == "train_batch_size"


def degrees(tp, pp, cp, dp):
    return {"tp": tp, "pp": pp, "cp": cp, "dp": dp}


@pytest.mark.parametrize(
    "tp, pp, cp, dp, world, solved",
    [
        (2, 2, 2, "auto", 16, 2),
        (2, 2, 2, 2, 16, 2),
        (1, 1, 1, "auto", None, 1),
        (2, 1, 1, 3, None, 3),
    ],
)
def test_dp(tp, pp, cp, dp, world, solved):
    assert solve_dp(degrees(tp, pp, cp, dp), world) == solved


@pytest.mark.parametrize(
    "tp, pp, cp, dp, world, said",
    [
        (2, 2, 2, "auto", 12, "tp 2 x pp 2 x cp 2 = 8 does not divide the 12 ranks"),
        (2, 1, 1, 2, 8, "tp 2 x pp 1 x cp 1 x dp 2 = 4, but the world has 8 ranks"),
        (4, 1, 1, "auto", 2, "tp 4 x pp 1 x cp 1 = 4 does not divide the 2 ranks"),
    ],
)
def test_degrees_that_do_not_make_the_world(tp, pp, cp, dp, world, said):
    with pytest.raises(Unsolvable, match=said):
        solve_dp(degrees(tp, pp, cp, dp), world)
