"""Copies of what a rank is to write, so that training may go on while it is written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes; any dtype may begin there


class HostMemory:
    """One buffer in host memory, as large as what this rank writes, kept from save to save: fresh
    memory would cost more time than the copy. It is pinned where the tensors are on a GPU."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous copies, which hold until the next call. The tensors may change when this
        returns."""
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if self._buffer.numel() < size:
            pinned = any(tensor.is_cuda for tensor in tensors)
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        made = []
        for tensor, start in zip(tensors, starts):
            place = self._buffer[start : start + tensor.nbytes].view(tensor.dtype)
            made.append(place.view(tensor.shape).copy_(tensor.detach(), non_blocking=True))
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return made
