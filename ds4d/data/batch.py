"""What one rank feeds its model in one forward pass.

Letters: B sequences in the micro-batch, s tokens of a sequence on this rank (S / cp).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from ds4d.attention.documents import Documents

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
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    documents: Documents | None = None
    cut: Cut | None = None

    def to(self, device: torch.device | str) -> "MicroBatch":
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            documents=None if self.documents is None else self.documents.to(device),
            cut=None if self.cut is None else self.cut.to(device),
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
        )
