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
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from transformers import PreTrainedConfig

from ds4d.model.shrink_layers import cut_layers, layers_that_stay
from ds4d.model.shrink_quirks import MISSING, QUIRKS
from ds4d.model.shrink_rope import few_positions, head_dim_that_fits, small_rope

VOCABULARY = 256
POSITIONS = 512
HEAD_DIM = 16
MOST_QUERIES_PER_KEY = 8
MOST_HEADS, MOST_KEY_HEADS = 4, 2  # unless more ranks share them
LAYERS = 2
LAYERS_OF_PART = 1  # beside the text model, and another number, to tell them apart
HIDDEN = 64  # where there are no heads
LEAST_HIDDEN = 32

HEADS = (
    # heads, the heads that they share; those of most models' attention are in SHARED
    ("swa_num_attention_heads", "swa_num_key_value_heads"),
    ("encoder_attention_heads", None),
    ("decoder_attention_heads", None),
    ("num_encoder_attention_heads", None),
    ("num_decoder_attention_heads", None),
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
# Of an indexer: another number than the queries', for ds4d tells by it what belongs to which; and
# not so few that keys score nothing with all of them, for which of those are taken is by chance.
INDEX_HEADS = 16
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
# What a part hands to the text model.
WIDTH_OF_TEXT = re.compile(r"adapter_out_dim|out_hidden_size|text_hidden_size")
EXPERTS = re.compile(r"(moe_)?num_(local_)?experts|n_routed_experts|num_experts")
TOP_K = re.compile(r"num_experts_per_(tok|token)|moe_top_?k|moe_k|top_k_experts")
EXPERT_GROUPS = re.compile(r"n_group|num_expert_group")
TOKEN_ID = re.compile(r".*(token|tokens)_ids?|.*_token_index|(begin_)?suppress_tokens")
VOCABULARIES = re.compile(r".*vocab_size.*|.*hash_byte_group_vocab")
NO_VOCABULARY = re.compile(r"type_vocab_size|task_type_vocab_size|make_.*")
CAPS = (
    # at most this much of what
    (8, r".*sliding_window|sliding_window_size|(?!keep_).*window_size|.*window_len|local_attention"),
    (16, r"compress_rates|attention_chunk_size|(mamba_)?chunk_size"),
    (16, r"floor_scale|log_scaling_n_floor"),
    (64, r"keep_window_size"),  # the same tokens would be alike, and which of them stay by chance
    (8, r"index_topk|indexer_budget|rel_extent|index_block_size"),
    (2, r"index_topk_blocks|zero_expert_num|num_shared_experts|n_shared_experts"),
    (4, r"block_size|o_groups"),
    (8, r".*attn_chunk_length"),
    (8, r"(mamba_)?d_state|state_size|ssm_state_size"),
    (4, r"num_layers_per_stack|n_layers_per_attn_res_block"),
    (POSITIONS, r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length"),
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
        vocabulary: the small one's size; 0 where there is none.
        tokens: what has become of special tokens beyond the small vocabulary.
        text: the sizes of the text model that this is a part beside.
        ranks: that share the heads.
    """

    heads: tuple[int, int]
    hidden: int
    small_hidden: int
    head_scale: Fraction
    width_scale: Fraction
    vocabulary: int
    tokens: dict[int, int] = field(default_factory=dict)
    text: Sizes | None = None
    ranks: int = 1

    def head_size(self, value: int) -> int:
        return _rounded(value * self.head_scale, 4) if self.head_scale < 1 else value

    def width(self, value: int) -> int:
        return _rounded(value * self.width_scale, 8) if value and self.width_scale < 1 else value

    def token(self, value: int) -> int:
        if value < self.vocabulary or not self.vocabulary:
            return value
        return self.tokens.setdefault(value, max(0, self.vocabulary - 1 - len(self.tokens)))


def shrunken(
    config: PreTrainedConfig, *, layers: int | None = None, ranks: int = 1
) -> PreTrainedConfig:
    """A small config of the same family, for random weights in fp32; ``config`` stays as it is.

    Args:
        layers: at least so many; more where the family has more kinds of layers. None: as few as
            have every kind, and two if there are.
        ranks: that share the attention heads: no fewer heads stay, nor key/value heads, where
            there were so many.

    Raises:
        ValueError: the family's config has no sizes that could be made smaller.
    """
    return _shrunken(config, layers, None, ranks)


def _shrunken(
    config: PreTrainedConfig, layers: int | None, outer: Sizes | None, ranks: int
) -> PreTrainedConfig:
    fields = _fields(config)
    sizes = _sizes(config, outer, ranks)
    small = dict(fields)
    if count := _get(config, "num_hidden_layers"):
        stay = layers_that_stay(fields, count, layers or min(count, LAYERS))
        small |= cut_layers(fields, count, stay)
    for name in small:
        small[name] = _smaller(name, small[name], sizes)
    _keep_relations(config, fields, small, sizes)
    text = config.get_text_config(decoder=True)
    for name in config.sub_configs:
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            is_text = inner is text or not _get(text, "hidden_size")
            wanted = layers if is_text else LAYERS_OF_PART
            small[name] = _shrunken(inner, wanted, sizes, ranks).to_dict()
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


def _few_heads(heads: int, shared: int | None, ranks: int) -> tuple[int, int]:
    """Heads and the heads that they share, in the ratio they had."""
    most = max(MOST_HEADS, ranks)
    if not shared or shared == heads:
        return min(heads, most), min(heads, most)
    if heads % shared:
        return min(heads, most), 1
    few = min(shared, max(MOST_KEY_HEADS, ranks))
    return few * min(heads // shared, MOST_QUERIES_PER_KEY), few


def _sizes(config: PreTrainedConfig, outer: Sizes | None, ranks: int) -> Sizes:
    hidden = _get(config, "hidden_size")
    if hidden is None and outer is not None:
        return outer
    if hidden is None:
        return _sizes_of_parts(config, ranks)
    heads = _get(config, "num_attention_heads")
    tokens = outer.tokens if outer else {}
    text = config.get_text_config(decoder=True)
    vocabulary = outer.vocabulary if outer else min(_get(text, "vocab_size") or 0, VOCABULARY)
    if heads is None:
        small = min(hidden, HIDDEN)
        scale = Fraction(HEAD_DIM, max(_get(config, "head_dim") or HEAD_DIM, HEAD_DIM))
        sizes = (1, 1), hidden, small, scale, Fraction(small, hidden)
        return Sizes(*sizes, vocabulary, tokens, outer, ranks)
    shared = _shared_heads(config) or heads
    few, _ = _few_heads(heads, shared, ranks)
    head_dim = _get(config, "head_dim") or hidden // heads
    small_dim = min(head_dim, head_dim_that_fits(config, HEAD_DIM))
    if heads * head_dim == hidden:
        small = few * small_dim
    else:
        step = few * 8 if few % 2 else few * 4
        small = _rounded(Fraction(hidden * few * small_dim, heads * head_dim), step)
        small = max(small, min(hidden, LEAST_HIDDEN))
        small += step * (small == few * small_dim)
    scale = Fraction(small_dim, head_dim)
    sizes = (heads, shared), hidden, small, scale, Fraction(small, hidden)
    return Sizes(*sizes, vocabulary, tokens, outer, ranks)


def _shared_heads(config: PreTrainedConfig) -> int | None:
    """Key/value heads, of the config or of the part of it that is about attention."""
    parts = [config, getattr(config, "attn_config", None)]
    found = (_get(part, name) for part in parts if part for name in SHARED)
    return next((number for number in found if number), None)


def _sizes_of_parts(config: PreTrainedConfig, ranks: int) -> Sizes:
    """Of a config whose numbers are in others: text's, or the first that has any."""
    text = config.get_text_config(decoder=True)
    parts = [text, *(getattr(config, name, None) for name in config.sub_configs)]
    for part in parts:
        if isinstance(part, PreTrainedConfig) and _get(part, "hidden_size"):
            return _sizes(part, None, ranks)
    raise ValueError(f"{config.model_type}: its config has no hidden size to make smaller")


def _smaller(name: str, value: Any, sizes: Sizes) -> Any:
    """The value that a field of the small config has, as far as its name alone says it."""
    if isinstance(value, bool) or value is None or isinstance(value, (str, float)):
        return value
    if name in ("rope_parameters", "rope_scaling"):
        return small_rope(value, sizes.head_size)
    if name == "per_layer_config":
        return {key: _own_of_layer(own, sizes) for key, own in value.items()}
    if isinstance(value, dict) and name == "compress_rates":
        return {key: _smaller(name, rate, sizes) for key, rate in value.items()}
    if isinstance(value, (list, tuple)):
        return [_smaller(name, item, sizes) for item in value]
    if not isinstance(value, int) or value < 0:
        return value
    if name == HEADS_OF_LAYER:
        return _few_heads(value, sizes.heads[1], sizes.ranks)[0]
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


def _own_of_layer(own: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    small = {name: _smaller(name, value, sizes) for name, value in own.items()}
    heads = own.get("num_attention_heads", sizes.heads[0])
    shared = own.get("num_key_value_heads", sizes.heads[1])
    few, few_shared = _few_heads(heads, shared, sizes.ranks)
    usual, _ = _few_heads(*sizes.heads, sizes.ranks)
    if heads < sizes.heads[0] and few == usual:  # fewer they stay
        few, few_shared = max(1, few // 2), max(1, few_shared // 2)
    counts = {"num_attention_heads": few, "num_key_value_heads": few_shared}
    return small | {name: value for name, value in counts.items() if name in own}


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
    queries, few_shared = _few_heads(*sizes.heads, sizes.ranks)
    put("num_attention_heads", queries)
    for name in SHARED:
        put(name, few_shared if _get(config, name) == sizes.heads[1] else queries)
    for heads, shared in HEADS:
        if many := _get(config, heads):
            few, few_shared = _few_heads(many, shared and _get(config, shared), sizes.ranks)
            put(heads, few)
            if shared and _get(config, shared):
                put(shared, few_shared)
    if many := _get(config, "index_n_heads"):
        few = min(many, INDEX_HEADS)
        put("index_n_heads", few + 1 if few == queries and many != sizes.heads[0] else few)
    _fill_in(config, fields, small, sizes)
    now = _Both(config, small)
    for total, count, size in PRODUCTS:
        whole = now.before(total) if total in fields else 0
        if whole and whole == now.before(count) * now.before(size):
            small[total] = now.after(count) * now.after(size)
    for count, size, factor in EXPANDED:
        expanded = now.before(factor) * sizes.hidden
        if expanded and now.before(count) * now.before(size) == expanded:
            small[size] = now.before(factor) * sizes.small_hidden // now.after(count)
    for total, parts in SUMS.items():
        if total in fields and all(part in fields for part in parts):
            small[total] = sum(map(now.after, parts))
    _few_experts(config, fields, small)
    few_positions(config, small, most=POSITIONS)


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


def _few_experts(config: PreTrainedConfig, fields: dict[str, Any], small: dict[str, Any]) -> None:
    """Few experts, more than a token goes to; two groups where there are groups."""
    groups = next((fields[n] for n in fields if EXPERT_GROUPS.fullmatch(n)), None) or 1
    few_groups = min(groups, 2)
    for name, value in small.items():
        if EXPERTS.fullmatch(name):
            small[name] = _at_most(value, 4 * few_groups)
        elif TOP_K.fullmatch(name):
            small[name] = _at_most(value, 2)
        elif EXPERT_GROUPS.fullmatch(name):
            small[name] = _at_most(value, few_groups)
        elif name == "topk_group":
            small[name] = _at_most(value, few_groups if value == groups else 1)


def _at_most(value: Any, most: int) -> Any:
    """Of a number, or of each of a list of one a layer."""
    if isinstance(value, list):
        return [_at_most(item, most) for item in value]
    return min(value, most) if isinstance(value, int) else value
