"""What a rank has of a model, for the formulas of ``planner/traffic.py``."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ds4d.config.model_facts import field
from ds4d.config.types import RunConfig
from ds4d.data.batch import MicroBatch
from ds4d.mesh import Mesh
from ds4d.pipeline.schedules import placement_of
from ds4d.pipeline.stack import layer_stack
from ds4d.pipeline.stage import Passage
from ds4d.planner.traffic import Held
from ds4d.tensor_parallel.vocab import head_of

LOOPS = re.compile(r".*_loops|loop_num_passes|[HL]_cycles")  # fields of layers that come again
# Of attention whose keys are not k heads of d numbers in every layer.
OTHER_KEYS = (
    "kv_lora_rank", "global_head_dim", "num_global_key_value_heads", "kv_channels",
    "lambda_std_dev",
)  # fmt: skip


def held_by(
    model: PreTrainedModel, run: RunConfig, mesh: Mesh, micro_batches: Sequence[MicroBatch]
) -> Held:
    """Args:
    model: this rank's part.
    micro_batches: of one step, this rank's part.
    """
    text = model.config.get_text_config(decoder=True)
    r, pp = mesh.coordinate.pp, run.parallel.pp
    placement = placement_of(run.pipeline.schedule, pp, run.pipeline.chunks if pp > 1 else 1)
    ranks = [place.rank for place in placement.places]
    mine = list(placement.of_rank(r))
    there, back = (
        sum(0 <= s + step < len(ranks) and ranks[s + step] != r for s in mine) for step in (1, -1)
    )
    here = set(model.modules())
    stages = getattr(model, "ds4d_stages", None)
    layers = _layers(model)
    heads, key_heads, head_dim = _heads(text) if layers else (0, 0, 0)
    return Held(
        tokens=sum(batch.input_ids.numel() for batch in micro_batches),
        hidden=stages.anatomy.width if stages else field(text, "hidden_size") or 0,
        heads=heads,
        key_heads=key_heads,
        head_dim=head_dim,
        itemsize=(stages.hidden_dtype if stages else model.dtype).itemsize,
        embedding=_features(model.get_input_embeddings(), "embedding_dim") * (0 in mine),
        head=_features(model.get_output_embeddings(), "in_features") * (len(ranks) - 1 in mine),
        fused=len(ranks) - 1 not in mine or head_of(model) is not None,
        layers=layers,
        blocks=sum(block in here for block in model.ds4d_blocks),
        boundaries=there + back,
        onward=there,
        looks=int(model.ds4d_router_loss is not None),
        tied=sum(p.numel() for p in stages.tied) if stages else 0,
        partial=sum(_size(p) for p in model.parameters() if getattr(p, "tp_partial", False)),
    )


def _features(module: nn.Module | None, name: str) -> int:
    return getattr(module, name, 0)


def _layers(model: PreTrainedModel) -> int:
    """Called here, in a forward pass; 0: not known how often."""
    text = model.config.get_text_config(decoder=True)
    if any(LOOPS.fullmatch(name) for name in vars(text)):
        return 0
    try:
        _, layers = layer_stack(model)
    except ValueError:
        return 0
    return sum(not isinstance(layer, Passage) for layer in layers)


def _heads(text: PreTrainedConfig) -> tuple[int, int, int]:
    heads = field(text, "num_attention_heads")
    if not isinstance(heads, int) or any(field(text, name) for name in OTHER_KEYS):
        return 0, 0, 0
    key_heads = field(text, "num_key_value_heads") or heads
    return heads, key_heads, field(text, "head_dim") or text.hidden_size // heads


def _size(param) -> int:
    """Of the whole of it, under ZeRO-3 too."""
    return getattr(param, "ds_numel", param.numel())
