"""Hugging Face models on meta, cut over tp by hand: shapes and marks, but no communication."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds4d.checkpoint.logical import pieces_of
from ds4d.tensor_parallel.shard import Shard, even, packed


def shard_of(name: str, model: PreTrainedModel, rank: int, ranks: int) -> Shard | None:
    """How llama, mixtral, phi3 and gpt2 are cut; None: whole on every rank."""
    config, shape = model.config, model.get_parameter(name).shape
    heads = config.num_attention_heads
    head = config.hidden_size // heads
    kv = getattr(config, "num_key_value_heads", None) or heads
    half = shape[1 if len(shape) == 3 else 0] // 2
    rules = {
        r"(embed_tokens|wte|lm_head)\.weight": even(0, shape[0], rank, ranks, padded=True),
        r"qkv_proj\.weight": (0, (heads * head, kv * head, kv * head)),
        r"experts\.gate_up_proj": (1, (half, half)),
        r"experts\.down_proj": even(len(shape) - 1, shape[-1], rank, ranks, padded=True),
        r"gate_up_proj\.weight": (0, (half, half)),
        r"c_attn\.(weight|bias)": (len(shape) - 1, (shape[-1] // 3,) * 3),
        r"c_fc\.(weight|bias)": even(len(shape) - 1, shape[-1], rank, ranks, padded=True),
        r"c_proj\.weight": even(0, shape[0], rank, ranks, padded=True),
        r"(q|k|v|gate|up)_proj\.(weight|bias)": even(0, shape[0], rank, ranks, padded=True),
        r"(o|down)_proj\.weight": even(len(shape) - 1, shape[-1], rank, ranks, padded=True),
    }
    for pattern, shard in rules.items():
        if re.search(rf"\.{pattern}$", f".{name}"):
            return shard if isinstance(shard, Shard) else packed(*shard, rank, ranks)
    return None


def cut_by_hand(model: PreTrainedModel, rank: int, ranks: int) -> PreTrainedModel:
    """Give each parameter of a model on meta its local shape and its marks, in place."""
    local: dict[nn.Parameter, nn.Parameter] = {}
    for name, param in list(model.named_parameters(remove_duplicate=False)):
        if param not in local:
            shard = shard_of(name, model, rank, ranks)
            if shard is None:
                continue
            data = torch.empty(shard.local_shape(tuple(param.shape)), device="meta")
            local[param] = nn.Parameter(data.to(param.dtype))
            local[param].tp_shard, local[param].tensor_model_parallel = shard, True
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, local[param])
    return model


Held = dict[str, tuple[Tensor, Shard | None]]


def held(model: nn.Module) -> Held:
    """Copies of a rank's parameters, and how they are cut."""
    return {
        name: (param.detach().clone(), getattr(param, "tp_shard", None))
        for name, param in model.named_parameters()
    }


def put_together(ranks: list[Held]) -> dict[str, Tensor]:
    """The logical tensors. Asserts that each element of a cut tensor is on one rank, that what is
    whole is equal on all, and that padding is zero."""
    whole: dict[str, Tensor] = {}
    for name, (first, shard) in ranks[0].items():
        if shard is None:
            assert all(torch.equal(first, rank[name][0]) for rank in ranks), name
            whole[name] = first
            continue
        full = torch.zeros(shard.logical_shape(tuple(first.shape)), dtype=first.dtype)
        times = torch.zeros(full.shape)
        for part, shard in (rank[name] for rank in ranks):
            for piece in pieces_of(part, (0,) * part.dim(), shard):
                box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.tensor.shape))
                full[box] = piece.tensor
                times[box] += 1
            padding = part.narrow(shard.dim, shard.local_size - shard.padding, shard.padding)
            assert not padding.any(), name
        assert (times == 1).all(), name
        whole[name] = full
    return whole
