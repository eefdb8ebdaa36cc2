"""What one rank feeds its model in one forward pass.

Letters: B sequences in the micro-batch, s tokens of a sequence on this rank (S / cp).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ds4d.attention.documents import Documents

IGNORE = -100  # a target that is not counted, as everywhere in Hugging Face


@dataclass(frozen=True)
class MicroBatch:
    """Attributes:
    input_ids: int64 [B, s].
    targets: int64 [B, s], already shifted: ``targets[b, i]`` is what position i must predict,
        ``IGNORE`` where nothing is counted (padding, the last token of a document).
    position_ids: int64 [B, s], restarting at each document.
    documents: None when no row holds more than one document and nothing is padded: plain causal
        attention.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    documents: Documents | None = None

    def to(self, device: torch.device | str) -> "MicroBatch":
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            documents=None if self.documents is None else self.documents.to(device),
        )

    def pin_memory(self) -> "MicroBatch":
        """In page-locked memory, from where ``to`` copies without waiting. DataLoader calls it."""
        documents = self.documents
        if documents is not None:
            documents = replace(
                documents, ids=documents.ids.pin_memory(), bounds=documents.bounds.pin_memory()
            )
        return replace(
            self,
            input_ids=self.input_ids.pin_memory(),
            targets=self.targets.pin_memory(),
            position_ids=self.position_ids.pin_memory(),
            documents=documents,
        )
