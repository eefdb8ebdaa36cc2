"""Each kind of wrong file: the dotted key and the words of the message (cases C01, C02, C06)."""

from __future__ import annotations

import json
import pickle

import pytest

from ds4d.config.errors import ConfigError
from ds4d.config.load import load
from tests.unit.config_files import ABSENT, SMALL, changed, problems

COUNT_OR_AUTO = 'a whole number, at least 1 or "auto"'
WRONG = {
    # -- C02: misspelt, mis-nested, unsupported keys
    "top-level typo": (
        dict(gradient_clipp1ng=1.0),
        {"gradient_clipp1ng": 'unknown key; did you mean "gradient_clipping"?'},
    ),
    "nested typo": (
        dict(ds4d__data__seqlen=64),
        {"ds4d.data.seqlen": 'unknown key; did you mean "seq_len"?'},
    ),
    "wrong section": (
        dict(seq_len=64, ds4d__training__stage=1),
        {
            "seq_len": "unknown key; it belongs at ds4d.data.seq_len",
            "ds4d.training.stage": "unknown key; it belongs at zero_optimization.stage",
        },
    ),
    "typo in a wrong section": (
        dict(ds4d__parallel__overlap_com=True),
        {
            "ds4d.parallel.overlap_com": (
                "unknown key; did you mean zero_optimization.overlap_comm?"
            )
        },
    ),
    "words from elsewhere": (
        dict(tensor_parallel_size=2, ds4d__parallel__context_parallel_size=2, tp_size=1),
        {
            "tensor_parallel_size": "unknown key; ds4d's key for it is ds4d.parallel.tp",
            "ds4d.parallel.context_parallel_size": (
                "unknown key; ds4d's key for it is ds4d.parallel.cp"
            ),
            "tp_size": "unknown key; ds4d's key for it is ds4d.parallel.tp",
        },
    ),
    "nothing near": (
        dict(ds4d__checkpoint__qqq=1),
        {"ds4d.checkpoint.qqq": "unknown key; allowed here: every, keep, final"},
    ),
    "removed by DeepSpeed": (
        dict(elasticity={"enabled": True}, zero_optimization={"mics_shard_size": 4}),
        {
            "elasticity": "Elastic training has been removed",
            "zero_optimization.mics_shard_size": "MiCS ZeRO-3 sharding has been removed",
        },
    ),
    "deprecated by DeepSpeed": (
        dict(zero_optimization={"stage": 2, "cpu_offload": True}),
        {"zero_optimization.cpu_offload": "Deprecated; write offload_optimizer."},
    ),
    "DeepSpeed's own layouts": (
        dict(tensor_parallel={"autotp_size": 2}, sequence_parallel_size=2, pipeline={}),
        {
            "tensor_parallel": "write ds4d.parallel.tp",
            "sequence_parallel_size": "write ds4d.parallel.cp",
            "pipeline": "write ds4d.parallel.pp and ds4d.pipeline",
        },
    ),
    "parameter of another optimizer": (
        dict(optimizer__params__momentum=0.9),
        {"optimizer.params.momentum": "unknown key; allowed here: lr, betas, eps, weight_decay"},
    ),
    "unknown optimizer": (
        dict(optimizer__type="adamw", optimizer__params=ABSENT),
        {"optimizer.type": '"adamw" is not allowed; allowed: "Adam", "AdamW", "SGD"'},
    ),
    "refused optimizer": (
        dict(optimizer__type="Lamb", optimizer__params=ABSENT),
        {"optimizer.type": "Lamb looks at whole matrices"},
    ),
    "no optimizer": (dict(optimizer=ABSENT), {"optimizer": "missing. The optimizer"}),
    "scheduler without what it needs": (
        dict(scheduler={"type": "WarmupDecayLR", "params": {}}),
        {"scheduler.params.total_num_steps": "missing. Optimizer steps of the whole schedule"},
    ),
    "unknown model field": (
        dict(ds4d__model__config__hiden_size=64),
        {"ds4d.model.config.hiden_size": "did you mean 'hidden_size'"},
    ),
    # -- C06: values of the wrong type
    "numbers as text": (
        dict(
            zero_optimization={"reduce_bucket_size": "5e8"},
            optimizer__params__lr="1e-5",
            ds4d__training__steps="10",
        ),
        {
            "zero_optimization.reduce_bucket_size": (
                '"5e8" is not allowed; allowed: a whole number, above 0 or "auto"; '
                "write 5e8 without quotes"
            ),
            "optimizer.params.lr": (
                '"1e-5" is not allowed; allowed: a number, at least 0 or "auto"; '
                "write 1e-5 without quotes"
            ),
            "ds4d.training.steps": (
                '"10" is not allowed; allowed: a whole number, at least 1 or null; '
                "write 10 without quotes"
            ),
        },
    ),
    "truth as text or number": (
        dict(bf16={"enabled": "false"}, fp16={"enabled": "True"}, ds4d__data__shuffle=1),
        {
            "bf16.enabled": "allowed: true or false or \"auto\"; write false without quotes",
            "fp16.enabled": "write true without quotes",
            "ds4d.data.shuffle": "1 is not allowed; allowed: true or false; write true",
        },
    ),
    "truth instead of a block": (
        dict(bf16=True),
        {"bf16": 'allowed: an object { }; write {"enabled": true}'},
    ),
    "negative and zero": (
        dict(ds4d__training__steps=0, train_micro_batch_size_per_gpu=-1),
        {
            "ds4d.training.steps": "0 is not allowed; allowed: a whole number, at least 1",
            "train_micro_batch_size_per_gpu": f"-1 is not allowed; allowed: {COUNT_OR_AUTO}",
        },
    ),
    "not whole": (
        dict(ds4d__data__seq_len=64.5),
        {"ds4d.data.seq_len": "64.5 is not allowed; allowed: a whole number, at least 2"},
    ),
    "misspelt choice": (
        dict(ds4d__data__packing="document"),
        {"ds4d.data.packing": 'did you mean "documents"?'},
    ),
    "both precisions": (
        dict(bf16={"enabled": True}, fp16={"enabled": True}),
        {"fp16.enabled": "true, and bf16.enabled is true too; switch one of them off"},
    ),
    # -- model
    "no model": (
        dict(ds4d__model={}),
        {"ds4d.model": "needs exactly one of path (weights are loaded) and config"},
    ),
    "two models": (
        dict(ds4d__model__path="gpt2"),
        {"ds4d.model": "needs exactly one of path (weights are loaded) and config"},
    ),
    "no such folder": (
        dict(ds4d__model={"path": "/nowhere/model"}, ds4d__data__tokenizer=ABSENT),
        {"ds4d.model.path": "'/nowhere/model' is neither a folder here nor a hub id"},
    ),
    "unknown architecture": (
        dict(ds4d__model__config__model_type="lama"),
        {"ds4d.model.config.model_type": "did you mean 'llama'"},
    ),
    "not a causal language model": (
        dict(ds4d__model__config={"model_type": "t5"}),
        {"ds4d.model.config.model_type": "no causal language model"},
    ),
    "longer than the positions": (
        dict(ds4d__data__seq_len=129),
        {"ds4d.data.seq_len": "129 is more than the 128 positions of the model"},
    ),
    # -- data
    "no files": (
        dict(ds4d__data__train={"type": "text", "path": ["/nowhere/*.txt", "/nowhere/a"]}),
        {"ds4d.data.train.path": 'no file matches "/nowhere/a"'},
    ),
    "no path": (
        dict(ds4d__data__eval={"type": "jsonl"}),
        {"ds4d.data.eval.path": 'missing: source type "jsonl" needs a path'},
    ),
    "a folder": (
        dict(ds4d__data__train={"type": "text", "path": "/tmp"}),
        {"ds4d.data.train.path": '"/tmp" is a folder; name its files: /tmp/*'},
    ),
    "text without tokenizer": (
        dict(ds4d__data__tokenizer=ABSENT),
        {"ds4d.data.tokenizer": "missing: ds4d.data.train is text; give a path, or a vocab_size"},
    ),
    "tokenizer larger than the model": (
        dict(ds4d__model__config__vocab_size=300),
        {"ds4d.data.tokenizer.vocab_size": "512 is more than ds4d.model.config.vocab_size 300"},
    ),
    "two tokenizers": (
        dict(ds4d__data__tokenizer__path="gpt2"),
        {"ds4d.data.tokenizer": "needs path or vocab_size, not both"},
    ),
    "slice": (
        dict(ds4d__data__train__slice="95"),
        {"ds4d.data.train.slice": '"95" is not allowed; allowed: text such as "95%:" or null'},
    ),
    # -- training
    "no length": (
        dict(ds4d__training={}),
        {"ds4d.training": "needs exactly one of steps and epochs, has 0"},
    ),
    "two lengths": (
        dict(ds4d__training__epochs=1),
        {"ds4d.training": "needs exactly one of steps and epochs, has 2"},
    ),
    "nothing to evaluate on": (
        dict(ds4d__training__eval_every=5),
        {"ds4d.data.eval": "missing: ds4d.training.eval_every is 5"},
    ),
    "two warm-ups": (
        dict(scheduler={"type": "cosine", "params": {"warmup_steps": 1, "warmup_ratio": 0.1}}),
        {"scheduler.params": "needs warmup_steps or warmup_ratio, not both"},
    ),
    "auto length of a schedule with epochs": (
        dict(
            ds4d__training={"epochs": 1},
            scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        ),
        {"scheduler.params.total_num_steps": '"auto" is ds4d.training.steps, which is not given'},
    ),
    # -- layout and batch
    "no batch word": (
        dict(train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto"),
        {"train_batch_size": "missing: give a number for train_batch_size or for train_micro"},
    ),
    # -- DeepSpeed
    "types that mix": (
        dict(
            bf16={"enabled": True},
            data_types={"grad_accum_dtype": "fp16", "param_dtype": "fp16"},
        ),
        {
            "data_types.grad_accum_dtype": '"fp16": bf16 parameters need fp32 or bf16',
            "data_types.param_dtype": "by bf16 and fp16 the parameters are bf16",
        },
    ),
    "offload without its stage": (
        dict(zero_optimization={"stage": 2, "offload_param": {"device": "cpu"}}),
        {"zero_optimization.offload_param": "needs zero_optimization.stage 3, has 2"},
    ),
    "a writer that is not installed": (
        dict(comet={"enabled": True}),
        {"comet.enabled": "comet_ml is not installed: pip install comet_ml"},
    ),
    "offload to NVMe": (
        dict(zero_optimization={"stage": 3, "offload_optimizer": {"device": "nvme"}}),
        {"zero_optimization.offload_optimizer.device": '"nvme": ds4d\'s checkpoints read'},
    ),
    "packed documents that the model would mix": (
        dict(ds4d__model__config={"model_type": "bloom", "hidden_size": 32}),
        {"ds4d.data.packing": '"documents": BloomForCausalLM has its own attention code'},
    ),
    "heads that the kv heads do not divide": (
        dict(ds4d__model__config__num_key_value_heads=3),
        {"ds4d.model.config": "num_attention_heads 4 is not a multiple of num_key_value_heads 3"},
    ),
    "layers that each rank would leave out for itself": (
        dict(ds4d__model__config={"model_type": "opt", "layerdrop": 0.1}),
        {"ds4d.model.config": "layerdrop: ranks would leave out different layers"},
    ),
    "a router loss that the family does not have": (
        dict(ds4d__model__config={"model_type": "glm4_moe", "output_router_logits": True}),
        {"ds4d.model.config": "output_router_logits: model_type glm4_moe adds no loss of its"},
    ),
    "a model that transformers cannot build": (
        dict(ds4d__model__config__hidden_act="foo"),
        {"ds4d.model.config": "transformers cannot build this llama: 'foo'"},
    ),
    "Adagrad with ZeRO": (
        dict(zero_optimization={"stage": 1}, optimizer={"type": "Adagrad"}),
        {"optimizer.type": "DeepSpeed would forget its parameter groups"},
    ),
    "part of the optimizer offloaded": (
        dict(
            zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}
        ),
        {"zero_optimization.offload_optimizer.ratio": "0.5: below 1 needs DeepSpeed's CPU Adam"},
    ),
    "prescaling under ZeRO-2": (
        dict(zero_optimization={"stage": 2}, prescale_gradients=True),
        {"prescale_gradients": "true: with zero_optimization.stage 2 it needs"},
    ),
    "DeepSpeed's CPU Adam": (
        dict(
            zero_optimization={
                "stage": 3, "zenflow": {}, "offload_optimizer": {"super_offload": True}
            },
        ),
        {
            "zero_optimization.offload_optimizer.super_offload": "needs DeepSpeed's CPU Adam",
            "zero_optimization.zenflow": "needs DeepSpeed's CPU Adam",
        },
    ),
    "half of the bf16 switches": (
        dict(
            bf16={"enabled": True, "bf16_master_weights_and_grads": True},
            zero_optimization={"stage": 1},
        ),
        {"bf16": "bf16_master_weights_and_grads and bf16_optimizer_states go together"},
    ),
    "bf16 masters without ZeRO": (
        dict(
            bf16={
                "enabled": True,
                "bf16_master_weights_and_grads": True,
                "bf16_optimizer_states": True,
            }
        ),
        {"bf16.bf16_master_weights_and_grads": "needs zero_optimization.stage 1 or more, has 0"},
    ),
    "float16 autocast without ZeRO": (
        dict(torch_autocast={"enabled": True, "dtype": "float16"}),
        {"torch_autocast.dtype": '"float16" needs loss scaling'},
    ),
}  # fmt: skip


