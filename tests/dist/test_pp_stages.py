"""What a stage reads from files, what it has in memory, what it draws at random."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import combinations
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef

from ds4d.config.types import ModelConfig
from ds4d.pipeline.schedules import placement_of
from ds4d.pipeline.stage import StandIn
from ds4d.resume import seed_everything
from tests.dist.test_pp_edges import steps_of
from tests.dist.test_pp_parity import with_schedule
from tests.harness import run_distributed
from tests.parity import export, folder_of, make_engine, make_run
from tests.reference import assemble
from tests.tp_families import FAMILIES, with_layers

LAYERS = 8
PLACEMENTS = ("1f1b", "interleaved", "dualpipev")


def storages() -> dict[int, tuple[StorageWeakRef, int]]:
    """Of all tensors that live: by number, with their bytes."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and each.device.type == "cpu":
            storage = each.untyped_storage()
            found[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
    return found


def read_and_held(runs):
    """Of each run: the bytes that this rank reads of each tensor, those of its parameters, and
    those that building the model has left in memory."""
    from ds4d.tensor_file import TensorFile

    out = []
    for run in runs:
        read, after = {}, []

        class File(TensorFile):
            def read(self, name, box=()):
                tensor = super().read(name, box)
                read[name] = read.get(name, 0) + tensor.nbytes
                return tensor

        before = storages()  # kept, so that no new one can have an old one's number
        with mock.patch("ds4d.model.weights.TensorFile", File):
            engine, _ = make_engine(run, lambda _model: after.append(storages()))
        held = sum(p.nbytes for p in engine.module.parameters())
        new = [nbytes for number, (_, nbytes) in after[0].items() if number not in before]
        out.append((read, held, sum(new)))
    return out


ENDS = {  # what the first stage has before its layers, the last one after its own
    "llama tied": (["model.embed_tokens"], ["model.norm", "model.embed_tokens"]),
    "gpt2": (["transformer.wte", "transformer.wpe"], ["transformer.ln_f", "transformer.wte"]),
    "mixtral": (["model.embed_tokens"], ["model.norm", "lm_head"]),
}


def _layer_of(name: str) -> int | None:
    return next((int(word) for word in name.split(".") if word.isdigit()), None)


@pytest.mark.parametrize("family", ENDS)
@pytest.mark.parametrize("pp", [2, 4])
def test_a_stage_reads_and_holds_what_is_its_own(family, pp):
    """In bytes: of the file nothing else and nothing twice, in memory nothing more."""
    folder, (before, after) = folder_of(family, LAYERS), ENDS[family]
    stored = load_file(folder / "model.safetensors")
    runs, owned = [], []
    for name in PLACEMENTS:
        run = make_run(folder, rows=8, **with_schedule(name, pp=pp))
        placement = placement_of(name, pp, run.pipeline.chunks)
        each, last = LAYERS // placement.stages, placement.stages - 1
        runs.append(run.replace(pipeline=replace(run.pipeline, split=(each,) * (last + 1))))
        owned.append([])
        for rank in range(pp):
            stages = set(placement.of_rank(rank))
            ends = [*(before if 0 in stages else []), *(after if last in stages else [])]
            owned[-1].append(
                {
                    key: tensor.nbytes
                    for key, tensor in stored.items()
                    if (layer := _layer_of(key)) is not None and layer // each in stages
                    or key.rpartition(".")[0] in ends
                }
            )
    for rank, found in enumerate(run_distributed(read_and_held, pp, runs=runs)):
        for run, of_ranks, (read, held, left) in zip(runs, owned, found, strict=True):
            assert read == of_ranks[rank], (run.pipeline, rank)
            assert held == sum(of_ranks[rank].values()), (run.pipeline, rank)
            assert held <= left < held + 100, (run.pipeline, rank)  # rotary frequencies


def initial_weights(runs):
    return [export(make_engine(run)[0].logical_state()) for run in runs]


@pytest.mark.parametrize("pp", [2, 4])
def test_from_scratch_every_placement_has_the_same_weights(pp):
    models = [ModelConfig(config=with_layers(FAMILIES[name], LAYERS)) for name in ENDS]
    (alone,) = run_distributed(initial_weights, 1, runs=[_from_scratch(m, pp=1) for m in models])
    for schedule in PLACEMENTS:
        options = with_schedule(schedule, pp=pp)
        runs = [_from_scratch(model, **options) for model in models]
        ranks = run_distributed(initial_weights, pp, runs=runs)
        for one, *of_ranks in zip(alone, *ranks, strict=True):
            expected, found = assemble([one]), assemble(of_ranks)
            assert expected.keys() == found.keys(), schedule
            assert all(torch.equal(found[name], expected[name]) for name in found), schedule


def _from_scratch(model: ModelConfig, **options):
    return make_run("nowhere", rows=8, **options).replace(model=model)


# -- dropout --------------------------------------------------------------------------------------


def masks_and_results(runs, micro_batches):
    """Of each run: what the first dropout of this rank's layers left out in the first micro-batch,
    and the results of two steps."""
    out = []
    for run in runs:
        engine, mesh = make_engine(run)
        seed_everything(7, mesh.dropout_rank)
        masks = []
        layers = engine.module.transformer.h
        layer = next(layer for layer in layers if not isinstance(layer, StandIn))
        layer.mlp.dropout.register_forward_hook(lambda _m, _a, x: masks.append((x == 0)[0]))
        results = [engine.train_step(micro_batches) for _ in range(2)]
        out.append((masks[0], results))
    return out


def test_dropout_differs_between_stages_and_is_repeated_by_recomputation():
    (micro_batches,) = steps_of([(1, 24)] * 8)
    folder = folder_of("gpt2", LAYERS, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    how = ("none", "full", "selective")
    stages = {"1f1b": 4, "zb-h1": 4, "interleaved": 2, "dualpipev": 2, "zbv": 2}
    layouts = [with_schedule(schedule, pp=pp, tp=4 // pp) for schedule, pp in stages.items()]
    runs = [make_run(folder, rows=8, recompute=r, **layout) for layout in layouts for r in how]
    ranks = run_distributed(masks_and_results, 4, runs=runs, micro_batches=micro_batches)
    for index, layout in enumerate(layouts):
        found = [rank[index * len(how) : (index + 1) * len(how)] for rank in ranks]
        masks = [first[0] for first, *_ in found]
        assert all(0.05 < float(mask.float().mean()) < 0.15 for mask in masks), layout
        for a, b in combinations(range(4), 2):
            same_stage = a // layout["tp"] == b // layout["tp"]
            assert torch.equal(masks[a], masks[b]) == same_stage, (layout, a, b)
        for (_, results), *others in found:
            for _, again in others:
                assert [r.loss for r in again] == pytest.approx([r.loss for r in results], rel=1e-5)
                norms = [r.grad_norm for r in results]
                assert [r.grad_norm for r in again] == pytest.approx(norms, rel=1e-5), layout
