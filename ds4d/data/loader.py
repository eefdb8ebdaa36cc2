"""Samples to micro-batches: which rank gets which, and where a resumed run goes on.

The global batch of a step is the next G = micro x accumulation x dp samples of the order. Its
sample ``(a * dp + r) * micro + m`` is row m of micro-batch a of dp rank r. So the set of samples in
a step, and their order, are the same for every dp, micro-batch size and accumulation with equal G,
and the only position there is is the number of samples consumed.

Letters: B sequences in the micro-batch, S tokens a sequence, s of them on this cp rank.
"""

from __future__ import annotations

import os
from functools import partial
from itertools import count
from typing import Iterator, Sequence

import torch
from torch.utils.data import DataLoader, Dataset

from ds4d.attention.documents import Documents
from ds4d.config.types import BatchSizes
from ds4d.context_parallel import WHOLE, Cutter
from ds4d.data.batch import IGNORE, MicroBatch
from ds4d.data.order import SampleOrder
from ds4d.data.store import Sample, SampleStore

Positions = Sequence[int | None]  # in the order; None is a row that only fills up


class TrainLoader:
    """Iterating yields, for ever, one step's micro-batches for this dp rank.

    Args:
        cutter: takes this cp rank's part of each micro-batch.
        consumed_samples: by all ranks since training began; where the first step starts.
        num_workers: processes that read ahead; 0 reads in this process.
    """

    def __init__(
        self,
        store: SampleStore,
        order: SampleOrder,
        batch: BatchSizes,
        *,
        dp_rank: int,
        dp_size: int,
        cutter: Cutter = WHOLE,
        consumed_samples: int = 0,
        num_workers: int = 0,
    ) -> None:
        self.rows = _Rows(store, order)
        self.batch = batch
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.cutter = cutter
        self.consumed_samples = consumed_samples
        self.num_workers = num_workers

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        micro_batches = iter(
            _micro_batches(self.rows, self._positions(), self.cutter, self.num_workers)
        )
        while True:
            yield [next(micro_batches) for _ in range(self.batch.accumulation)]

    def _positions(self) -> Iterator[Positions]:
        micro = self.batch.micro
        for step_start in count(self.consumed_samples, self.batch.train):
            for a in range(self.batch.accumulation):
                start = step_start + (a * self.dp_size + self.dp_rank) * micro
                yield range(start, start + micro)


def eval_batches(
    store: SampleStore, micro: int, *, dp_rank: int, dp_size: int, cutter: Cutter = WHOLE
) -> Iterator[MicroBatch]:
    """Each sample of ``store`` once over all dp ranks; the same number of batches on every rank,
    each of ``micro`` rows: rows for which no sample is left have no target."""
    num_samples = len(store)
    positions = [
        [i if i < num_samples else None for i in range(start, start + micro)]
        for start in range(dp_rank * micro, num_samples + dp_rank * micro, dp_size * micro)
    ]
    return iter(_micro_batches(_Rows(store, range(num_samples)), positions, cutter))


class _Rows(Dataset):
    """The samples by position in the order."""

    def __init__(self, store: SampleStore, order: SampleOrder | range) -> None:
        self.store, self.order = store, order

    def __getitem__(self, position: int | None) -> Sample:
        if position is None:
            filler = self.store[0]
            return filler._replace(targets=torch.full_like(filler.targets, IGNORE))
        return self.store[self.order[position]]


def _micro_batches(
    rows: _Rows, positions: Iterator[Positions], cutter: Cutter, num_workers: int = 0
) -> DataLoader:
    return DataLoader(
        rows,
        batch_sampler=positions,
        collate_fn=partial(collate, cutter=cutter),
        num_workers=num_workers,
        pin_memory=os.environ.get("DS_ACCELERATOR") == "cuda",  # set by launch.runtime
        # Without one of its own it would draw from the generator that dropout uses.
        generator=torch.Generator(),
    )


def collate(samples: Sequence[Sample], cutter: Cutter = WHOLE) -> MicroBatch:
    """[S] each -> [B, s]."""
    input_ids, targets, position_ids, document_ids = zip(*samples)
    positions = torch.stack(position_ids)
    documents = None
    if any(ids is not None for ids in document_ids):
        whole = torch.zeros_like(input_ids[0])  # a row that is one document
        rows = [whole if ids is None else ids for ids in document_ids]
        documents = Documents.from_ids(torch.stack(rows), positions)
    batch = MicroBatch(torch.stack(input_ids), torch.stack(targets), positions, documents)
    return cutter(batch)