@pytest.mark.parametrize("changes, expected", WRONG.values(), ids=WRONG)
def test_wrong_file(changes, expected):
    found = problems(changed(**changes))
    assert set(found) == set(expected), found
    for path, words in expected.items():
        assert words in found[path]


def test_the_small_file_is_right():
    assert problems(SMALL) == {}


def test_all_problems_at_once():
    content = changed(
        gradient_clipp1ng=1, bf16={"enabled": "true"}, ds4d__training={}, ds4d__data__seq_len=999
    )
    assert list(problems(content)) == [
        "bf16.enabled", "gradient_clipp1ng", "ds4d.data.seq_len", "ds4d.training",
    ]  # fmt: skip


def test_a_broken_key_is_reported_once():
    """Rules that read it are left out: no second complaint about the same thing."""
    content = changed(ds4d__parallel={"tp": "two"}, ds4d__data__train={"type": "txt"})
    assert set(problems(content, world_size=3)) == {"ds4d.parallel.tp", "ds4d.data.train.type"}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("more", [{}, {"activation_checkpointing": {}}])
def test_zero_2_and_3_with_a_pipeline(stage, more):
    """Case C01."""
    pipeline = dict(zero_optimization={"stage": stage}, ds4d__parallel={"pp": 2}, **more)
    found = problems(changed(**pipeline), world_size=4)
    assert list(found) == ["zero_optimization.stage"]
    assert f"{stage} cannot go with ds4d.parallel.pp 2" in found["zero_optimization.stage"]
    assert "set zero_optimization.stage to 0 or 1" in found["zero_optimization.stage"]
    one_stage = changed(zero_optimization={"stage": stage}, ds4d__parallel={"pp": 1}, **more)
    assert problems(one_stage, world_size=4) == {}


