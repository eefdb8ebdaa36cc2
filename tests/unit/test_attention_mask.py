"""The lazy mask: what it is known to be, what it evaluates to, and what models do with it."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils as hf
from transformers import modeling_utils

from ds4d.attention import implementation_for, register, supports
from ds4d.attention.interface import attention
from ds4d.attention.mask import LazyMask, lazy_mask
from ds4d.attention.pattern import describe
from tests.unit.attention_models import build, config, tokens

S = 20
POSITIONS = torch.cat([torch.arange(8), torch.arange(12)]).expand(2, -1)
NUMBERS = hf.find_packed_sequence_indices(POSITIONS)
LEFT = torch.tensor([0, 3])


def _packed(function):
    function = hf.remap_positions_for_packed_sequence(function, POSITIONS)
    return hf.and_masks(function, hf.packed_sequence_mask_function(NUMBERS))


def _prefix(batch, head, query, key):
    return key < 5


# name: (transformers' function, (causal, window, is it cut in segments, is that all))
FUNCTIONS = {
    "causal": (hf.causal_mask_function, (True, None, False, True)),
    "both ways": (hf.bidirectional_mask_function, (False, None, False, True)),
    "window": (hf.sliding_window_causal_mask_function(6), (True, 6, False, True)),
    "chunks": (hf.chunked_causal_mask_function(6, LEFT), (True, 6, False, False)),
    "packed": (_packed(hf.causal_mask_function), (True, None, True, True)),
    "packed window": (
        _packed(hf.sliding_window_causal_mask_function(6)),
        (True, 6, True, True),
    ),
    "packed chunks": (_packed(hf.chunked_causal_mask_function(6, LEFT)), (True, 6, True, False)),
    "prefix": (hf.or_masks(hf.causal_mask_function, _prefix), (False, None, False, False)),
    "window both ways": (
        hf.sliding_window_bidirectional_mask_function(6),
        (False, None, False, False),
    ),
    "not transformers'": (lambda b, h, q, k: k <= q, (False, None, False, False)),
}


def _sdpa(function, **changes) -> torch.Tensor:
    arguments = dict(batch_size=2, q_length=S, kv_length=S, mask_function=function) | changes
    return hf.sdpa_mask(allow_is_causal_skip=False, **arguments).expand(2, 1, -1, -1)


def _lazy(function, **changes) -> LazyMask:
    arguments = dict(batch_size=2, q_length=S, kv_length=S, mask_function=function) | changes
    return lazy_mask(**arguments)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_transformers_are_recognised(name):
    function, expected = FUNCTIONS[name]
    pattern = describe(function)
    has_segments = pattern.segments is not None
    assert (pattern.causal, pattern.window, has_segments, pattern.exact) == expected


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_known_holds_for_the_mask_itself(name):
    """Bounds hold where the mask sees; where they are all there is, they are the mask."""
    function, _ = FUNCTIONS[name]
    pattern, mask = describe(function), _sdpa(function)
    i = torch.arange(S)
    bounds = torch.ones(2, 1, S, S, dtype=torch.bool)
    if pattern.causal:
        bounds &= i <= i[:, None]
    if pattern.window is not None:
        bounds &= i > i[:, None] - pattern.window
    if pattern.segments is not None:
        bounds &= pattern.segments[:, None, :, None] == pattern.segments[:, None, None, :]
    assert torch.equal(mask & bounds, mask)
    assert not pattern.exact or torch.equal(mask, bounds)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("use_vmap", [False, True])
def test_dense_and_block_are_what_sdpa_would_get(name, use_vmap):
    function, _ = FUNCTIONS[name]
    padding = torch.ones(2, S, dtype=torch.bool)
    padding[1, :3] = False
    mask = _lazy(function, attention_mask=padding)
    expected = _sdpa(function, attention_mask=padding)
    mask.use_vmap = use_vmap
    assert torch.equal(mask.dense(), expected)
    assert torch.equal(mask.block((1, 2), (4, 9), (2, 20)), expected[1:2, :, 4:9, 2:20])


def test_offsets_of_a_cache():
    shape = dict(q_length=3, kv_length=10, q_offset=9, kv_offset=2)
    padding = torch.ones(2, 9, dtype=torch.bool)  # a static cache: the last keys don't exist yet
    padding[0, :4] = False
    for function, _ in (FUNCTIONS["causal"], FUNCTIONS["window"]):
        mask = _lazy(function, attention_mask=padding, **shape)
        assert torch.equal(mask.dense(), _sdpa(function, attention_mask=padding, **shape))


def test_a_mask_without_any_padding_is_not_looked_at_again():
    ones = torch.ones(2, S, dtype=torch.bool)
    assert _lazy(hf.causal_mask_function, attention_mask=ones).padding is None
    shape = dict(q_length=1, kv_length=S, q_offset=7)
    ones[:, 8:] = False  # after the query
    assert _lazy(hf.causal_mask_function, attention_mask=ones, **shape).padding is None
    assert _lazy(hf.bidirectional_mask_function, attention_mask=ones, **shape).padding is not None


def test_what_models_do_with_a_mask():
    mask = _lazy(hf.sliding_window_causal_mask_function(6))
    dense = mask.dense()
    assert mask is not None and mask.shape == (2, 1, S, S) and mask.ndim == mask.dim() == 4
    assert mask.dtype == torch.bool and mask.device == dense.device and mask.size(-1) == S
    assert torch.equal(mask[:, :, -1:, :], dense[:, :, -1:, :])
    assert torch.equal(torch.cat([mask, dense], dim=-1), torch.cat([dense, dense], dim=-1))
    assert torch.equal(torch.where(mask, 1.0, 0.0), dense.float())
    assert torch.equal(mask.masked_fill(dense, False), torch.zeros_like(dense))
    again = checkpoint(lambda mask: mask[0], mask, use_reentrant=False)
    assert torch.equal(again, dense[0])
    with pytest.raises(AttributeError):
        mask.no_such_attribute


def test_both_functions_are_registered_and_again_does_no_harm():
    """Without a mask function transformers gives an implementation no mask at all, in silence."""
    name = register()
    assert register() == name == "ds4d"
    assert hf.ALL_MASK_ATTENTION_FUNCTIONS[name] is lazy_mask
    assert modeling_utils.ALL_ATTENTION_FUNCTIONS[name] is attention


def test_a_module_that_gets_no_mask_is_causal_unless_it_says_otherwise():
    q, k, v = torch.randn(3, 1, 2, S, 8)
    module = torch.nn.Module()
    causal, _ = attention(module, q, k, v, None)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(causal, expected)
    module.is_causal = False
    expected = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    torch.testing.assert_close(attention(module, q, k, v, None)[0], expected)
    module.is_causal = True
    with pytest.raises(ValueError, match="5 queries over 20 keys needs a mask"):
        attention(module, q[:, :, :5], k, v, None)


def test_attention_weights_are_refused():
    model = build(config("llama_gqa"), register())
    with pytest.raises(ValueError, match="eager"):
        model(input_ids=tokens(1, S), output_attentions=True, use_cache=False)


def test_a_mask_that_cannot_be_one_is_refused():
    model = build(config("llama_gqa"), register())
    layer = model.model.layers[0].self_attn
    hidden, rotary = torch.zeros(1, S, 32), (torch.zeros(1, S, 8), torch.zeros(1, S, 8))
    with pytest.raises(ValueError, match=r"\[1, 20\] reached ds4d's attention"):
        layer(hidden, rotary, torch.ones(1, S))


SUPPORT = [
    ("LlamaForCausalLM", None, "ds4d"),
    ("MistralForCausalLM", None, "ds4d"),
    ("GPT2LMHeadModel", None, "ds4d"),
    ("GptOssForCausalLM", None, "ds4d"),
    ("Gemma4ForCausalLM", None, "ds4d"),
    ("BloomForCausalLM", "has its own attention code", "eager"),
    ("FalconForCausalLM", "has its own attention code", "sdpa"),
    ("MptForCausalLM", "has its own attention code", "eager"),
    ("MambaForCausalLM", "has its own attention code", "eager"),
    ("Qwen3NextForCausalLM", "carry a state", "ds4d"),
    ("BambaForCausalLM", "carry a state", "ds4d"),
    ("Lfm2ForCausalLM", "carry a state", "ds4d"),
    ("BartForCausalLM", "takes no position_ids", "ds4d"),
]


@pytest.mark.parametrize("name, reason, implementation", SUPPORT)
def test_models_that_cannot_be_exact_are_named(name, reason, implementation):
    cls = getattr(transformers, name)
    found = supports(cls)
    assert found is None if reason is None else (name in found and reason in found)
    assert supports(cls.config_class()) == found
    assert implementation_for(cls.config_class()) == implementation


def test_a_config_that_is_no_language_model():
    assert "no causal language model" in supports(transformers.ViTConfig())
    assert implementation_for(transformers.ViTConfig()) == "eager"
