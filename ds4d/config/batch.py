"""The arithmetic of layouts and batches: what is left open is solved, what does not fit is said.

Batch words are in sequences: train = micro x accumulation x dp. tp, pp and cp do not multiply it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ds4d.config.types import BatchSizes

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


class Unsolvable(ValueError):
    """Numbers that do not fit; ``path`` is the key to look at first."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(message)
        self.path = path


def solve_dp(degrees: Mapping[str, int | str], world_size: int | None) -> int:
    """The data-parallel degree.

    Args:
        degrees: "tp", "pp", "cp" as numbers, "dp" as a number or "auto".
        world_size: None: as many ranks as the degrees ask for; an "auto" dp is then 1.
    """
    tp, pp, cp, dp = (degrees[axis] for axis in ("tp", "pp", "cp", "dp"))
    others = tp * pp * cp
    product = f"tp {tp} x pp {pp} x cp {cp} = {others}"
    if dp == "auto":
        if world_size is not None and world_size % others:
            message = f"{product} does not divide the {world_size} ranks of the world"
            raise Unsolvable("ds4d.parallel", message)
        return 1 if world_size is None else world_size // others
    if world_size is not None and others * dp != world_size:
        message = (
            f"tp {tp} x pp {pp} x cp {cp} x dp {dp} = {others * dp}, but the world has "
            f'{world_size} ranks; write "dp": "auto", or start {others * dp} ranks'
        )
        raise Unsolvable("ds4d.parallel", message)
    return dp


def solve_batch(
    train: int | None, micro: int | None, accumulation: int | None, dp: int
) -> BatchSizes:
    """All three batch words from any two, or, as DeepSpeed does, from train or micro alone."""
    if train is None:
        if micro is None:
            raise Unsolvable(TRAIN, f"missing: give a number for {TRAIN} or for {MICRO}")
        accumulation = accumulation or 1
        return BatchSizes(micro * accumulation * dp, micro, accumulation)
    if micro is not None and accumulation is not None:
        product = micro * accumulation * dp
        if train != product:
            message = (
                f"{train} is not {MICRO} {micro} x {ACCUMULATION} {accumulation} x dp {dp} = "
                f"{product}; leave one of the three out"
            )
            raise Unsolvable(TRAIN, message)
    elif micro is not None:
        accumulation = _share(train, MICRO, micro, dp)
    else:
        accumulation = accumulation or 1
        micro = _share(train, ACCUMULATION, accumulation, dp)
    return BatchSizes(train, micro, accumulation)


def _share(train: int, name: str, value: int, dp: int) -> int:
    share, rest = divmod(train, value * dp)
    if rest or not share:
        below, above = share * value * dp, (share + 1) * value * dp
        near = f"{below} or {above}" if below else str(above)
        message = f"{train} is not a multiple of {name} {value} x dp {dp} = {value * dp}"
        raise Unsolvable(TRAIN, f"{message}; {near} would be")
    return share