def test_the_world():
    content = changed(ds4d__parallel={"tp": 2, "cp": 2, "dp": "auto"})
    assert load(content, world_size=12).parallel.dp == 3
    assert problems(content, world_size=6) == {
        "ds4d.parallel": "tp 2 x pp 1 x cp 2 = 4 does not divide the 6 ranks of the world"
    }
    found = problems(changed(ds4d__parallel={"dp": 2}), world_size=3)
    assert found == {
        "ds4d.parallel": "tp 1 x pp 1 x cp 1 x dp 2 = 2, but the world has 3 ranks; "
        'write "dp": "auto", or start 2 ranks'
    }


def test_tokens_need_no_tokenizer(tmp_path):
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_text(json.dumps({"input_ids": [1, 2]}) + "\n")
    source = {"type": "tokens", "path": str(tmp_path / "*.jsonl")}
    given = dict(ds4d__data__train=source, ds4d__data__tokenizer=ABSENT)
    assert problems(changed(**given, ds4d__model__config__vocab_size=100)) == {}
    found = problems(changed(**given))
    assert list(found) == ["ds4d.model.config.vocab_size"]


def test_positions_are_learned_or_scaled():
    rope = {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 64}
    scaled = dict(ds4d__model__config__rope_parameters=rope, ds4d__data__seq_len=256)
    assert problems(changed(**scaled)) == {}
    learned = {"model_type": "gpt2", "vocab_size": "auto", "n_positions": 32}
    found = problems(changed(ds4d__model__config=learned))
    assert "64 is more than the 32 positions" in found["ds4d.data.seq_len"]


