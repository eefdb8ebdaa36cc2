"""What a pipeline rank keeps for its backward passes, counted in a real step, beside what its
schedule says it may keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ds4d.pipeline.actions import Action, Kind, Schedule
from ds4d.pipeline.simulate import simulate


class Activations:
    """A ``Recorder`` of one step, whose tensors saved by autograd it counts after each pass.

    Args:
        model: this rank's part; what it holds itself is no activation.
        rank: in the pipeline.

    Attributes:
        peak: bytes, the most that were kept at once.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.peak = 0
        self._rank = rank
        self._of_a_pass = 0  # bytes that the largest forward pass keeps
        self._may_be_held = 0  # micro-batches in chunks
        self._weights = {p.untyped_storage()._cdata for p in model.parameters()}
        self._kept: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def planned(self) -> int:
        """Bytes, the most that the schedule keeps at once."""
        return self._may_be_held * self._of_a_pass

    def watching(self) -> AbstractContextManager:
        """Around the step."""
        return torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_made = tensor.is_floating_point() and tensor.dim()  # not ids, not the loss's factor
        if is_made and storage._cdata not in self._weights:
            self._kept[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return tensor.detach()

    def _held(self) -> int:
        """Bytes, now."""
        self._kept = {key: kept for key, kept in self._kept.items() if not kept[0].expired()}
        return sum(nbytes for _, nbytes in self._kept.values())

    # -- the recorder ---------------------------------------------------------------------------

    def begin(self, schedule: Schedule) -> None:
        self._may_be_held = simulate(schedule).held_until_weight[self._rank]

    def arrived(self) -> None:
        pass

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        before = self._held()
        yield
        after = self._held()
        self.peak = max(self.peak, after)
        if action.kind is Kind.FORWARD:
            self._of_a_pass = max(self._of_a_pass, after - before)
