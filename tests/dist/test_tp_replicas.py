"""What must be the same on all ranks of a tp group, and what must not: random masks (case A09),
initial weights, and whole weights after many steps (case A08)."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.harness import run_distributed
from tests.parity import ADAMW, make_engine, make_run
from tests.reference import rows, samples
from tests.tp_families import FAMILIES, GPT2_LIKE

BATCH = 4


def save_model(path: Path, **config) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def dropping(tmp_path_factory) -> Path:
    """A GPT-2 that drops embeddings, attention weights and both blocks' outputs."""
    return save_model(tmp_path_factory.mktemp("gpt2"), model_type="gpt2", **GPT2_LIKE)


def micro_batches(run, mesh, batch):
    micro, dp = run.batch.micro, run.parallel.dp
    starts = [(a * dp + mesh.coordinate.dp) * micro for a in range(run.batch.accumulation)]
    return [rows(batch, start, start + micro) for start in starts]


def drop(runs, batch):
    """A step of each run: (coordinate, masks of the residual stream, seeds of the attention's own
    masks, loss and norm)."""
    from ds4d.attention import interface
    from ds4d.resume import seed_everything

    out = []
    for run in runs:
        engine, mesh = make_engine(run)
        seed_everything(7, mesh.dropout_rank)
        masks, seeds, attend = [], [], interface.attend

        def watch(_module, _args, output):
            if torch._C._current_graph_task_id() == -1:  # not while it is computed again
                masks.append((output == 0).clone())

        def recorded(call):
            seeds.append(torch.initial_seed())
            return attend(call)

        names = ("drop", "resid_dropout", "dropout")
        for name, module in engine.module.named_modules():
            if name.rpartition(".")[2] in names:
                module.register_forward_hook(watch)
        interface.attend = recorded
        try:
            result = engine.train_step(micro_batches(run, mesh, batch))
        finally:
            interface.attend = attend
        out.append((mesh.coordinate, masks, seeds, (result.loss, result.grad_norm)))
    return out


def test_masks_agree_where_activations_do_and_differ_where_they_are_cut(dropping):
    layouts = [
        dict(sequence_parallel=cut, recompute=recompute)
        for cut in (False, True)
        for recompute in ("none", "selective", "full")
    ]
    runs = [
        make_run(dropping, tp=2, dp=2, stage=1, optimizer=ADAMW, micro=2, **layout)
        for layout in layouts
    ]
    ranks = run_distributed(drop, 4, runs=runs, batch=samples(BATCH, 24))
    for index, layout in enumerate(layouts):
        (one, masks, seeds, result), *others = [rank[index] for rank in ranks]
        assert one == (0, 0, 0, 0) and len(masks) == 5 and any(mask.any() for mask in masks)
        for other, its_masks, its_seeds, its_result in others:
            same_masks = [torch.equal(a, b) for a, b in zip(masks, its_masks, strict=True)]
            if other.dp == 0 and not layout["sequence_parallel"]:
                assert all(same_masks), layout
            else:
                assert not any(same_masks), (layout, other)
            assert set(seeds).isdisjoint(its_seeds), (layout, other)
            assert its_result == result, layout
        if layout["recompute"] == "none":
            without = result
        else:  # the same masks when it is computed again
            assert result == pytest.approx(without, rel=1e-6), layout


def shards(run):
    engine, _ = make_engine(run)
    names = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight")
    return [engine.module.get_parameter(name).detach().clone() for name in names]


def test_shards_of_new_weights_are_no_copies(tmp_path):
    """And together they are the weights of one rank."""
    import dataclasses

    from ds4d.config.types import ModelConfig

    options = dict(sequence_parallel=False, stage=1, optimizer=ADAMW)
    runs = [
        dataclasses.replace(
            make_run("", tp=tp, **options), model=ModelConfig(config=FAMILIES["llama"])
        )
        for tp in (1, 2)
    ]
    (whole,) = run_distributed(shards, 1, run=runs[0])
    for full, one, other in zip(whole, *run_distributed(shards, 2, run=runs[1]), strict=True):
        assert not torch.equal(one, other)
        assert torch.equal(torch.cat([one, other]), full)


def hashes_of_whole_weights(runs, steps):
    """A line a step: the checksum of every parameter that is whole on each rank."""
    out = []
    for run in runs:
        engine, mesh = make_engine(run)
        lines = []
        for step in range(steps):
            engine.train_step(micro_batches(run, mesh, samples(BATCH, 24, seed=step)))
            lines.append(
                {
                    name: crc32(p.detach().float().numpy().tobytes())
                    for name, p in engine.module.named_parameters()
                    if not hasattr(p, "tp_shard")
                }
            )
        out.append(lines)
    return out


def test_whole_weights_never_drift_apart(tmp_path):
    folder = save_model(tmp_path, **FAMILIES["qwen3"])
    runs = [
        make_run(
            folder, tp=2, sequence_parallel=cut, stage=stage, optimizer=ADAMW, precision=precision
        )
        for cut, stage, precision in ((True, 0, "fp32"), (True, 1, "bf16"), (False, 2, "bf16"))
    ]
    one, other = run_distributed(hashes_of_whole_weights, 2, runs=runs, steps=20)
    assert len(one[0][0]) == 4 * 2 + 1  # norms, of queries and keys too
    assert one == other
    for lines in one:
        assert all(lines[0][name] != lines[-1][name] for name in lines[0])


def use_as_hugging_face_does(run, batch, prompt):
    """After a step of training: state_dict keys, class, config, greedy text, logits."""
    engine, mesh = make_engine(run)
    engine.train_step(micro_batches(run, mesh, batch))
    model = engine.module.eval()
    with torch.no_grad():
        logits = model(input_ids=prompt).logits
        text = model.generate(prompt, max_new_tokens=20, do_sample=False, use_cache=True)
    engine.train_step(micro_batches(run, mesh, batch))  # and on with training
    return list(model.state_dict()), type(model), model.config.to_dict(), text, logits


def test_the_model_stays_a_hugging_face_model(tmp_path):
    folder = save_model(tmp_path, **FAMILIES["gemma2"])
    batch, prompt = samples(BATCH, 24), torch.tensor([[5, 7, 11, 13], [3, 2, 96, 17]])
    made = []
    for tp in (1, 2):
        run = make_run(folder, tp=tp, sequence_parallel=tp > 1, stage=0, optimizer=ADAMW)
        options = dict(run=run, batch=batch, prompt=prompt)
        made += run_distributed(use_as_hugging_face_does, tp, **options)
    keys, kind, config, text, logits = made[0]
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert keys == list(plain.state_dict()) and kind is type(plain)
    for its_keys, its_kind, its_config, its_text, its_logits in made[1:]:
        assert (its_keys, its_kind, its_config) == (keys, kind, config)
        assert torch.equal(its_text, text) and text.shape == (2, 24)
        torch.testing.assert_close(its_logits, logits, rtol=1e-4, atol=1e-5)