def test_model_folder(tmp_path):
    folder = dict(ds4d__model={"path": str(tmp_path)})
    assert "no config.json" in problems(changed(**folder))["ds4d.model.path"]
    for model_type in ("bert", "roberta"):  # an example in roberta's docstring sets it
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        found = problems(changed(**folder, ds4d__data__seq_len=512))
        assert "sees later tokens unless is_decoder is true" in found["ds4d.model.path"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "is_decoder": True}))
    assert problems(changed(**folder, ds4d__data__seq_len=512)) == {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    assert "not a causal language model" in problems(changed(**folder))["ds4d.model.path"]


def test_auto_sizes_of_an_unknown_model():
    content = changed(
        ds4d__model={"path": "nobody/never-downloaded"},
        zero_optimization={"stage": 1, "reduce_bucket_size": "auto"},
    )
    found = problems(content)
    assert list(found) == ["zero_optimization.reduce_bucket_size"]
    assert "give a number" in found["zero_optimization.reduce_bucket_size"]


def test_the_error_travels_between_processes():
    with pytest.raises(ConfigError) as caught:
        load(changed(tp_size=1))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.problems, str(copy)) == (caught.value.problems, str(caught.value))


@pytest.mark.parametrize(
    "model_type, key, text",
    [
        ("musicgen", "ds4d.model.config", "has several text models"),
        ("dots3_note_text", "ds4d.parallel.cp", "picks the keys that each query sees itself"),
    ],
)
def test_configs_whose_fields_have_no_one_value(model_type, key, text):
    found = problems(
        changed(
            ds4d__model={"config": {"model_type": model_type}},
            ds4d__parallel={"cp": 2},
            ds4d__data__packing="concat",
        )
    )
    assert list(found) == [key] and text in found[key]
