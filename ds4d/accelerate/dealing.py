"""How a script's own DataLoader is dealt to the ranks of dp.

A group is what all ranks of dp read at once: a batch each, in the order of the one process that
would read batches of dp times the size. The last group may be short. It is dealt evenly; a rank
for which nothing is left gets a sample that others have, too, and that is counted nowhere, for all
ranks must go through the model alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from torch.utils.data.dataloader import default_convert


class Share(NamedTuple):
    """Of one rank in a group.

    Attributes:
        real: samples of the batch here; 0: it has one that others have, too.
        group: real samples of the whole group; None: it is not the last, all are.
    """

    real: int
    group: int | None


class Dealt(NamedTuple):
    batch: Any
    share: Share


def deal(loader: DataLoader, *, rank: int, size: int, split: bool, skip: int) -> Iterator[Dealt]:
    """One pass of this rank through a loader.

    Args:
        rank, size: of dp.
        split: a batch of the loader is for the whole group.
        skip: batches of this rank to leave out.

    Raises:
        ValueError: the loader deals its data to ranks in a way of its own.
    """
    if isinstance(loader.dataset, IterableDataset):
        return _streamed(loader, _Deal(rank, size, split), skip)
    return _sampled(loader, _Deal(rank, size, split), skip)


def num_batches(loader: DataLoader, *, size: int, split: bool) -> int:
    """Of one rank.

    Raises:
        TypeError: the loader has no length.
    """
    batches = len(loader)
    if split:
        return batches
    dropped = getattr(loader.batch_sampler, "drop_last", loader.drop_last)
    return batches // size if dropped else math.ceil(batches / size)


@dataclass(frozen=True)
class _Deal:
    rank: int
    size: int
    split: bool

    def of_group(self, samples: Sequence[Any], *, last: bool) -> tuple[list[Any], Share]:
        """This rank's of the samples of a group."""
        rows = math.ceil(len(samples) / self.size)
        mine = list(samples[rows * self.rank : rows * (self.rank + 1)])
        return mine or [samples[0]], Share(len(mine), len(samples) if last else None)

    def groups(self, batches: Iterable[Sequence[Any]], drop_last: bool) -> Iterator[tuple]:
        """(this rank's samples, Share) of each group."""
        per_group = 1 if self.split else self.size
        for group, last in _with_last(_grouped(batches, per_group)):
            if drop_last and len(group) < per_group:
                return
            even = len({len(batch) for batch in group}) == 1 and len(group) == per_group
            if even and not self.split:
                share = Share(len(group[self.rank]), sum(map(len, group)) if last else None)
                yield list(group[self.rank]), share
            elif last or self.split:
                yield self.of_group([x for batch in group for x in batch], last=last)
            else:  # a sampler of batches of different sizes
                yield list(group[self.rank]), Share(len(group[self.rank]), None)


def _grouped(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    batches = iter(batches)
    while group := list(islice(batches, size)):
        yield group


def _with_last(groups: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    ahead = None
    for group in groups:
        if ahead is not None:
            yield ahead, False
        ahead = group
    if ahead is not None:
        yield ahead, True


# -- by a sampler ---------------------------------------------------------------------------------


@dataclass
class _Sampler:
    """Gives the DataLoader this rank's samples, and keeps what else is known of each batch: the
    loader returns batches in the order in which it was given their samples."""

    groups: Iterator[tuple[list[Any], Share]]
    shares: deque[Share] = field(default_factory=deque)

    def __iter__(self) -> Iterator[list[Any]]:
        for samples, share in self.groups:
            self.shares.append(share)
            yield samples


def _sampled(loader: DataLoader, dealt: _Deal, skip: int) -> Iterator[Dealt]:
    sampler = loader.batch_sampler
    if sampler is None:  # each item of the data is a batch
        items = ([index] for index in loader.sampler)
        groups = islice(dealt.groups(items, drop_last=False), skip, None)
        mine = _Sampler(groups)
        one = (indices[0] for indices in mine)
        options = {"batch_size": None, "sampler": _Once(one)}
        for batch in _alike(loader, loader.dataset, loader.collate_fn, **options):
            share = mine.shares.popleft()
            yield Dealt(batch, share)
        return
    _undeal(getattr(sampler, "sampler", None))
    drop_last = getattr(sampler, "drop_last", False)
    mine = _Sampler(islice(dealt.groups(sampler, drop_last), skip, None))
    for batch in _alike(loader, loader.dataset, loader.collate_fn, batch_sampler=mine):
        yield Dealt(batch, mine.shares.popleft())


@dataclass
class _Once:
    items: Iterator[Any]

    def __iter__(self) -> Iterator[Any]:
        return self.items


def _undeal(sampler: Any) -> None:
    """A sampler of torch's that deals to the ranks of the world gives all, in its order: it is
    dealt here, and to dp."""
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        sampler.num_replicas, sampler.rank = 1, 0
        sampler.num_samples = sampler.total_size = len(sampler.dataset)


# -- from a stream --------------------------------------------------------------------------------


class _Sample(NamedTuple):
    """One of a group. ``group``: its real samples, None: all."""

    value: Any
    real: bool
    group: int | None


class _Stream(IterableDataset):
    """Each rank reads the whole stream, and keeps its own; as Accelerate's shards do."""

    def __init__(
        self, dataset: IterableDataset, dealt: _Deal, batch_size: int | None, drop_last: bool
    ) -> None:
        self.dataset, self.dealt = dataset, dealt
        self.batch_size, self.drop_last = batch_size, drop_last

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[_Sample]:
        size = self.batch_size or 1
        batches = _grouped(self.dataset, size)
        for mine, share in self.dealt.groups(batches, self.drop_last):
            if self.drop_last and share.group is not None and share.real < len(mine):
                return
            for number, value in enumerate(mine):
                yield _Sample(value, number < share.real, share.group)


def _streamed(loader: DataLoader, dealt: _Deal, skip: int) -> Iterator[Dealt]:
    stream = _Stream(loader.dataset, dealt, loader.batch_size, loader.drop_last)
    if loader.batch_size is None:
        collate = partial(_unpacked, loader.collate_fn)
        options: dict[str, Any] = {"batch_size": None}
    else:
        collate = partial(_collated, loader.collate_fn)
        rows = loader.batch_size // dealt.size if dealt.split else loader.batch_size
        options = {"batch_size": rows, "drop_last": False}
    yield from islice(_alike(loader, stream, collate, **options), skip, None)


def _collated(collate: Callable[[list[Any]], Any], samples: list[_Sample]) -> Dealt:
    share = Share(sum(sample.real for sample in samples), samples[-1].group)
    return Dealt(collate([sample.value for sample in samples]), share)


def _unpacked(collate: Callable[[Any], Any], sample: _Sample) -> Dealt:
    """Of a stream whose items are batches: they count as one sample each."""
    return Dealt((collate or default_convert)(sample.value), Share(int(sample.real), sample.group))


def _alike(loader: DataLoader, dataset: Any, collate: Callable, **options: Any) -> DataLoader:
    """A loader with the workers of another."""
    workers: dict[str, Any] = {}
    if loader.num_workers:
        workers = {
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
        }
    return DataLoader(
        dataset,
        collate_fn=collate,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        timeout=loader.timeout,
        **workers,
        **options,
    )


def sampler_of(loader: DataLoader) -> Any:
    """What draws the order of samples; None for a stream."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    batches = loader.batch_sampler
    return getattr(batches, "sampler", None) if isinstance(batches, BatchSampler) else batches
