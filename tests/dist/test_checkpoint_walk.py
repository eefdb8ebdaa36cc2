"""One run through many layouts, saved and resumed at each, is the uninterrupted run of one process;
and what ranks of several axes saved is exported as one process has it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from ds4d.checkpoint.export import export as export_model
from ds4d.checkpoint.find import find
from tests.dist.test_checkpoint_layouts import payloads
from tests.dist.test_trainer import config, corpus, curve, run  # noqa: F401 (a fixture)
from tests.harness import run_distributed
from tests.parity import ADAMW, folder_of, make_engine, make_run
from tests.reference import TINY_LLAMA, relative

MODEL = {**TINY_LLAMA, "num_hidden_layers": 4}
WALK = [  # ds4d.parallel, zero stage; two steps each
    (dict(dp=4), 3),
    (dict(tp=2, pp=2), 1),
    (dict(pp=4), 0),
    (dict(tp=4, sequence_parallel=True), 2),
    (dict(cp=2, dp=2), 1),
    (dict(), 0),
]
TOTAL = 2 * len(WALK)


def file_of(corpus, parallel, stage, *, steps=TOTAL, beside=False):  # noqa: F811
    file = config(
        corpus, model=MODEL, stage=stage, parallel=parallel,
        training={"steps": steps, "eval_every": 2}, checkpoint={"every": 2, "async": beside},
    )  # fmt: skip
    file["scheduler"]["params"] |= {"total_steps": TOTAL}
    return file


def test_a_walk_through_layouts_is_one_run(corpus, tmp_path):  # noqa: F811
    """Weights, moments, learning rate, data position (two and a half epochs); saved by turns at
    once and beside the training."""
    alone = curve(run(1, file_of(corpus, {}, 0), tmp_path / "alone"))
    for index, (parallel, stage) in enumerate(WALK):
        steps = 2 * (index + 1)
        world = 4 if parallel else 1
        file = file_of(corpus, parallel, stage, steps=steps, beside=index % 2 == 1)
        rows = curve(run(world, file, tmp_path / "walk", resume="auto"))
        assert len(rows) == steps
        for row, expected in zip(rows[-2:], alone[steps - 2 : steps], strict=True):
            assert row == pytest.approx(expected, rel=1e-5), parallel
    for name in ("walk", "alone"):
        export_model(tmp_path / name, tmp_path / "out" / name)
    ends = [load_file(tmp_path / "out" / n / "model.safetensors") for n in ("walk", "alone")]
    assert ends[0].keys() == ends[1].keys()
    for name, tensor in ends[0].items():
        assert relative(tensor, ends[1][name]) < 1e-5, name


FAMILIES = ["llama tied", "llama", "gpt2", "phi3"]
LAYOUTS = [
    dict(tp=2, pp=2, sequence_parallel=True, schedule="interleaved", chunks=2),
    dict(tp=2, cp=2, sequence_parallel=True, stage=3),
    dict(pp=2, cp=2, schedule="zbv", chunks=2, stage=0),
]


def save_as_read(runs, root):
    """The weights of a Hugging Face folder, before any step."""
    from ds4d.checkpoint.save import save
    from ds4d.model.config import hf_config

    for index, run in enumerate(runs):  # noqa: F402
        engine, _ = make_engine(run)
        extra = {
            "hf_config": json.loads(hf_config(run.model).to_json_string()),
            "dtype": run.precision.param_dtype,
        }
        save(root / str(index), 1, engine.logical_state(), extra=extra, rank_state={}, keep=None)


def check_shares(sizes, tensors, case):
    """Each byte is written once, and what several ranks hold by each of them in equal parts."""
    each = [tensor.nbytes for tensor in tensors.values()]
    assert sum(sizes) == sum(each), case
    groups = [sizes[:2], sizes[2:]] if case[1].get("pp") else [sizes]  # of a stage each
    for group in groups:
        assert max(group) - min(group) <= max(each), (case, sizes)


def test_an_export_is_what_one_process_has(tmp_path):
    """Tensor for tensor, to the bit: no padding of the vocabulary (101 words), tied weights once,
    in the order and under the names of the folder that was read."""
    cases = [(name, how) for how in LAYOUTS for name in FAMILIES]
    runs = [make_run(folder_of(name, 4), optimizer=ADAMW, **how) for name, how in cases]
    run_distributed(save_as_read, 4, runs=runs, root=tmp_path, timeout=300)
    for index, (case, made) in enumerate(zip(cases, runs, strict=True)):
        out = export_model(tmp_path / str(index), tmp_path / f"out-{index}")
        found, expected = (
            load_file(f"{folder}/model.safetensors") for folder in (out, made.model.path)
        )
        assert list(found) == list(expected), case
        check_shares(payloads(find(tmp_path / str(index), "latest"), 4), expected, case)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), case
