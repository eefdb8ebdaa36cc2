"""Case D02: what one tp layout saved, any other loads, bit for bit: weights and moments, frozen
weights, fused and padded ones, and those that every rank holds."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ds4d.checkpoint.export import export as export_model
from ds4d.checkpoint.find import find
from ds4d.checkpoint.load import load, read_extra
from ds4d.checkpoint.save import save
from ds4d.checkpoint.storage import SafetensorsReader
from ds4d.config.types import ModelConfig
from ds4d.model.build import fill
from ds4d.model.config import hf_config
from ds4d.model.initial import InitialValues
from ds4d.model.meta import logical_model, meta_model
from tests.dist.test_engine import export, global_batches
from tests.dist.test_tp_zero import DTYPES, assemble_checked, plain, share, toy_engine, tp_run
from tests.harness import run_distributed
from tests.reference import relative
from tests.shards import cut_by_hand
from tests.toy_tp import ToyModel
from tests.unit.model_families import fields

# precision, stage, parameters that are not trained
CASES = [(precision, stage, ()) for precision in ("fp32", "bf16") for stage in range(4)]
FROZEN = ("embed.weight", "layers.0.qkv.weight", "norm.weight")
CASES += [("fp32", stage, FROZEN) for stage in (0, 3)]
LAYOUTS = [(1, 1), (1, 2), (2, 1), (4, 1)]  # tp, dp
STEPS = 2


def runs(tp, dp, other_stage=0):
    return [
        (tp_run(tp=tp, dp=dp, stage=(stage + other_stage) % 4, precision=precision), frozen)
        for precision, stage, frozen in CASES
    ]


def train_and_save(runs, batches, root):
    states = []
    for index, (run, frozen) in enumerate(runs):
        engine, mesh = toy_engine(run, frozen)
        for batch in batches:
            engine.train_step(share(batch, run, mesh))
        state = engine.logical_state()
        extra = {"scalars": engine.scalars()}
        save(root / str(index), STEPS, state, extra=extra, rank_state={}, keep=None)
        states.append(export(state))
    return states


def load_and_train(runs, batch, root):
    """[(state as it was loaded, the next step, whether padding is still zero)]"""
    out = []
    for index, (run, frozen) in enumerate(runs):
        engine, mesh = toy_engine(run, frozen, seed=1000)
        folder = find(root / str(index), "latest")
        with engine.restoring(read_extra(folder)["scalars"], step=STEPS) as state:
            load(folder, state, verify=True)
        loaded = export(engine.logical_state())
        result = engine.train_step(share(batch, run, mesh))
        padding = [
            param.narrow(shard.dim, shard.local_size - shard.padding, shard.padding)
            for param in engine.module.parameters()
            if (shard := getattr(param, "tp_shard", None)) and param.numel()
        ]
        out.append((loaded, result, not any(rows.any() for rows in padding)))
    return out


def check_folder(root, shapes):
    """Logical names and shapes, and every element once."""
    saved = SafetensorsReader(find(root, "latest")).metadata.state_dict_metadata
    assert {name: tuple(tensor.size) for name, tensor in saved.items()} == shapes
    for name, tensor in saved.items():
        assert sum(math.prod(c.sizes) for c in tensor.chunks) == math.prod(tensor.size), name


@pytest.mark.parametrize("saved_by", [(2, 2), (1, 1)])
def test_every_layout_loads_what_another_saved(saved_by, tmp_path):
    *before, last = global_batches()[: STEPS + 1]
    tp, dp = saved_by
    ranks = run_distributed(
        train_and_save, tp * dp, runs=runs(tp, dp), batches=before, root=tmp_path, timeout=240
    )
    expected = [assemble_checked(states) for states in zip(*ranks)]
    whole = {name: tuple(p.shape) for name, p in ToyModel().named_parameters()}
    for index, (_, _, frozen) in enumerate(CASES):
        shapes = {f"weight/{name}": shape for name, shape in whole.items()}
        for kind in ("exp_avg", "exp_avg_sq"):
            shapes |= {f"{kind}/{n}": shape for n, shape in whole.items() if n not in frozen}
        check_folder(tmp_path / str(index), shapes)
    for tp, dp in LAYOUTS if saved_by == (2, 2) else [(2, 2)]:
        made = runs(tp, dp, other_stage=tp + dp)
        loaded = run_distributed(
            load_and_train, tp * dp, runs=made, batch=last, root=tmp_path, timeout=240
        )
        for index, case in enumerate(CASES):
            state = assemble_checked([rank[index][0] for rank in loaded])
            assert state.keys() == expected[index].keys()
            for name, tensor in state.items():
                assert torch.equal(tensor, expected[index][name]), (tp, dp, case, name)
            assert all(rank[index][2] for rank in loaded)
            precision, _, frozen = case
            if not frozen:
                loss = plain().losses[STEPS]
                rel = 1e-5 if precision == "fp32" else 2e-2
                assert loaded[0][index][1].loss == pytest.approx(loss, rel=rel), (tp, dp, case)


def test_what_was_saved_is_what_one_process_has(tmp_path):
    """Not only equal to itself: each element lies where it belongs."""
    batches = global_batches()
    made = runs(2, 1)[:1]
    ranks = run_distributed(train_and_save, 2, runs=made, batches=batches, root=tmp_path)
    weights = assemble_checked([rank[0] for rank in ranks])
    for name, expected in plain().weights.items():
        assert relative(weights[f"weight/{name}"], expected) < 1e-5, name


FAMILIES = ["phi3", "llama-tied", "gpt2", "mixtral"]


def save_hugging_face(family, runs, root):
    """The weights before the first step, of a Hugging Face model cut by hand."""
    from ds4d.engine import Engine
    from ds4d.mesh import Mesh
    from ds4d.optim import of_run

    config = hf_config(ModelConfig(config=fields(family) | {"vocab_size": 101}))
    for run in runs:
        mesh = Mesh.create(run.parallel)

        def build(partition):
            dtype = DTYPES[run.precision.param_dtype]
            tp = run.parallel.tp
            model = cut_by_hand(meta_model(config, dtype=dtype), mesh.coordinate.tp, tp)
            values = InitialValues(logical_model(config), seed=7)
            fill(model, values, device="cpu", partition=partition)
            return model

        engine = Engine.create(
            run, mesh, build, device=torch.device("cpu"), **of_run(run, total_steps=1)
        )
        extra = {"hf_config": json.loads(config.to_json_string()), "dtype": "fp32"}
        folder = root / str(run.zero_stage)
        save(folder, 1, engine.logical_state(), extra=extra, rank_state={}, keep=None)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_has_hugging_faces_names_shapes_and_order(family, tmp_path):
    """Cases B02 and B03."""
    made = [tp_run(tp=2, dp=2, stage=stage) for stage in range(4)]
    run_distributed(save_hugging_face, 4, family=family, runs=made, root=tmp_path)
    config = hf_config(ModelConfig(config=fields(family) | {"vocab_size": 101}))
    plain_model = meta_model(config, dtype=torch.float32)
    fill(plain_model, InitialValues(logical_model(config), seed=7), device="cpu")
    plain_model.save_pretrained(tmp_path / "plain")
    expected = load_file(tmp_path / "plain" / "model.safetensors")
    for stage in range(4):
        out = export_model(tmp_path / str(stage), tmp_path / f"out-{stage}")
        found = load_file(out / "model.safetensors")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), (stage, name)
    one, other = map(AutoModelForCausalLM.from_pretrained, (out, tmp_path / "plain"))
    ids = torch.arange(90, 101)[None]  # the last ones too
    assert torch.equal(one(ids).logits, other(ids).logits)
