"""Model FLOPs: what the mathematics of a training step needs, however it is computed.

Conventions, those of the MFU figures that others publish for causal models:
- forward and backward (3 x forward), a multiply-add is 2; recomputed work does not count;
- every weight matrix, the head included, the embedding look-up not: 6 per token and parameter;
  of an expert layer only the experts that a token visits;
- attention scores and values: causal, so half of the square, over each document by itself.
  Sliding windows are counted as full attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.nn import Embedding, Parameter
    from transformers import PretrainedConfig, PreTrainedModel

# Dense bf16 TFLOP/s of one device, from the vendors' data sheets; the first name that is part of
# what the driver calls the device counts.
PEAK_BF16_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("GH200", 989.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("MI300X", 1307.0),
    ("MI250X", 383.0),
)


def peak_tflops(device_name: str) -> float | None:
    """Peak bf16 TFLOP/s of a device by its name; None when unknown."""
    return next((peak for name, peak in PEAK_BF16_TFLOPS if name in device_name), None)


@dataclass(frozen=True)
class ModelFlops:
    """Forward + backward FLOPs of a model.

    Attributes:
        per_token: of all matrix products with weights, for one token.
        per_pair: of attention, in all layers, for one (query, key) pair.
    """

    per_token: float
    per_pair: float

    def of_sequences(self, tokens: float, squares: float) -> float:
        """FLOPs of some documents: ``tokens`` is the sum of their lengths, ``squares`` the sum of
        the squares of their lengths."""
        return self.per_token * tokens + self.per_pair * squares / 2

    def of_sequence(self, length: int) -> float:
        """FLOPs of one document of ``length`` tokens."""
        return self.of_sequences(length, length**2)


def model_flops(config: PretrainedConfig) -> ModelFlops:
    """Count a Hugging Face causal language model, built without memory on the meta device."""
    import torch

    from ds4d.model.meta import meta_model

    model = meta_model(config, dtype=torch.float32)
    text = config.get_text_config(decoder=True)
    weights = sum(visited(weight.shape, text) for weight in product_weights(model))
    pair = sum(map(attention_pair, layer_configs(text)))
    return ModelFlops(per_token=6.0 * weights, per_pair=3.0 * pair)


def layer_configs(config: PretrainedConfig) -> list[PretrainedConfig]:
    """Of each layer: heads may have other sizes in some (gemma 4)."""
    own = getattr(config, "per_layer_config", None)
    return [config] * config.num_hidden_layers if own is None else list(own)


def product_weights(model: PreTrainedModel) -> list[Parameter]:
    """The weights that tokens are multiplied with: each matrix once, and no look-up."""
    lookups = {id(module.weight) for module in look_ups(model)}
    head = model.get_output_embeddings()
    if head is not None:
        lookups.discard(id(head.weight))  # a tied embedding is also the head's matrix
    return [p for p in model.parameters() if p.dim() >= 2 and id(p) not in lookups]


def look_ups(model: PreTrainedModel) -> list[Embedding]:
    """The tables of tokens, positions and the like."""
    from torch.nn import Embedding

    return [module for module in model.modules() if isinstance(module, Embedding)]


def visited(shape: Sequence[int], config: PretrainedConfig) -> float:
    """Elements of a weight that one token is multiplied with."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    if experts and len(shape) == 3 and shape[0] == experts:
        return math.prod(shape) * config.num_experts_per_tok / experts
    return math.prod(shape)


def attention_pair(config: PretrainedConfig) -> float:
    """Forward FLOPs of one query-key pair in the layer of this config: a product with the key and
    one with the value, per head. Grouped keys and values are shared, not saved: their number does
    not matter."""
    heads = getattr(config, "num_attention_heads", 0)
    if not heads:  # a state-space model: all its work is in products with weights
        return 0.0
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    key_dim = getattr(config, "qk_head_dim", None) or head_dim
    value_dim = getattr(config, "v_head_dim", None) or head_dim
    return 2.0 * heads * (key_dim + value_dim)
