"""``ds4d verify`` on layouts that are right: every number within tolerance."""

from __future__ import annotations

import json

import pytest

from ds4d.verify.run import verify
from tests import harness
from tests.dist.test_generate import run_ds4d
from tests.dist.test_launch import ROOT
from tests.tp_families import dealt
from tests.verify_runs import MODEL, on_workers, run_of

QUICKSTART = ROOT / "ds_configs" / "quickstart.json"
INTERLEAVED = {"schedule": "interleaved", "chunks": 2}
LAYOUTS = {
    "dp z0": dict(dp=2, stage=0),
    "dp z1": dict(dp=2, stage=1),
    "dp z2": dict(dp=2, stage=2),
    "dp z3": dict(dp=2, stage=3),
    "tp": dict(tp=2, stage=0),
    "tp z3": dict(tp=2, dp=2, stage=3, sequence_parallel=False),
    "pp": dict(pp=2, stage=0),
    "pp interleaved, dp": dict(pp=2, dp=2, pipeline=INTERLEAVED),
    "cp": dict(cp=2, stage=2),
    "cp ulysses, tp": dict(cp=2, tp=2, context={"method": "ulysses"}),
    "tp, pp": dict(tp=2, pp=2, stage=1, recompute="selective"),
}


@pytest.mark.parametrize("name", dealt(LAYOUTS, 0, turns=2))
def test_layouts_are_within(name):
    report = verify(run_of(**LAYOUTS[name]), call=on_workers)
    assert report.passed, [row for row in report.rows if not row.passed]


TIED = MODEL | {"tie_word_embeddings": True, "attention_bias": True}  # keys learn little of theirs
EXPERTS = MODEL | {
    "model_type": "qwen3_moe", "moe_intermediate_size": 128, "num_experts": 16,
    "num_experts_per_tok": 4,
}  # fmt: skip
HALF = {
    "bf16 tp": dict(tp=2, keys={"bf16": {"enabled": True}}),
    "bf16 pp": dict(pp=2, keys={"bf16": {"enabled": True}}),
    "bf16 z3": dict(dp=2, stage=3, keys={"bf16": {"enabled": True}}),
    "fp16 tp": dict(tp=2, keys={"fp16": {"enabled": True}}),
    "fp16 tp pp, tied, biases": dict(model=TIED, tp=2, pp=2, keys={"fp16": {"enabled": True}}),
    "bf16 tp, experts": dict(model=EXPERTS, tp=2, keys={"bf16": {"enabled": True}}),
    "autocast": dict(dp=2, keys={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
}


@pytest.fixture
def own_workers():
    """DeepSpeed keeps autocast on in a process that has had it."""
    yield
    harness.close()


@pytest.mark.parametrize("name", dealt(HALF, 0, turns=2))
def test_half_precision_is_no_further_off_than_plain_half_precision(name, request):
    if name == "autocast":
        request.getfixturevalue("own_workers")
    report = verify(run_of(**HALF[name]), call=on_workers)
    assert report.passed, [row for row in report.rows if not row.passed]


OTHERS = {
    "gemma2": dict(
        model_type="gemma2", vocab_size=4097, hidden_size=256, intermediate_size=704,
        num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        sliding_window=32,
    ),
    "gpt_oss": dict(
        model_type="gpt_oss", vocab_size=4097, hidden_size=256, intermediate_size=704,
        num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        sliding_window=32, num_local_experts=8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name):
    report = verify(run_of(OTHERS[name], tp=2, cp=2), call=on_workers)
    assert report.passed, [row for row in report.rows if not row.passed]


@pytest.mark.parametrize(
    "options",
    [
        dict(optimizer={"type": "Lion", "params": {"lr": 1e-4}}),
        dict(
            optimizer={"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
            training={"label_smoothing": 0.1, "z_loss": 1e-3},
        ),
    ],
)
def test_other_optimizers_and_losses(options):
    report = verify(run_of(dp=2, **options), call=on_workers)
    assert report.passed, [row for row in report.rows if not row.passed]


def test_the_loss_of_routers():
    """Of packed documents, padded: the plain process has them one by one."""
    balanced = EXPERTS | {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    report = verify(run_of(balanced, tp=2, cp=2), call=on_workers)
    assert report.passed, [row for row in report.rows if not row.passed]
    losses = [row for row in report.rows if row.what.startswith("router loss")]
    assert len(losses) == 3 and all(row.found > 1.0 for row in losses)


def test_the_command_starts_its_own_ranks():
    found = json.loads(run_ds4d("verify", QUICKSTART, "--set", "ds4d.parallel.tp=2", "--json"))
    assert found["passed"] and found["layout"]["tp"] == 2 and found["bytes_sent"]["block"] > 0
    assert found["samples"].startswith("samples of ds4d.data.train (python_stdlib)")
