"""What a right file becomes: "auto", precision, notes, the resolved file, DeepSpeed's dict."""

from __future__ import annotations

import json

import pytest

from ds4d.config.deepspeed_json import to_deepspeed
from ds4d.config.errors import ConfigError
from ds4d.config.load import load, resolved
from ds4d.config.report import as_dict, as_text
from ds4d.config.types import BatchSizes, PrecisionConfig
from tests.unit.config_files import ABSENT, changed


def keys(**changes):
    return load(changed(**changes), world_size=2).deepspeed


def test_batch_words():
    run = load(changed(gradient_accumulation_steps=3), world_size=2)
    assert run.batch == BatchSizes(train=12, micro=2, accumulation=3)
    assert run.parallel.dp == 2
    assert [run.deepspeed[k] for k in run.deepspeed if "batch" in k or "accum" in k] == [2, 3, 12]


def test_auto_batch_words_are_open_ones():
    changes = dict(train_batch_size=32, gradient_accumulation_steps="auto")
    assert load(changed(**changes), world_size=2).batch == BatchSizes(32, 2, 8)


@pytest.mark.parametrize("given, becomes", [("auto", 1.0), (ABSENT, 0.0), (0.5, 0.5), (0, 0)])
def test_gradient_clipping(given, becomes):
    run = load(changed(gradient_clipping=given))
    assert run.deepspeed["gradient_clipping"] == becomes
    assert to_deepspeed(run, on_cpu=True)["gradient_clipping"] == becomes


def test_auto_of_optimizer_and_scheduler():
    """As Hugging Face's Trainer fills them in with the defaults of TrainingArguments."""
    auto = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    warmup = {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
    }
    found = keys(optimizer__params=auto, scheduler={"type": "WarmupDecayLR", "params": warmup})
    assert found["optimizer"]["params"] == {
        "lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False,
    }  # fmt: skip
    assert found["scheduler"]["params"] == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 5e-5,
        "warmup_num_steps": 1,
        "total_num_steps": 10,
        "warmup_type": "log",
    }


def test_schedules_of_ds4d():
    cosine = keys(scheduler={"type": "cosine", "params": {"warmup_ratio": 0.1}})["scheduler"]
    assert cosine["params"] == {"warmup_ratio": 0.1, "min_lr_ratio": 0.0, "total_steps": 10}
    by_epochs = keys(ds4d__training={"epochs": 2}, scheduler={"type": "linear"})["scheduler"]
    assert by_epochs["params"] == {"min_lr_ratio": 0.0}  # counted when the data is there


@pytest.mark.parametrize(
    "given, stage, precision",
    [
        ({}, 0, PrecisionConfig("fp32", "fp32")),
        ({"bf16": {"enabled": True}}, 0, PrecisionConfig("bf16", "fp32")),
        ({"bf16": {"enabled": "auto"}}, 2, PrecisionConfig("bf16", "fp32")),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, 1, PrecisionConfig("bf16")),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": True}}, 1, PrecisionConfig("fp16")),
        ({"fp16": {"enabled": True}}, 3, PrecisionConfig("fp16", "fp32")),
        ({"fp16": {"enabled": "auto"}}, 1, PrecisionConfig("fp32")),
        (
            {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
            3,
            PrecisionConfig("bf16", "bf16"),
        ),
    ],
)
def test_precision(given, stage, precision):
    run = load(changed(zero_optimization={"stage": stage}, **given))
    assert run.precision == precision
    for name in ("bf16", "fp16"):
        if name in given:
            assert run.deepspeed[name]["enabled"] is (precision.param_dtype == name)
    config = to_deepspeed(run, on_cpu=True)
    assert config["data_types"]["grad_accum_dtype"] == precision.grad_accum_dtype
    assert config["communication_data_type"] == "fp32"


def test_a_reduction_type_that_was_asked_for():
    run = load(changed(bf16={"enabled": True}, communication_data_type="bf16"))
    assert to_deepspeed(run, on_cpu=False)["communication_data_type"] == "bf16"


def test_auto_bucket_sizes():
    sizes = {
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "offload_optimizer": {"device": "auto"},
    }
    assert keys(zero_optimization={"stage": 3, **sizes})["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {},
        "reduce_bucket_size": 64 * 64,
        "stage3_prefetch_bucket_size": int(0.9 * 64 * 64),
        "stage3_param_persistence_threshold": 640,
    }
    assert keys(zero_optimization={"stage": 2, **sizes})["zero_optimization"] == {
        "stage": 2,
        "offload_optimizer": {},
        "reduce_bucket_size": 64 * 64,
    }


def test_whole_numbers_may_be_written_with_an_exponent():
    found = keys(zero_optimization={"reduce_bucket_size": 5e8}, ds4d__training__steps=1e2)
    assert isinstance(found["zero_optimization"]["reduce_bucket_size"], int)


@pytest.mark.parametrize(
    "changes, recompute",
    [
        ({}, "none"),
        ({"activation_checkpointing": {}}, "full"),
        ({"ds4d__recompute": "selective"}, "selective"),
        ({"activation_checkpointing": {}, "ds4d__recompute": "none"}, "none"),
    ],
)
def test_recompute(changes, recompute):
    assert load(changed(**changes)).recompute == recompute


