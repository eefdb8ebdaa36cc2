"""A layout that fits this machine and little work that still fills it."""

from __future__ import annotations

from dataclasses import replace

from ds4d.config.errors import ConfigError, Problem
from ds4d.config.layout import AXES, cut_multiple, ulysses_size
from ds4d.config.types import BatchSizes, ContextConfig, ParallelConfig, RunConfig
from ds4d.pipeline.schedules import make_schedule

LENGTH = 48  # tokens of a sequence, about: more than windows and chunks of a small model
MICRO = 2  # sequences of a micro-batch, at most
REDUCED_FIRST = ("dp", "cp", "pp", "tp")


def fewer_ranks(parallel: ParallelConfig, most: int) -> tuple[ParallelConfig, list[str]]:
    """With degrees above 2 made 2, one after the other, until there are at most ``most`` ranks;
    and what was done, for people.

    Raises:
        ConfigError: there are more ranks even so.
    """
    notes = []
    for axis in REDUCED_FIRST:
        degree = getattr(parallel, axis)
        if parallel.world_size > most and degree > 2:
            notes.append(f"{axis} is 2 here, not {degree}: --max-ranks is {most}")
            parallel = replace(parallel, **{axis: 2})
    if parallel.world_size > most:
        product = " x ".join(f"{axis} {getattr(parallel, axis)}" for axis in AXES)
        text = f"{most} is too few for {product} = {parallel.world_size}; start more ranks here"
        raise ConfigError([Problem("--max-ranks", text)])
    return parallel, notes


def smaller_context(
    context: ContextConfig, parallel: ParallelConfig
) -> tuple[ContextConfig, list[str]]:
    """A ring of groups takes four ranks; two are a ring."""
    size = context.ulysses_size or 2
    if context.method != "hybrid" or (parallel.cp > size and parallel.cp % size == 0):
        return context, []
    note = f'context.method is "ring" here, not "hybrid": cp is {parallel.cp}'
    return replace(context, method="ring", ulysses_size=None), [note]


def small_split(run: RunConfig, parallel: ParallelConfig) -> tuple[int, ...] | None:
    """Layers of each stage, uneven where they were; None: no more is known than their number."""
    split = run.pipeline.split
    if parallel.pp == 1 or parallel.pp != run.parallel.pp or split is None:
        return None
    return tuple(1 + (count > min(split)) for count in split)


def num_stages(run: RunConfig, parallel: ParallelConfig) -> int:
    return parallel.pp * run.pipeline.chunks if parallel.pp > 1 else 1


def small_batch(run: RunConfig, parallel: ParallelConfig) -> BatchSizes:
    """Few and small micro-batches: two, or two for each stage, if the schedule allows it."""
    micro = min(run.batch.micro, MICRO)
    accumulation = min(run.batch.accumulation, 2 * parallel.pp)
    while parallel.pp > 1 and not _fills(run, parallel.pp, accumulation):
        accumulation += 1
    return BatchSizes(micro * accumulation * parallel.dp, micro, accumulation)


def _fills(run: RunConfig, ranks: int, micro_batches: int) -> bool:
    pipeline = run.pipeline
    try:
        make_schedule(
            pipeline.schedule, ranks=ranks, chunks=pipeline.chunks, micro_batches=micro_batches
        )
    except ValueError:
        return False
    return True


def small_length(run: RunConfig, parallel: ParallelConfig, context: ContextConfig) -> int:
    """Padded where the sequence is cut, if it was."""
    parts = parallel.tp if parallel.sequence_parallel else 1
    multiple = cut_multiple(parallel.cp, ulysses_size(parallel.cp, context), parts)
    length = LENGTH + -LENGTH % multiple + run.data.seq_len % multiple
    return min(run.data.seq_len, length)
