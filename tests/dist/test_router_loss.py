"""The loss of routers against one plain Hugging Face process that has the whole global batch at
once, see ``tests/parity.py``: it is no sum over micro-batches, so each way to cut a batch could
make another one of it. Packed and padded at once it is in ``test_verify.py``."""

from __future__ import annotations

import torch

from ds4d.router_loss import RouterLoss
from tests.harness import run_distributed
from tests.parity import (
    SGD,
    batches,
    compare,
    folder_of,
    make_engine,
    make_run,
    plain,
    share_of,
    train,
)
from tests.reference import assemble, packed_samples, padded_samples, relative

MIXTRAL, GPT_OSS, QWEN3_MOE = (f"{name}, balanced" for name in ("mixtral", "gpt_oss", "qwen3_moe"))
ZBV = dict(pp=2, schedule="zbv", chunks=2)
BY_TOKENS = dict(tp=2, sequence_parallel=True, micro=2)
LAYOUTS = [
    dict(dp=2, stage=2, micro=2),
    dict(tp=2, micro=2),
    dict(**BY_TOKENS, recompute="full"),
    dict(**BY_TOKENS, recompute="selective", stage=3),
    dict(pp=2),
    dict(**ZBV, recompute="selective", stage=0),
    dict(cp=2, recompute="selective"),
    dict(cp=2, method="ulysses", micro=2),
    dict(dp=2, stage=3),
]
FEW = [dict(**BY_TOKENS), dict(**ZBV, recompute="full"), dict(cp=2)]


def test_layouts_of_padded_rows():
    cases = [(name, options) for name in (GPT_OSS, QWEN3_MOE) for options in FEW]
    cases += [(MIXTRAL, options) for options in LAYOUTS]
    compare(cases, 2, layers=4, data=padded_samples)


def test_packed_rows():
    cases = [(MIXTRAL, options) for options in (BY_TOKENS, dict(cp=2), dict(dp=2))]
    compare(cases, 2, layers=4, data=packed_samples)


def test_two_axes():
    cases = [
        (QWEN3_MOE, dict(**ZBV, **BY_TOKENS, recompute="selective")),
        (MIXTRAL, dict(pp=2, schedule="interleaved", chunks=2, dp=2)),
        (MIXTRAL, dict(cp=2, tp=2, sequence_parallel=True, stage=3, recompute="selective")),
    ]
    compare(cases, 4, layers=4, data=padded_samples)


def test_fp16_with_its_loss_scale():
    """Of routers, whose gradients are mostly of this loss."""
    options = dict(precision="fp16", clip=0.0)
    runs = [make_run(folder_of(MIXTRAL), **options, **way) for way in (dict(pp=2), dict(dp=2))]
    exact, before = plain(runs[0])
    ranks = run_distributed(train, 2, runs=runs, batches=batches(4))
    for index, run in enumerate(runs):
        after = assemble([rank[index][1] for rank in ranks])
        for name, gradient in exact.gradients.items():
            if "gate." in name:
                moved = (before[name] - after[f"weight/{name}"]) / SGD["params"]["lr"]
                assert relative(moved, gradient) < 0.05, (run.parallel, name)


def logits_seen(runs, batches):
    """Of each run, what both passes of a step have seen."""
    found = []
    for run in runs:
        engine, mesh = make_engine(run)
        passes: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        share = RouterLoss.share

        def watched(loss, seen, batch):
            passes[torch.is_grad_enabled()] += [x.detach().clone() for x in seen]
            return share(loss, seen, batch)

        RouterLoss.share = watched
        try:
            engine.train_step(share_of(batches[run.batch.train][0], run, mesh))
        finally:
            RouterLoss.share = share
        found.append(passes)
    return found


def test_both_passes_drop_the_same():
    folder = folder_of(MIXTRAL, 4, attention_dropout=0.5)
    layouts = [dict(**ZBV, recompute="full"), dict(tp=2), dict(dp=2, recompute="selective")]
    runs = [make_run(folder, **options) for options in layouts]
    for rank in run_distributed(logits_seen, 2, runs=runs, batches=batches(4)):
        for passes in rank:
            assert len(passes[False]) == len(passes[True]) > 0
            for counted, trained in zip(passes[False], passes[True], strict=True):
                assert torch.equal(counted, trained)
