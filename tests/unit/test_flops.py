"""Model FLOPs against closed formulas and published figures."""

from __future__ import annotations

import pytest
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from ds4d.monitor.flops import model_flops, peak_tflops


def llama(**sizes) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=sizes["h"], num_hidden_layers=sizes["layers"], num_attention_heads=sizes["a"],
        num_key_value_heads=sizes["k"], intermediate_size=sizes["f"], vocab_size=sizes["v"],
        tie_word_embeddings=sizes.get("tied", False),
    )  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_grouped_attention_and_gated_mlp(tied):
    h, layers, a, k, f, v, s = 64, 2, 4, 2, 96, 100, 32
    d = h // a
    flops = model_flops(llama(h=h, layers=layers, a=a, k=k, f=f, v=v, tied=tied))
    projections = 2 * h * (a * d + 2 * k * d) + 2 * a * d * h
    mlp = 2 * h * f * 3
    attention = 4 * s * a * d / 2
    expected = s * 3 * (layers * (projections + mlp + attention) + 2 * h * v)
    assert flops.of_sequence(s) == expected


def test_packed_documents_attend_to_themselves_only():
    flops = model_flops(llama(h=64, layers=2, a=4, k=4, f=96, v=100))
    packed = flops.of_sequences(tokens=32, squares=4 * 8**2)
    assert packed == 4 * flops.of_sequence(8) < flops.of_sequence(32)


def test_only_visited_experts_count():
    sizes = dict(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=96, vocab_size=100, num_local_experts=8,
    )  # fmt: skip
    one, two = (model_flops(MixtralConfig(**sizes, num_experts_per_tok=n)) for n in (1, 2))
    assert two.per_token - one.per_token == 6 * 3 * 64 * 96


def test_gpt3_by_the_formula_of_the_megatron_paper():
    """72 b L s h^2 (1 + s/6h + V/12Lh), whose attention is the full square."""
    layers, h, s, v = 96, 12288, 2048, 51200
    config = GPT2Config(n_layer=layers, n_embd=h, n_head=96, n_positions=s, vocab_size=v)
    flops = model_flops(config)
    full = flops.per_token * s + flops.per_pair * s**2
    assert full == pytest.approx(72 * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * layers * h)))


@pytest.mark.parametrize(
    "sizes, tflops, tokens_per_second",
    [  # Megatron-Bridge's performance summary: H100, sequences of 8192, causal
        (dict(h=4096, layers=32, a=32, k=8, f=14336, v=128256), 744, 14451),
        (dict(h=8192, layers=80, a=64, k=8, f=28672, v=128256), 736, 1639),
        (dict(h=16384, layers=126, a=128, k=8, f=53248, v=128256), 822, 326),
    ],
)
def test_published_figures(sizes, tflops, tokens_per_second):
    ours = model_flops(llama(**sizes)).of_sequence(8192) / 8192 * tokens_per_second / 1e12
    assert ours == pytest.approx(tflops, rel=0.005)


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989.0), ("NVIDIA H100 PCIe", 756.0), ("NVIDIA H200", 989.0),
        ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA L40S", 362.0), ("NVIDIA L4", 121.0),
        ("NVIDIA B200", 2250.0), ("NVIDIA GB200", 2500.0), ("NVIDIA H20", 148.0),
        ("NVIDIA GH200 480GB", 989.0), ("AMD EPYC", None),
    ],
)  # fmt: skip
def test_peaks(name, peak):
    assert peak_tflops(name) == peak
