"""What one rank feeds its model in one forward pass.

Letters: B sequences in the micro-batch, s tokens of a sequence on this rank (S / cp).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ds4d.attention.documents import PADDING, Documents

if TYPE_CHECKING:
    from ds4d.context_parallel import Cut

IGNORE = -100  # a target that is not counted, as everywhere in Hugging Face


@dataclass(frozen=True)
class MicroBatch:
    """Attributes:
    input_ids: int64 [B, s].
    targets: int64 [B, s], already shifted: ``targets[b, i]`` is what position i must predict,
        ``IGNORE`` where nothing is counted (padding, the last token of a document).
    position_ids: int64 [B, s], restarting at each document.
    documents: None when no row holds more than one document and nothing is padded: plain causal
        attention. Also None where there is a cut, which has those of the whole rows.
    cut: where the tokens of this rank stand among those of its cp group; None: it has them all.
    real: see ``real_tokens``; None: as ``documents`` say, and all tokens where there are none.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    documents: Documents | None = None
    cut: Cut | None = None
    real: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> "MicroBatch":
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            documents=None if self.documents is None else self.documents.to(device),
            cut=None if self.cut is None else self.cut.to(device),
            real=None if self.real is None else self.real.to(device, non_blocking=True),
        )

    def padded(self, multiple: int) -> "MicroBatch":
        """With rows whose length is a multiple: what is added on the right is seen by nobody, for
        models here are causal, and is not counted."""
        batch, length = self.input_ids.shape
        extra = -length % multiple
        if extra == 0:
            return self
        positions = self.position_ids[:, -1:] + torch.arange(
            1, extra + 1, device=self.position_ids.device
        )
        return MicroBatch(
            F.pad(self.input_ids, (0, extra)),
            F.pad(self.targets, (0, extra), value=IGNORE),
            torch.cat([self.position_ids, positions], dim=1),
            None if self.documents is None else self.documents.padded(extra),
            real=F.pad(real_tokens(self), (0, extra)),
        )

    def pin_memory(self) -> "MicroBatch":
        """In page-locked memory, from where ``to`` copies without waiting. DataLoader calls it."""
        return replace(
            self,
            input_ids=self.input_ids.pin_memory(),
            targets=self.targets.pin_memory(),
            position_ids=self.position_ids.pin_memory(),
            documents=None if self.documents is None else self.documents.pin_memory(),
            cut=None if self.cut is None else self.cut.pin_memory(),
            real=None if self.real is None else self.real.pin_memory(),
        )


def real_tokens(batch: MicroBatch) -> torch.Tensor:
    """bool [B, s]: what is no padding, in the data or to make rows divide."""
    if batch.real is not None:
        return batch.real
    if batch.documents is not None:
        return batch.documents.ids != PADDING
    return torch.ones_like(batch.input_ids, dtype=torch.bool)
