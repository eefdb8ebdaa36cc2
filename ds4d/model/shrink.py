"""A config of the same family that is small enough to try: what makes the family stays.

Every number of a config has one of a few roles, told by its name: a count of heads, the size of a
head, a width of a layer, a count of experts, a length in tokens, and so on. Each role has one rule.
Numbers that no rule knows stay as they are, and so do all switches, names and rates. Which layers
stay is in ``shrink_layers.py``. Relations hold where they held: key/value heads to heads, heads x
head size to hidden size, rotary sections to the rotary size.
"""

from __future__ import annotations

import re
from copy import deepcopy
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from transformers import PreTrainedConfig

from ds4d.model.shrink_layers import cut_layers, layer_lists, layers_that_stay

VOCABULARY = 256
POSITIONS = 512
ORIGINAL_POSITIONS = 32  # of a rope that was stretched, so that few tokens go beyond them
HEAD_DIM = 16
MOST_QUERIES_PER_KEY = 8
LAYERS = 2
HIDDEN = 64  # where there are no heads

HEADS = (
    # heads, the heads that they share; those of most models' attention are in SHARED
    ("swa_num_attention_heads", "swa_num_key_value_heads"),
    ("encoder_attention_heads", None),
    ("decoder_attention_heads", None),
    ("num_encoder_attention_heads", None),
    ("num_decoder_attention_heads", None),
    ("index_n_heads", None),
    ("indexer_n_heads", "indexer_kv_heads"),
    ("linear_num_value_heads", "linear_num_key_heads"),
    ("linear_num_heads", None),
    ("mamba_n_heads", "mamba_n_groups"),
    ("mamba_num_heads", "n_groups"),
    ("num_heads", "n_groups"),
    ("n_mamba_heads", "mamba_ngroups"),
    ("heads_per_ngram", None),
)
SHARED = ("num_key_value_heads", "num_kv_heads", "num_query_groups", "kv_n_heads")
HEADS_OF_LAYER = "num_attention_heads_per_layer"
# total, count, size: where total = count x size, it stays so.
PRODUCTS = (
    ("mamba_d_ssm", "mamba_n_heads", "mamba_d_head"),
    ("attention_hidden_size", "num_attention_heads", "attention_head_dim"),
)
# heads, size of one, factor: where heads x size = factor x hidden size, the size follows.
EXPANDED = (
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
    ("mamba_num_heads", "mamba_head_dim", "expand"),
    ("num_heads", "head_dim", "expand"),
    ("n_mamba_heads", "mamba_headdim", "mamba_expand"),
)
SUMS = {"qk_head_dim": ("qk_nope_head_dim", "qk_rope_head_dim")}

HEAD_SIZE = re.compile(
    r".*head_dim|.*_head_size|dim_head|d_head|d_kv|kv_channels|rotary_dim|query_pre_attn_scalar"
    r"|mamba_d_head|mamba_headdim"
)
WIDTH = re.compile(
    r".*hidden_size.*|.*intermediate_size.*|.*ffn_dim|.*_rank|.*embedding_size|.*embed_dim|.*_lowrank"
    r"|n_embd|d_model|n_inner|dff|dim_ff|d_inner|emb_dim|embedding_dim|dim|d_rel|lru_width"
    r"|word_embed_proj_dim|feed_forward_size|mamba_d_ssm|moe_latent_size|dim_model_base"
    r"|block_multiple_of|prompt_mid_dim|adapter_in_dim|adapter_input_size|axial_pos_embds_dim"
)
WIDTH_OF_TEXT = re.compile(r"adapter_out_dim|out_hidden_size|text_hidden_size")  # of a part's output
EXPERTS = re.compile(r"(moe_)?num_(local_)?experts|n_routed_experts|num_experts")
TOP_K = re.compile(r"num_experts_per_(tok|token)|moe_top_?k|moe_k|top_k_experts")
EXPERT_GROUPS = re.compile(r"n_group|num_expert_group")
TOKEN_ID = re.compile(r".*(token|tokens)_ids?|.*_token_index|(begin_)?suppress_tokens")
VOCABULARIES = re.compile(r".*vocab_size.*|.*hash_byte_group_vocab")
NO_VOCABULARY = re.compile(r"type_vocab_size|task_type_vocab_size|make_.*")
CAPS = (
    # at most this much of what
    (8, r".*sliding_window|sliding_window_size|.*window_size|.*window_len|local_attention"),
    (16, r"compress_rates|attention_chunk_size|(mamba_)?chunk_size|floor_scale|log_scaling_n_floor"),
    (8, r"keep_window_size|index_topk|indexer_budget|rel_extent|index_block_size"),
    (2, r"index_topk_blocks|zero_expert_num|num_shared_experts|n_shared_experts"),
    (4, r"block_size|o_groups"),
    (8, r".*attn_chunk_length"),
    (8, r"(mamba_)?d_state|state_size|ssm_state_size"),
    (4, r"num_layers_per_stack|n_layers_per_attn_res_block"),
    (POSITIONS, r".*max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length"),
    (POSITIONS, r"max_(target|source)_positions|model_max_length|seq_length"),
)
CAPS = tuple((most, re.compile(names)) for most, names in CAPS)


