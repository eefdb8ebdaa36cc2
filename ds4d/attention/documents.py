"""Which tokens of a micro-batch belong together: the document structure that attention needs.

Letters: B sequences in the micro-batch, s tokens a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F

PADDING = -1  # the document id of padding


@dataclass(frozen=True)
class Documents:
    """The runs of equal document id in the B x s tokens, row after row.

    Built once, on the CPU, where the batch is made: kernels need the lengths as Python ints, and
    asking a GPU for them would stop it.

    Attributes:
        ids: int64 [B, s]; padding has the id ``PADDING``. A token attends only inside its run.
        bounds: int32 [runs + 1], where each run starts in the flattened tokens, then B * s.
        lengths: tokens of each run, padding runs included, in order; they add up to B * s.
        covers_positions: positions restart at run bounds only. Then the packed sequences that
            transformers finds in the positions say nothing new, and need not be fetched from the
            device.
        blind_padding: attention gives padding zeros, as it is in transformers for tokens that see
            nothing: what stands before the first token of a row predicts it, and may be counted.
    """

    ids: torch.Tensor
    bounds: torch.Tensor
    lengths: tuple[int, ...]
    covers_positions: bool = False
    blind_padding: bool = False

    @classmethod
    def from_ids(cls, ids: torch.Tensor, positions: torch.Tensor | None = None) -> "Documents":
        """From ids [B, s] on the CPU. A run ends where the id changes or a row ends.

        Args:
            positions: [B, s], to learn whether they restart at run bounds only.
        """
        starts = torch.ones_like(ids, dtype=torch.bool)
        starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
        covers = positions is not None and bool(starts[:, 1:][positions.diff() != 1].all())
        bounds = torch.cat([starts.flatten().nonzero().flatten(), torch.tensor([ids.numel()])])
        lengths = tuple(bounds.diff().tolist())
        return cls(ids, bounds.to(torch.int32), lengths, covers)

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> "Documents":
        return replace(
            self,
            ids=self.ids.to(device, non_blocking=non_blocking),
            bounds=self.bounds.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> "Documents":
        return replace(self, ids=self.ids.pin_memory(), bounds=self.bounds.pin_memory())

    def padded(self, extra: int) -> "Documents":
        """With so many tokens of padding at the end of each row. Reads no device."""
        row, lengths, done = self.ids.shape[1], [], 0
        for length in self.lengths:
            lengths.append(length)
            done += length
            if done % row == 0:
                lengths.append(extra)
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        if self.ids.is_cuda:
            bounds = bounds.pin_memory().to(self.ids.device, non_blocking=True)
        ids = F.pad(self.ids, (0, extra), value=PADDING)
        return replace(self, ids=ids, bounds=bounds, lengths=tuple(lengths))

    def intersect(self, other: "Documents") -> "Documents":
        """Runs that both agree on: tokens stay together only where both keep them together.

        Only Python ints are compared. Returns self when ``other`` cuts nowhere else.
        """
        if self.lengths == other.lengths:
            return self
        ends = sorted(set(accumulate(self.lengths)) | set(accumulate(other.lengths)))
        lengths = tuple(end - start for start, end in zip([0, *ends], ends))
        if lengths == self.lengths:
            return self
        runs = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        return Documents.from_ids(runs.view(self.ids.shape)).to(self.ids.device)
