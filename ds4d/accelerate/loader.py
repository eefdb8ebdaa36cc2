"""The loader that a script gets for its own: it yields what the script's yields, one batch a time.

1. Of the ranks that see the same samples (all of a tp x cp x pp group) the first reads, this dp
   rank's share (``dealing.py``), and sends batches to the others; so they agree whatever the script
   does with random numbers. An error goes the same way, and is raised by all of them.
2. It reads a window ahead: the batches of one optimizer step. So their tokens are counted before
   the first backward pass, and a pipeline can run them all when the first is asked for.
3. Batches go to the device. What the model is then called with is recognised by identity.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderStateMixin, SeedableRandomSampler
from accelerate.state import GradientState
from accelerate.utils import send_to_device
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from ds4d.accelerate.batch import LABELS, SHIFTED
from ds4d.accelerate.dealing import Dealt, Share, deal, num_batches, sampler_of
from ds4d.accelerate.randomness import DataRandomness, State, same_seed
from ds4d.accelerate.tensors import find_batch_size
from ds4d.data.batch import IGNORE

RANK_AWARE = "BatchRebalanceSampler"  # transformers'


@dataclass(eq=False)
class Item:
    """One batch.

    Attributes:
        host: as the loader gave it, on the CPU; its parts by key, or by place.
        batch: what the script gets.
        share: how many samples of it are real.
        given: the tensors of ``batch`` as the script got them, with their versions, for it may put
            others in their place or write into them.
    """

    host: dict[Any, Any]
    batch: Any
    share: Share
    given: dict[Any, tuple[torch.Tensor, int]] = field(init=False)

    def __post_init__(self) -> None:
        named = parts_of(self.batch).items()
        self.given = {k: (x, x._version) for k, x in named if isinstance(x, torch.Tensor)}


def parts_of(batch: Any) -> dict[Any, Any]:
    """Of a batch that is a dict or a list, by key or by place; of others none."""
    if isinstance(batch, Mapping):
        return dict(batch.items())
    return dict(enumerate(batch)) if isinstance(batch, (tuple, list)) else {}


@dataclass(eq=False)
class Window:
    """The batches of one optimizer step.

    Attributes:
        last: of a pass through the data.
        done: what was computed with them, by the way in which the model was called.
    """

    items: list[Item]
    last: bool
    done: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sharing:
    """Who reads for whom.

    Attributes:
        group: the ranks that see the same samples, on the CPU.
        world: all ranks, on the CPU.
        dp_rank, dp_size: of those that see different ones.
    """

    group: dist.ProcessGroup
    world: dist.ProcessGroup
    dp_rank: int
    dp_size: int


@dataclass
class _Position:
    """Of a loader in its data, and of what is made of it by ``skipping``.

    Attributes:
        window: whose batches were given out last.
        started: random state that the present, or last, pass began with.
        inside: it has not ended.
        resumed: what the next pass begins with, and what comes after its order is drawn.
    """

    window: Window | None = None
    started: State | None = None
    inside: bool = False
    resumed: tuple[State, State | None] | None = None


class ScriptLoader(DataLoaderStateMixin):
    """Args:
    loader: the script's.
    window: batches of an optimizer step; 1 until that is known.
    split: a batch of the loader is for all ranks of dp.
    device: None: batches stay on the CPU.
    """

    def __init__(
        self,
        loader: DataLoader,
        sharing: Sharing,
        randomness: DataRandomness,
        *,
        device: torch.device | None,
        split: bool = False,
        seed: int | None = None,
        seedable: bool = False,
        non_blocking: bool = False,
    ) -> None:
        self.loader = loader
        self.gradient_state = GradientState()
        self.window = 1
        self._sharing, self._randomness = sharing, randomness
        self._device, self._split, self._non_blocking = device, split, non_blocking
        self._skip = 0
        self._position = _Position()
        if seedable:
            self._make_seedable(seed)
        sampler = sampler_of(loader)
        if type(sampler).__name__ == RANK_AWARE:
            raise ValueError(
                f"{RANK_AWARE} deals batches to ranks by itself; ds4d deals them to the ranks of "
                "dp: choose another sampler (train_sampling_strategy)"
            )
        size = loader.batch_size
        if split and size is not None and size % sharing.dp_size:
            raise ValueError(
                f"split_batches: a batch of {size} can't be split among dp {sharing.dp_size}"
            )

    def _make_seedable(self, seed: int | None) -> None:
        """Accelerate's sampler, whose order follows from seed and epoch. Collective: the world."""
        seed = same_seed(self._sharing.world) if seed is None else seed
        batches = self.loader.batch_sampler
        sampler = sampler_of(self.loader)
        if type(sampler) is RandomSampler and type(batches) is BatchSampler:
            batches.sampler = SeedableRandomSampler(
                sampler.data_source,
                replacement=sampler.replacement,
                num_samples=sampler._num_samples,
                generator=torch.Generator(),
                data_seed=seed,
            )

    # -- what scripts ask of a loader -------------------------------------------------------

    def __len__(self) -> int:
        count = num_batches(self.loader, size=self._sharing.dp_size, split=self._split)
        return count - self._skip

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    @property
    def batch_size(self) -> int | None:
        return self.loader.batch_size

    @property
    def sampler(self) -> Any:
        return self.loader.sampler

    @property
    def batch_sampler(self) -> Any:
        return self.loader.batch_sampler

    @property
    def total_batch_size(self) -> int | None:
        size = self.loader.batch_size
        return size if size is None or self._split else size * self._sharing.dp_size

    @property
    def total_dataset_length(self) -> int:
        return len(self.loader.dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)

    def set_epoch(self, epoch: int) -> None:
        for part in (sampler_of(self.loader), self.loader.batch_sampler, self.loader.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def skipping(self, batches: int) -> ScriptLoader:
        """This loader without its first batches, for one pass."""
        other = copy.copy(self)
        other._skip = self._skip + batches
        return other

    @property
    def current(self) -> Window | None:
        """That the script has batches of."""
        return self._position.window

    # -- a pass -----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Collective: the world, and with each batch the ranks that see the same samples."""
        self.reset()
        self.gradient_state._add_dataloader(self)
        try:
            for window in self._windows():
                self._position.window = window
                for number, item in enumerate(window.items, start=1):
                    if window.last and number == len(window.items):
                        self.end_of_dataloader = True
                        self.remainder = self._remainder(item)
                        self._position.inside = False
                    yield item.batch
        finally:
            self._position.inside, self._position.window = False, None
            self.gradient_state._remove_dataloader(self)

    def _remainder(self, item: Item) -> int:
        """As Accelerate has it: samples of the last group, 0: it is full."""
        whole = self.total_batch_size
        if whole is None:
            whole = (find_batch_size(item.batch) or 0) * self._sharing.dp_size
        return 0 if item.share.group in (None, whole) else item.share.group

    def _windows(self) -> Iterator[Window]:
        sharing = self._sharing
        self._begin_pass()
        reads = sharing.group.rank() == 0
        source = self._read() if reads else None
        while True:
            found: list[Any] = [None]
            if reads:
                found = [_next_window(source, self.window)]
            if sharing.group.size() > 1:
                found = _broadcast(found, sharing.group)
            outcome = found[0]
            if isinstance(outcome, Exception):
                raise outcome
            dealt, last = outcome
            if not dealt:
                return
            yield Window([self._item(*each) for each in dealt], last)
            if last:
                return

    def _begin_pass(self) -> None:
        """Collective: the world."""
        stream = self._randomness
        position = self._position
        self._after = None
        if position.resumed is not None:
            stream.state, self._after = position.resumed
            position.resumed = None
        stream.agree(_generators(self.loader))
        position.started, position.inside = stream.state, True

    def _read(self) -> Iterator[tuple[Dealt, bool]]:
        """This dp rank's batches, and whether each is the last."""
        sharing, stream = self._sharing, self._randomness
        options = {"rank": sharing.dp_rank, "size": sharing.dp_size}
        source = deal(self.loader, split=self._split, skip=self._skip, **options)
        with stream.drawing():
            ahead = next(source, None)
        if self._after is not None:
            stream.state = self._after
        else:
            stream.differ(sharing.dp_rank)
        while ahead is not None:
            batch = ahead
            with stream.drawing():
                ahead = next(source, None)
            yield batch, ahead is None

    def _item(self, host: Any, share: Share) -> Item:
        if not share.real and isinstance(host, Mapping):  # nor does the script count it
            hidden = {k: torch.full_like(host[k], IGNORE) for k in (LABELS, SHIFTED) if k in host}
            host = {**host, **hidden}
        parts, batch = parts_of(host), host  # some kinds of batch are moved in place
        if self._device is not None:
            batch = send_to_device(host, self._device, non_blocking=self._non_blocking)
        return Item(parts, batch, share)

    # -- where it stands --------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The random numbers that the order of the present pass came from, and those that come
        next. Not how many batches were read: scripts skip these themselves."""
        position = self._position
        started = position.started if position.inside else None
        return {"started": started, "now": self._randomness.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next pass has the order of the one in which the state was taken; if that had ended,
        the order of the one that would have come."""
        started, now = state["started"], state["now"]
        self._position.resumed = (now, None) if started is None else (started, now)


def _next_window(source: Iterator[tuple[Dealt, bool]], size: int) -> Any:
    """(batches, whether they are the last), or the error that reading them ended with."""
    window, last = [], False
    try:
        while len(window) < size and not last:
            step = next(source, None)
            if step is None:
                return window, True
            dealt, last = step
            window.append(dealt)
    except Exception as error:
        return error
    return window, last


def _broadcast(found: list[Any], group: dist.ProcessGroup) -> list[Any]:
    if group.rank() == 0 and isinstance(found[0], Exception):
        try:
            pickle.loads(pickle.dumps(found[0]))
        except Exception:  # an error of the script's own that does not travel
            found = [RuntimeError(f"{type(found[0]).__name__}: {found[0]}")]
    dist.broadcast_object_list(found, group=group, group_src=0)
    return found


def _generators(loader: DataLoader) -> list[torch.Generator]:
    """That the script gave, each once."""
    held = [loader.generator, getattr(sampler_of(loader), "generator", None)]
    return list({id(g): g for g in held if isinstance(g, torch.Generator)}.values())