@dataclass(frozen=True)
class Sizes:
    """What the numbers of a config are divided by.

    Attributes:
        heads: heads and key/value heads of attention, before.
        hidden, small_hidden: the hidden size before and after.
        head_scale: of sizes of heads. width_scale: of all other widths.
        tokens: what has become of special tokens beyond the small vocabulary.
        text: the sizes of the text model that this is a part beside.
    """

    heads: tuple[int, int]
    hidden: int
    small_hidden: int
    head_scale: Fraction
    width_scale: Fraction
    vocabulary: int
    tokens: dict[int, int] = field(default_factory=dict)
    text: Sizes | None = None

    def head_size(self, value: int) -> int:
        return _rounded(value * self.head_scale, 4)

    def width(self, value: int) -> int:
        return _rounded(value * self.width_scale, 8) if value else value

    def token(self, value: int) -> int:
        if value < self.vocabulary:
            return value
        return self.tokens.setdefault(value, self.vocabulary - 1 - len(self.tokens))


def shrunken(config: PreTrainedConfig, *, layers: int | None = None) -> PreTrainedConfig:
    """A small config of the same family, for random weights in fp32; ``config`` stays as it is.

    Args:
        layers: at least so many; more where the family has more kinds of layers. None: as few as
            have every kind, and two of them.

    Raises:
        ValueError: the family's config has no sizes that could be made smaller.
    """
    return _shrunken(config, layers or LAYERS, None)


def _shrunken(config: PreTrainedConfig, layers: int, outer: Sizes | None) -> PreTrainedConfig:
    fields = _fields(config)
    sizes = _sizes(config, outer)
    small = dict(fields)
    count = _get(config, "num_hidden_layers")
    if isinstance(count, int) and count > 0:
        stay = layers_that_stay(fields, count, layers)
        small |= cut_layers(fields, count, stay)
    for name in small:
        small[name] = _smaller(name, small[name], config, sizes)
    _keep_relations(config, fields, small, sizes)
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            of_text = config.get_text_config(decoder=True) in (inner, config)
            small[name] = _shrunken(inner, layers if of_text else LAYERS, sizes).to_dict()
    for name, value in MISSING.get(config.model_type, {}).items():
        if small.get(name) in (None, {}):
            small[name] = (value * len(stay))[: len(stay)] if name == "layer_types" else value
    if quirk := QUIRKS.get(config.model_type):
        quirk(config, small)
    return type(config).from_dict(small)


def _fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Every field; as the config has it, where ``to_dict`` says it differently (dory)."""
    fields = config.to_dict()
    fields |= {name: deepcopy(value) for name, value in vars(config).items() if name in fields}
    for name in ("quantization_config", "dtype", "torch_dtype", "transformers_version"):
        fields.pop(name, None)
    return fields


def _get(config: PreTrainedConfig, name: str) -> int | None:
    """A number by transformers' common name; None where the config has none."""
    value = vars(config).get(config.attribute_map.get(name, name)) or getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _rounded(value: Fraction, step: int) -> int:
    return max(step, round(value / step) * step)


