"""Order and loader: each sample once an epoch, whatever the layout, wherever training resumed."""

from __future__ import annotations

import pickle
from collections import Counter
from itertools import islice

import pytest
import torch

from ds4d.config.types import BatchSizes
from ds4d.data.batch import IGNORE, MicroBatch
from ds4d.data.loader import TrainLoader, collate, eval_batches
from ds4d.data.order import SampleOrder
from ds4d.data.store import Sample
from tests.unit.data_cases import numbered_store, prepare_tokens

COUNT = 14


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return numbered_store(tmp_path_factory.mktemp("store"), COUNT)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 10, 64, 1000, 1023])
def test_each_epoch_is_a_permutation(count):
    order = SampleOrder(count, 7, True)
    epochs = [[order[k] for k in range(e * count, (e + 1) * count)] for e in range(4)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    if count >= 10:
        assert len({tuple(epoch) for epoch in epochs}) == 4
        other = SampleOrder(count, 8, True)
        assert [other[k] for k in range(count)] != epochs[0]


def test_the_order_never_changes():
    """A resumed run must see the order of the version that began it."""
    order = SampleOrder(10, 42, True)
    assert [order[k] for k in range(10)] == [3, 1, 2, 7, 5, 6, 9, 4, 8, 0]
    assert [order[k] for k in range(10, 20)] == [4, 9, 3, 6, 2, 0, 8, 1, 5, 7]


def test_all_permutations_come_about_equally_often():
    order, seen = SampleOrder(4, 3, True), Counter()
    for epoch in range(4800):
        seen[tuple(order[epoch * 4 + i] for i in range(4))] += 1
    assert len(seen) == 24
    chi_squared = sum((times - 200) ** 2 / 200 for times in seen.values())
    assert chi_squared < 60  # 23 degrees of freedom: beyond 60 in one of 30,000 fair trials


def test_a_billion_samples_cost_nothing():
    order = SampleOrder(10**9, 1, True)
    some = [order[k] for k in range(10**9 - 1000, 10**9 + 1000)]
    assert len(set(some[:1000])) == 1000 and max(some) < 10**9
    assert 0.4 < sum(some) / len(some) / 10**9 < 0.6


def test_without_shuffle_the_order_is_that_of_the_file():
    order = SampleOrder(5, 1, False)
    assert [order[k] for k in range(12)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def ids_of(batch: MicroBatch) -> list[int]:
    return (batch.input_ids[:, 0] // 4).tolist()


def consumed(store, order, batch: BatchSizes, dp: int, *, steps: int, **options):
    """Ids in the order of the global batch, from what the ranks got."""
    loaders = [
        iter(TrainLoader(store, order, batch, dp_rank=rank, dp_size=dp, **options))
        for rank in range(dp)
    ]
    ids = []
    for _ in range(steps):
        ranks = [next(loader) for loader in loaders]
        assert all(len(micro_batches) == batch.accumulation for micro_batches in ranks)
        for a in range(batch.accumulation):
            for micro_batches in ranks:
                ids += ids_of(micro_batches[a])
    return ids


# dp, micro, accumulation
SPLITS = [(1, 4, 1), (1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1), (4, 1, 1)]


@pytest.mark.parametrize("dp, micro, accumulation", SPLITS)
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_step_has_the_same_samples_in_every_layout(store, dp, micro, accumulation, shuffle):
    order = SampleOrder(COUNT, 5, shuffle)
    ids = consumed(store, order, BatchSizes(4, micro, accumulation), dp, steps=9)
    assert ids == [order[k] for k in range(36)]  # two epochs and a half; the tail is used too


# in epoch 1, at its end (28 = 2 x 14), in epoch 2, twice in one epoch
@pytest.mark.parametrize("stops", [[2], [7], [5], [1, 3], [4, 7, 8]])
def test_resumed_runs_see_what_one_run_sees(store, stops):
    order = SampleOrder(COUNT, 11, True)
    ids, done = [], 0
    layouts = [SPLITS[3], SPLITS[5], SPLITS[2], SPLITS[4]]
    for (dp, micro, accumulation), stop in zip(layouts, [*stops, 10]):
        batch = BatchSizes(4, micro, accumulation)
        ids += consumed(store, order, batch, dp, consumed_samples=4 * done, steps=stop - done)
        done = stop
    assert ids == [order[k] for k in range(40)]


def test_resume_at_a_count_that_is_no_multiple_of_the_batch(store):
    order = SampleOrder(COUNT, 11, True)
    ids = consumed(store, order, BatchSizes(6, 3, 1), 2, consumed_samples=5, steps=3)
    assert ids == [order[k] for k in range(5, 23)]


def test_workers_read_ahead_in_the_same_order_and_leave_dropouts_generator_alone(store):
    order = SampleOrder(COUNT, 2, True)
    batch = BatchSizes(4, 2, 2)
    before = torch.get_rng_state()
    assert consumed(store, order, batch, 1, steps=6, num_workers=2) == [order[k] for k in range(24)]
    consumed(store, order, batch, 1, steps=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loader_that_is_read_again_starts_at_the_same_place(store):
    loader = TrainLoader(
        store, SampleOrder(COUNT, 1, True), BatchSizes(2, 2, 1),
        dp_rank=0, dp_size=1, consumed_samples=4,
    )  # fmt: skip
    first, second = ([ids_of(m) for step in islice(loader, 3) for m in step] for _ in range(2))
    assert first == second


@pytest.mark.parametrize("count", [1, 5, 9, 13])
@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("micro", [2, 5])
def test_evaluation_sees_each_sample_once(tmp_path, count, dp, micro):
    store = numbered_store(tmp_path, count)
    ranks = [list(eval_batches(store, micro, dp_rank=r, dp_size=dp)) for r in range(dp)]
    assert {len(batches) for batches in ranks} == {-(-count // (micro * dp))}
    seen, targets = [], 0
    for batch in (batch for batches in ranks for batch in batches):
        assert batch.input_ids.shape == (micro, 4)
        counted = (batch.targets != IGNORE).any(dim=1)
        seen += [i for i, real in zip(ids_of(batch), counted.tolist()) if real]
        targets += int((batch.targets != IGNORE).sum())
    assert sorted(seen) == list(range(count))
    assert targets == store.report["target_tokens"]


def test_documents_are_given_only_where_attention_must_be_cut(tmp_path):
    document_ids = ([0] * 4, [0, 0, 1, 1], [2] * 4)
    lines = [{"input_ids": [1] * 4, "document_ids": ids} for ids in document_ids]
    store = prepare_tokens(tmp_path, lines, seq_len=4).train
    assert collate([store[0], store[2]]).documents is None
    documents = collate([store[0], store[1]]).documents
    assert documents.lengths == (4, 2, 2) and documents.ids.tolist() == [[0] * 4, [0, 0, 1, 1]]


def test_a_store_travels_as_its_path(store):
    sent = pickle.dumps(store)
    assert len(sent) < 1000
    copy = pickle.loads(sent)
    assert isinstance(copy[3], Sample) and torch.equal(copy[3].input_ids, store[3].input_ids)
    with pytest.raises(IndexError, match="sample 14 of 14"):
        store[14]
