"""What an ``Accelerator`` does with data of all processes: here of the ranks of dp, for the others
see the same samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply

from ds4d.accelerate import tensors
from ds4d.accelerate.processes import Processes


class Operations:
    """A part of ``accelerator.Accelerator``."""

    _these: Processes

    @property
    def _dp(self) -> dist.ProcessGroup:
        return self._these.mesh.group("dp")

    def gather(self, tensor: Any) -> Any:
        """In the last batch of a loader ranks may have different numbers of rows."""
        return tensors.gather(tensor, self._dp, uneven=self.gradient_state.end_of_dataloader)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Without what only fills the last batch up."""
        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if use_gather_object:
            data: Any = tensors.gather_objects(input_data, self._dp)
        else:
            data = self.gather(input_data)
        rest = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        if rest <= 0:
            return data
        return data[:rest] if use_gather_object else recursively_apply(lambda x: x[:rest], data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return tensors.reduce(tensor, self._dp, reduction)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        return tensors.pad(tensor, self._dp, dim=dim, value=pad_index, first=pad_first)

    def check_trigger(self) -> bool:
        """Whether any rank has set it. All must agree, those that share samples too."""
        flag = self.flag_tensor
        if flag is None:
            flag = torch.tensor(0, device=self.device)
        self.flag_tensor = torch.tensor(0, device=self.device)
        return bool(tensors.reduce(flag, dist.group.WORLD, "max"))

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Among the ranks of dp; those that share samples get the same."""
        with self.state.split_between_processes(inputs, apply_padding) as mine:
            yield mine