def _few_heads(heads: int, shared: int | None) -> tuple[int, int]:
    """Heads and the heads that they share, in the ratio they had."""
    if not shared or shared == heads:
        return min(heads, 4), min(heads, 4)
    if heads % shared:
        return min(heads, 4), 1
    few = min(shared, 2)
    return few * min(heads // shared, MOST_QUERIES_PER_KEY), few


def _sizes(config: PreTrainedConfig, outer: Sizes | None) -> Sizes:
    hidden = _get(config, "hidden_size")
    if hidden is None and outer is not None:
        return outer
    if hidden is None:
        return _sizes_of_parts(config)
    heads = _get(config, "num_attention_heads")
    tokens = outer.tokens if outer else {}
    text = config.get_text_config(decoder=True)
    vocabulary = outer.vocabulary if outer else min(_get(text, "vocab_size") or 0, VOCABULARY)
    if heads is None:
        small = min(hidden, HIDDEN)
        scale = Fraction(HEAD_DIM, max(_get(config, "head_dim") or HEAD_DIM, HEAD_DIM))
        sizes = (1, 1), hidden, small, scale, Fraction(small, hidden)
        return Sizes(*sizes, vocabulary, tokens, outer)
    shared = _shared_heads(config) or heads
    few, _ = _few_heads(heads, shared)
    head_dim = _get(config, "head_dim") or hidden // heads
    small_dim = min(head_dim, _head_dim(config))
    if heads * head_dim == hidden:
        small = few * small_dim
    else:
        step = few * 8 if few % 2 else few * 4
        small = _rounded(Fraction(hidden * few * small_dim, heads * head_dim), step)
        small += step * (small == few * small_dim)
    scale = Fraction(small_dim, head_dim)
    sizes = (heads, shared), hidden, small, scale, Fraction(small, hidden)
    return Sizes(*sizes, vocabulary, tokens, outer)


def _shared_heads(config: PreTrainedConfig) -> int | None:
    """Key/value heads, of the config or of the part of it that is about attention."""
    parts = [config, getattr(config, "attn_config", None)]
    found = (_get(part, name) for part in parts if part for name in SHARED)
    return next((number for number in found if number), None)


def _sizes_of_parts(config: PreTrainedConfig) -> Sizes:
    """Of a config whose numbers are in others: text's, or the first that has any."""
    text = config.get_text_config(decoder=True)
    parts = [text, *(getattr(config, name, None) for name in config.sub_configs)]
    for part in parts:
        if isinstance(part, PreTrainedConfig) and _get(part, "hidden_size"):
            return _sizes(part, None)
    raise ValueError(f"{config.model_type}: its config has no hidden size to make smaller")


def _head_dim(config: PreTrainedConfig) -> int:
    """The least size whose rotary part is even, too."""
    parts = [rope.get("partial_rotary_factor") or 1.0 for rope in _ropes(config)]
    parts.append(getattr(config, "partial_rotary_factor", None) or 1.0)
    fits = (d for d in (16, 32, 64, 128) if all(int(d * p) > 1 and int(d * p) % 2 == 0 for p in parts))
    return next(fits, HEAD_DIM)


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Rope parameters, one dict or one of each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or ([rope] if rope else [])


def _smaller(name: str, value: Any, config: PreTrainedConfig, sizes: Sizes) -> Any:
    """The value that a field of the small config has, as far as its name alone says it."""
    if isinstance(value, bool) or value is None or isinstance(value, (str, float)):
        return value
    if name in ("rope_parameters", "rope_scaling"):
        return _rope(value, config, sizes)
    if name == "per_layer_config":
        return {key: _own_of_layer(own, config, sizes) for key, own in value.items()}
    if isinstance(value, dict) and name == "compress_rates":
        return {key: _smaller(name, rate, config, sizes) for key, rate in value.items()}
    if isinstance(value, (list, tuple)):
        return [_smaller(name, item, config, sizes) for item in value]
    if not isinstance(value, int) or value < 0:
        return value
    if name == HEADS_OF_LAYER:
        return _few_heads(value, sizes.heads[1])[0]
    if TOKEN_ID.fullmatch(name):
        return sizes.token(value)
    if VOCABULARIES.fullmatch(name) and not NO_VOCABULARY.fullmatch(name):
        return min(value, VOCABULARY)
    if sizes.text and WIDTH_OF_TEXT.fullmatch(name):
        return sizes.text.width(value)
    if HEAD_SIZE.fullmatch(name):
        return sizes.head_size(value)
    if WIDTH.fullmatch(name):
        return sizes.width(value)
    return min([value, *(most for most, names in CAPS if names.fullmatch(name))])


def _own_of_layer(own: dict[str, Any], config: PreTrainedConfig, sizes: Sizes) -> dict[str, Any]:
    small = {name: _smaller(name, value, config, sizes) for name, value in own.items()}
    heads = own.get("num_attention_heads", sizes.heads[0])
    shared = own.get("num_key_value_heads", sizes.heads[1])
    few = dict(zip(("num_attention_heads", "num_key_value_heads"), _few_heads(heads, shared)))
    return small | {name: value for name, value in few.items() if name in own}


def _keep_relations(
    config: PreTrainedConfig, fields: dict[str, Any], small: dict[str, Any], sizes: Sizes
) -> None:
    """Numbers that follow from other numbers, in place: ``fields`` is what they were."""

    def put(name: str, value: int) -> None:
        name = config.attribute_map.get(name, name)
        if isinstance(fields.get(name), int) and not isinstance(fields[name], bool):
            small[name] = value

    if _get(config, "hidden_size"):
        put("hidden_size", sizes.small_hidden)
    few, few_shared = _few_heads(*sizes.heads)
    put("num_attention_heads", few)
    for name in SHARED:
        put(name, few_shared if _get(config, name) == sizes.heads[1] else few)
    for heads, shared in HEADS:
        if many := _get(config, heads):
            few, few_shared = _few_heads(many, shared and _get(config, shared))
            put(heads, few)
            if shared and _get(config, shared):
                put(shared, few_shared)
    _fill_in(config, fields, small, sizes)
    now = _Both(config, small)
    for total, count, size in PRODUCTS:
        if total in fields and now.before(total) == now.before(count) * now.before(size):
            small[total] = now.after(count) * now.after(size)
    for count, size, factor in EXPANDED:
        expanded = now.before(factor) * sizes.hidden
        if expanded and now.before(count) * now.before(size) == expanded:
            small[size] = now.before(factor) * sizes.small_hidden // now.after(count)
    for total, parts in SUMS.items():
        if total in fields and all(part in fields for part in parts):
            small[total] = sum(map(now.after, parts))
    _few_experts(config, fields, small)
    _few_positions(config, small)


def _fill_in(
    config: PreTrainedConfig, fields: dict[str, Any], small: dict[str, Any], sizes: Sizes
) -> None:
    """What None stands for, where not every model's code knows it."""
    heads = small.get(config.attribute_map.get("num_attention_heads", "num_attention_heads"))
    if not isinstance(heads, int):
        return
    for name, value in (("num_key_value_heads", heads), ("head_dim", sizes.small_hidden // heads)):
        name = config.attribute_map.get(name, name)
        if name in fields and fields[name] is None:
            small[name] = value


class _Both:
    """A number by its common name, before and after; 0 where there is none."""

    def __init__(self, config: PreTrainedConfig, small: dict[str, Any]) -> None:
        self.config, self.small = config, small

    def before(self, name: str) -> int:
        return _get(self.config, name) or 0

    def after(self, name: str) -> int:
        return self.small[self.config.attribute_map.get(name, name)]


def _few_experts(
    config: PreTrainedConfig, fields: dict[str, Any], small: dict[str, Any]
) -> None:
    """Few experts, more than a token goes to; two groups where there are groups."""
    groups = next((fields[n] for n in fields if EXPERT_GROUPS.fullmatch(n)), None) or 1
    few_groups = min(groups, 2)
    for name, value in fields.items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if EXPERTS.fullmatch(name):
            small[name] = min(value, 4 * few_groups)
        elif TOP_K.fullmatch(name):
            small[name] = min(value, 2)
        elif EXPERT_GROUPS.fullmatch(name):
            small[name] = few_groups
        elif name == "topk_group":
            small[name] = few_groups if value == groups else 1


def _few_positions(config: PreTrainedConfig, small: dict[str, Any]) -> None:
    """Rope that was stretched from fewer positions: both smaller, their ratio as it was."""
    most = _get(config, "max_position_embeddings")
    ropes = [rope for rope in _ropes(config) if rope.get("original_max_position_embeddings")]
    if most is None or not ropes:
        return
    ratio = Fraction(most, min(int(r["original_max_position_embeddings"]) for r in ropes))
    few = min(most, max(POSITIONS, round(ORIGINAL_POSITIONS * ratio)))
    small["max_position_embeddings"] = few
    rope = small["rope_parameters"]
    for one in [rope, *(value for value in rope.values() if isinstance(value, dict)), small]:
        if original := one.get("original_max_position_embeddings"):
            before = original  # not changed by its name
            one["original_max_position_embeddings"] = max(1, round(Fraction(few * int(before), most)))


def _rope(rope: dict[str, Any], config: PreTrainedConfig, sizes: Sizes) -> dict[str, Any]:
    small = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            small[name] = _rope(value, config, sizes)
        elif name in ("short_factor", "long_factor"):
            count = sizes.head_size(2 * len(value)) // 2
            small[name] = [value[i * len(value) // count] for i in range(count)]
        elif name == "mrope_section":
            small[name] = _sections(value, sizes.head_size(2 * sum(value)) // 2)
        else:
            small[name] = value
    return small


def _sections(sections: list[int], total: int) -> list[int]:
    """Each at least 1, together ``total``, as nearly as they were to each other."""
    few = [max(1, value * total // sum(sections)) for value in sections]
    while sum(few) != total:
        step = 1 if sum(few) < total else -1
        most = max(range(len(few)), key=lambda i: step * (sections[i] * total - few[i] * sum(sections)))
        few[most] += step
    return few


# What a family's default config leaves out though its model needs it. Lists go on as they begin.
MISSING: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 8, "indexer_compress_ratio": 4,
    },
}  # fmt: skip


def _blt(config: PreTrainedConfig, small: dict[str, Any]) -> None:
    """The global model is as wide as the keys of a patch together."""
    encoder, decoder, whole = (small[f"{n}_config"] for n in ("encoder", "decoder", "global"))
    width = encoder["hidden_size"] * config.cross_attn_k
    encoder["hidden_size_global"] = decoder["hidden_size_global"] = whole["hidden_size"] = width
    whole["head_dim"] = width // whole["num_attention_heads"]


def _dbrx(config: PreTrainedConfig, small: dict[str, Any]) -> None:
    for name, value in (("rope_theta", 10000.0), ("clip_qkv", 8.0)):
        if small["attn_config"].get(name) is None:
            small["attn_config"][name] = value


def _hrm_text(config: PreTrainedConfig, small: dict[str, Any]) -> None:
    """``num_hidden_layers`` counts how often a layer is called."""
    calls = config.H_cycles * (config.L_cycles + 1)
    small["num_layers_per_stack"] = small["num_hidden_layers"]
    small["num_hidden_layers"] *= calls


def _inkling2_loop_text(config: PreTrainedConfig, small: dict[str, Any]) -> None:
    small["n_layers_per_attn_res_block"] = 1  # the loop begins and ends between blocks


def _reformer(config: PreTrainedConfig, small: dict[str, Any]) -> None:
    """It trains on as many tokens as the table of positions has, and no others."""
    small["axial_pos_shape"], small["max_position_embeddings"] = [8, 8], 64


def _xmod(config: PreTrainedConfig, small: dict[str, Any]) -> None:
    small["default_language"] = config.default_language or config.languages[0]


QUIRKS: dict[str, Callable[[PreTrainedConfig, dict[str, Any]], None]] = {
    "blt": _blt,
    "dbrx": _dbrx,
    "hrm_text": _hrm_text,
    "inkling2_loop_text": _inkling2_loop_text,
    "reformer": _reformer,
    "xmod": _xmod,
}
