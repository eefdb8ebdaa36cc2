"""What each part of a model costs, so that a pipeline can be cut evenly.

A cost is that of one micro-batch's forward pass, in FLOPs, a byte that moves counted as the FLOPs
that a device does meanwhile. Backward passes are twice that, for products and bytes alike (weights
are read again, their gradients written), so only what is recomputed changes the proportions.
FLOPs decide for models worth a pipeline; bytes are what an embedding costs, and a large vocabulary
whose gradient is written and added up in each micro-batch. tp leaves the proportions as they are.

Letters: s tokens of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds4d.monitor.flops import attention_pair, layer_configs, look_ups, product_weights, visited

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from transformers import PreTrainedConfig

# Dense bf16 FLOP/s over memory bandwidth of the GPUs of these years: A100 153-201, H100 295,
# H200 206, B200 281.
FLOPS_PER_BYTE = 250.0
BYTES_PER_ELEMENT = 2.0

# What happens in a layer, by transformers' word for it: the config's field with the reach of its
# attention. A word that is in neither has full attention.
WINDOWS = {"sliding_attention": "sliding_window", "hybrid_sliding": "sliding_window"}
CHUNKS = {"chunked_attention": "attention_chunk_size"}
WITHOUT_ATTENTION = ("linear_attention", "conv", "moe")

# ds4d.recompute -> passes of a layer, a backward one counted as two, over the three of an ordinary
# step. "selective" repeats what is small beside the products.
REPEATED = {"none": 1.0, "selective": 1.0, "full": 4 / 3}


@dataclass(frozen=True)
class ModelCosts:
    """Attributes:
    path: of the list of layers.
    layers: cost of each.
    first: of what stands before the layers: the embeddings.
    last: of what stands behind them: norm, head, loss.
    """

    path: str
    layers: tuple[float, ...]
    first: float
    last: float


def model_costs(
    config: PreTrainedConfig,
    *,
    seq_len: int,
    sequences: int = 1,
    recompute: str = "none",
) -> ModelCosts:
    """The costs of a Hugging Face causal language model, built on meta.

    Args:
        seq_len: tokens of a sequence.
        sequences: of a micro-batch.
        recompute: ``ds4d.recompute``; "full" does the layers' forward pass a second time.

    Raises:
        ValueError: the model has no list of layers.
    """
    import torch

    from ds4d.model.meta import meta_model
    from ds4d.pipeline.stack import layer_stack

    model = meta_model(config, dtype=torch.float32)
    path, layers = layer_stack(model)
    text = config.get_text_config(decoder=True)
    tokens = sequences * seq_len

    def products(weights: Iterable[Parameter]) -> float:
        return sum(
            _product(weight.shape, visited(weight.shape, text), tokens) for weight in weights
        )

    def layer_cost(layer: Module, kind: str, own: PreTrainedConfig) -> float:
        attention = sequences * _pairs(own, kind, seq_len) * attention_pair(own)
        once = products(p for p in layer.parameters() if p.dim() > 1) + attention
        return once * REPEATED[recompute]

    inside = {id(parameter) for parameter in layers.parameters()}
    tables = [module.weight for module in look_ups(model) if id(module.weight) not in inside]
    return ModelCosts(
        path=path,
        layers=tuple(map(layer_cost, layers, _kinds(text), layer_configs(text))),
        first=sum(_moved(table.numel(), 2 * table.shape[1] * tokens) for table in tables),
        last=products(w for w in product_weights(model) if id(w) not in inside),
    )


def _product(shape: tuple[int, ...], elements: float, tokens: int) -> float:
    """Of one weight, ``elements`` of which a token is multiplied with."""
    *_, rows, columns = shape
    matrices = elements / (rows * columns)  # one, or the experts that a token visits
    features = matrices * (rows + columns) * tokens  # read and written
    return 2.0 * elements * tokens + _moved(math.prod(shape), features)


def _moved(weight: float, activations: float) -> float:
    return (weight + activations) * BYTES_PER_ELEMENT * FLOPS_PER_BYTE


def _kinds(config: PreTrainedConfig) -> list[str]:
    """Of each layer, what happens in it, by transformers' words."""
    if kinds := getattr(config, "layer_types", None):
        return list(kinds)
    slides = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers


def _pairs(config: PreTrainedConfig, kind: str, s: int) -> float:
    """Query-key pairs of a causal sequence in a layer; half of the square at full attention, as
    ``monitor/flops.py`` has it."""
    if kind in WITHOUT_ATTENTION:
        return 0.0
    if kind in CHUNKS:
        return s * min(s, getattr(config, CHUNKS[kind], None) or s) / 2
    window = min(s, getattr(config, WINDOWS.get(kind, ""), None) or s)
    return window * s - window**2 / 2