NOTES = {
    "another stage's keys": (
        {"zero_optimization": {"stage": 1, "stage3_max_live_parameters": 1, "sub_group_size": 5}},
        [
            "zero_optimization.stage3_max_live_parameters has no effect: it is for stage 3, "
            "this is 1",
            "zero_optimization.sub_group_size has no effect: it is for stage 3, this is 1",
        ],
    ),
    "an axis of one rank": (
        {"ds4d__pipeline": {"chunks": 2}, "ds4d__parallel__sequence_parallel": True},
        [
            "ds4d.pipeline.chunks has no effect: ds4d.parallel.pp is 1",
            "ds4d.parallel.sequence_parallel has no effect: ds4d.parallel.tp is 1",
        ],
    ),
    "a source's keys": (
        {"ds4d__data__eval": {"type": "python_stdlib", "field": "content", "split": "train"}},
        ["ds4d.data.eval.field has no effect: source type python_stdlib does not read it"],
    ),
    "a warm-up that has its own lr": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}}},
        ["scheduler.params.warmup_max_lr 0.01 takes the place of optimizer.params.lr 0.001"],
    ),
    "DeepSpeed's progress line": (
        {"steps_per_print": 10},
        ["steps_per_print has no effect: ds4d prints every step"],
    ),
    "recompute switched off": (
        {"activation_checkpointing": {}, "ds4d__recompute": "none"},
        ["activation_checkpointing has no effect: ds4d.recompute is none"],
    ),
    "saving beside a training that is over": (
        {"ds4d__checkpoint": {"async": True}},
        [
            "ds4d.checkpoint.async has no effect: the end waits for its checkpoint, and without "
            "ds4d.checkpoint.every there is no other",
        ],
    ),
    "nothing": ({}, []),
}


@pytest.mark.parametrize("changes, notes", NOTES.values(), ids=NOTES)
def test_notes(changes, notes):
    run = load(changed(**changes), world_size=1)
    assert list(run.notes) == notes
    assert list(load(resolved(run), world_size=1).notes) == notes


def test_a_note_says_that_the_world_was_guessed():
    assert 'ds4d.parallel.dp: "auto" is 1 here' in load(changed()).notes[0]
    assert load(changed(ds4d__parallel__dp=2)).notes == ()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
        },
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1}}},
        {"activation_checkpointing": {}, "ds4d__training": {"epochs": 0.5}},
        {"ds4d__pipeline__split": [0, "1"], "gradient_clipping": "auto"},
    ],
)
def test_the_resolved_file_loads_to_the_same_run(changes):
    run = load(changed(**changes), world_size=2)
    text = json.dumps(resolved(run))
    assert '"auto"' not in text.replace('"vocab_size": "auto"', "")
    again = load(json.loads(text), world_size=2)
    assert again == run
    assert resolved(again) == resolved(run)


def test_every_default_is_in_the_resolved_file():
    full = resolved(load(changed()))["ds4d"]
    assert full["checkpoint"] == {"every": None, "keep": None, "final": True, "async": False}
    assert full["data"]["train"] == {
        "type": "python_stdlib", "path": None, "field": "text", "name": None, "split": "train",
        "slice": None,
    }  # fmt: skip


def test_what_deepspeed_gets():
    run = load(changed(scheduler={"type": "cosine"}, zero_optimization={"stage": 2}), world_size=2)
    assert to_deepspeed(run, on_cpu=True) == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def test_nothing_is_compiled_on_cpu():
    run = load(changed(zero_optimization={"stage": 3, "zero_quantized_weights": True}))
    with pytest.raises(ConfigError, match="zero_quantized_weights: true: needs an extension"):
        to_deepspeed(run, on_cpu=True)
    assert to_deepspeed(run, on_cpu=False)["zero_optimization"]["zero_quantized_weights"] is True


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_without_zero_runs_stage_1_and_says_so(precision):
    run = load(changed(zero_optimization={"stage": 0}, **{precision: {"enabled": True}}))
    assert run.zero_stage == 0
    assert to_deepspeed(run, on_cpu=True)["zero_optimization"]["stage"] == 1
    assert any("runs DeepSpeed's stage 1" in note for note in run.notes)


def test_report():
    run = load(changed(bf16={"enabled": True}, steps_per_print=5), world_size=2)
    text = as_text(run)
    assert "2 ranks = pp 1 x dp 2 x cp 1 x tp 1, ZeRO stage 0" in text
    assert "4 sequences a step = micro 2 x accumulation 1 x dp 2; 256 tokens" in text
    assert "bf16 parameters, gradients accumulated in fp32" in text
    assert "note: steps_per_print has no effect" in text
    assert [line.split() for line in text.splitlines()[4:7]] == [
        ["rank", "(layers)", "(samples)", "(tokens", "of", "a", "sample)", "(matrices", "of", "a",
         "layer)"],
        ["0", "0", "0", "0", "0"],
        ["1", "0", "1", "0", "0"],
    ]  # fmt: skip
    shown = text[text.index("\n{") :]
    assert json.loads(shown) == resolved(run) == as_dict(run)["config"]
    assert as_dict(run)["groups"]["dp"] == [[0, 1]]
    json.dumps(as_dict(run))


def test_the_report_of_a_large_world_is_short():
    run = load(changed(), world_size=1024)
    table = as_text(run).partition("(layers)")[2].partition("\n\n")[0]
    ranks = [line.split()[0] for line in table.splitlines() if line.strip()[:1].isdigit()]
    assert ranks == [*map(str, range(8)), *map(str, range(1016, 1024))]
