"""A script's loader over the ranks of dp: every sample once, and the metrics of one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from ds4d.accelerate.dealing import Dealt, deal, num_batches

SIZES = (1, 5, 9, 13)


class Numbers(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, int]:
        if index >= self.count:
            raise IndexError(index)
        return {"id": index}


class Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        return iter({"id": index} for index in range(self.count))


def ids(dealt: Dealt) -> list[int]:
    return dealt.batch["id"].tolist()


def dealt_to_all(loader, size: int, **options) -> list[list[Dealt]]:
    """Of each rank."""
    options = {"split": False, "skip": 0} | options
    return [list(deal(loader(), rank=rank, size=size, **options)) for rank in range(size)]


def as_metrics(ranks: list[list[Dealt]]) -> list[int]:
    """What gather_for_metrics makes of them: all ranks' rows, of the last group the real ones."""
    found = []
    for group in zip(*ranks, strict=True):
        rows = [row for dealt in group for row in ids(dealt)]
        real = group[0].share.group
        assert {dealt.share.group for dealt in group} == {real}
        assert real is None or real == sum(dealt.share.real for dealt in group)
        found += rows if real is None else rows[:real]
    return found


@pytest.mark.parametrize("kind", [Numbers, Stream])
@pytest.mark.parametrize("batch", [2, 5])
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("count", SIZES)
def test_metrics_are_those_of_one_process(count, size, batch, kind):
    """Case G04."""
    ranks = dealt_to_all(lambda: DataLoader(kind(count), batch_size=batch), size)
    assert as_metrics(ranks) == list(range(count))
    assert len({len(rank) for rank in ranks}) == 1
    for group in zip(*ranks):
        assert all(ids(dealt) for dealt in group), "all ranks go through the model"
        assert all(dealt.share.real in (0, len(ids(dealt))) for dealt in group)
    if kind is Numbers:
        loader = DataLoader(kind(count), batch_size=batch)
        assert num_batches(loader, size=size, split=False) == len(ranks[0])


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_a_group_is_the_batch_of_one_process(kind):
    ranks = dealt_to_all(lambda: DataLoader(kind(16), batch_size=2), 4)
    groups = [[row for dealt in group for row in ids(dealt)] for group in zip(*ranks)]
    assert groups == [list(range(8)), list(range(8, 16))]


@pytest.mark.parametrize("world_rank", [0, 3])
def test_a_sampler_that_deals_to_the_world_is_not_dealt_twice(world_rank):
    """Case G02: 4 ranks as tp 2 x dp 2; the script dealt to all 4."""

    def loader():
        data = Numbers(100)
        sampler = DistributedSampler(data, num_replicas=4, rank=world_rank, shuffle=True, seed=3)
        return DataLoader(data, batch_size=5, sampler=sampler)

    ranks = dealt_to_all(loader, 2)
    assert sorted(row for rank in ranks for dealt in rank for row in ids(dealt)) == list(range(100))
    assert all(len(rank) == 10 for rank in ranks)


def test_workers_deal_alike():
    for kind in (Numbers, Stream):
        ranks = dealt_to_all(lambda: DataLoader(kind(9), batch_size=2, num_workers=1), 2)
        assert as_metrics(ranks) == list(range(9))


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_incomplete_batches_are_dropped_where_the_script_drops_them(kind):
    ranks = dealt_to_all(lambda: DataLoader(kind(13), batch_size=2, drop_last=True), 2)
    rows = [row for group in zip(*ranks) for dealt in group for row in ids(dealt)]
    assert rows == list(range(12))
    assert all(dealt.share.real == 2 for rank in ranks for dealt in rank)


@pytest.mark.parametrize("kind", [Numbers, Stream])
def test_a_batch_can_be_split_among_the_ranks(kind):
    ranks = dealt_to_all(lambda: DataLoader(kind(10), batch_size=4), 2, split=True)
    assert [[ids(dealt) for dealt in rank] for rank in ranks][0] == [[0, 1], [4, 5], [8]]
    assert as_metrics(ranks) == list(range(10))


def test_batches_are_skipped_without_being_read():
    read = []

    class Watched(Numbers):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    ranks = dealt_to_all(lambda: DataLoader(Watched(12), batch_size=2), 2, skip=2)
    assert [[ids(dealt) for dealt in rank] for rank in ranks] == [[[8, 9]], [[10, 11]]]
    assert sorted(set(read)) == [8, 9, 10, 11]


def test_data_that_is_batched_already():
    class Batches(Numbers):
        def __getitem__(self, index):
            return {"id": torch.tensor([index, index + 100])}

    ranks = dealt_to_all(lambda: DataLoader(Batches(5), batch_size=None), 2)
    assert [ids(dealt)[0] for dealt in ranks[0]] == [0, 2, 4]
    assert [ids(dealt)[0] for dealt in ranks[1]] == [1, 3, 4]
    assert ranks[1][-1].share.real == 0, "what others have, too, is counted nowhere"


def test_a_sampler_of_batches_of_different_sizes():
    batches = [[0], [1, 2, 3], [4, 5], [6], [7, 8]]
    ranks = dealt_to_all(lambda: DataLoader(Numbers(9), batch_sampler=batches), 2)
    assert [ids(dealt) for dealt in ranks[0]][:2] == [[0], [4, 5]]
    assert as_metrics(ranks)[-2:] == [7, 8]
    real = sum(dealt.share.real for rank in ranks for dealt in rank)
    assert real == 9 and math.isclose(len(ranks[0]), 3)
