"""The weights of a ds4d checkpoint, under the model's names, read one at a time: what ``Weights`` is
for a Hugging Face folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ds4d.checkpoint.errors import CheckpointError
from ds4d.checkpoint.load import read_here
from ds4d.checkpoint.logical import LogicalTensor, Piece
from ds4d.checkpoint.storage import SafetensorsReader
from ds4d.tensor_parallel.shard import Shard


class CheckpointWeights:
    """The weights and buffers of a checkpoint by name, each read when it is asked for.

    Args:
        model: ``logical_model(config)``; borrowed for its names and shapes.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self._reader = SafetensorsReader(folder)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._sources = model.all_tied_weights_keys

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def __call__(self, name: str, shard: Shard | None = None) -> Tensor:
        """The tensor, or a rank's part of it, on the CPU; no more is read."""
        kind = "weight" if name in self._parameters else "buffer"
        key = f"{kind}/{self._sources.get(name, name)}"
        saved = self._reader.metadata.state_dict_metadata.get(key)
        shape = self._shapes[name]
        if saved is None or tuple(saved.size) != shape:
            raise CheckpointError(
                f"{self._reader.folder}: {key} of shape {list(shape)} is not there; "
                "the checkpoint was made with another version of transformers"
            )
        read = partial(self._read, key, shape, saved.properties.dtype)
        return read(()) if shard is None else shard.cut(read, shape)

    def _read(
        self, key: str, shape: tuple[int, ...], dtype: torch.dtype, box: tuple[slice, ...]
    ) -> Tensor:
        """A box; what it does not name it has whole."""
        box = (*box, *[slice(None)] * (len(shape) - len(box)))
        ranges = [part.indices(size)[:2] for part, size in zip(box, shape, strict=True)]
        tensor = torch.empty([stop - start for start, stop in ranges], dtype=dtype)
        if tensor.numel():
            piece = Piece(tuple(start for start, _ in ranges), tensor)
            read_here(self._reader, {key: LogicalTensor(shape, dtype, (piece,))})
        return tensor
