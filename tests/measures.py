"""What is held in memory, counted."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.parity import make_engine


def saved_in_a_layer(runs, batch):
    """Bytes that autograd keeps for one layer, by counting those of the whole forward pass with
    all layers and with one less; a run each."""
    from ds4d.loss import sum_loss

    out = []
    for run in runs:
        engine, mesh = make_engine(run)
        model, mine = engine.module, mesh.cutter(batch)
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        counts = []
        for _ in range(2):
            kept: dict[int, int] = {}

            def keep(tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in parameters:
                    kept[storage.data_ptr()] = storage.nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = sum_loss(model, mine)
            counts.append(sum(kept.values()))
            del loss
            model.model.layers = model.model.layers[:-1]
        out.append(counts[0] - counts[1])
    return out


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // 4)
        return out
