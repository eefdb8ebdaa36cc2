"""Optimizers and schedules, and the order in which things are prepared."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
from accelerate.utils import DummyOptim, DummyScheduler
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from ds4d.accelerate import Accelerator
from tests.script_cases.common import (
    Samples,
    case,
    close,
    collate,
    groups_of,
    inputs_of,
    make_model,
    plain_steps,
    rates_of_deepspeed,
    same_weights,
    sgd,
    token_losses,
    train,
)


def _learning_rates(accelerator, make_schedule, dp, *, steps=12, accumulation=2, dummy=False):
    model = make_model()
    loader = DataLoader(
        Samples(2 * dp * accumulation * steps, low=4, high=5), batch_size=2, collate_fn=collate
    )
    groups = [
        {"params": list(model.parameters()), "weight_decay": 0.1},
        {"params": [], "weight_decay": 0.0},  # of "bias" and "LayerNorm.weight", as for any Llama
    ]
    optimizer = DummyOptim(groups, lr=1e-2) if dummy else torch.optim.AdamW(groups, lr=1e-2)
    prepared, opt, loader, schedule = accelerator.prepare(
        model, optimizer, loader, make_schedule(optimizer)
    )
    rates = []
    for batch in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(**inputs_of(batch)).loss)
            if accelerator.sync_gradients:
                rates.append(opt.param_groups[0]["lr"])
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            opt.step()
            schedule.step()
            opt.zero_grad()
    return rates


def _warmup(total, warmup):
    return lambda step: min(1.0, step / warmup, max(0.0, (total - step) / (total - warmup)))


@case
def learning_rates_follow_optimizer_steps(dp):
    """Case G01."""
    expected = [1e-2 * _warmup(12, 4)(step) for step in range(12)]

    def by_processes(optimizer):
        return LambdaLR(optimizer, _warmup(12 * dp, 4 * dp))

    close(
        _learning_rates(Accelerator(gradient_accumulation_steps=2), by_processes, dp), expected
    )
    by_steps = Accelerator(gradient_accumulation_steps=2, schedules_count="steps")
    close(_learning_rates(by_steps, lambda o: LambdaLR(o, _warmup(12, 4)), dp), expected)


@case
def optimizer_and_schedule_of_the_file(dp):
    content = json.loads(Path("ds4d.json").read_text())
    content |= {
        "optimizer": {
            "type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": [0.9, 0.95]}
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_min_lr": 0,
                "warmup_max_lr": "auto", "warmup_type": "linear",
            },
        },
    }  # fmt: skip
    accelerator = Accelerator(gradient_accumulation_steps=2, config=content)

    def schedule(optimizer):
        return DummyScheduler(optimizer, total_num_steps=12 * dp, warmup_num_steps=4)

    rates = _learning_rates(accelerator, schedule, dp, dummy=True)
    params = content["scheduler"]["params"] | {
        "total_num_steps": 12, "warmup_num_steps": 4, "warmup_max_lr": 1e-2
    }  # fmt: skip
    close(rates, rates_of_deepspeed(params, steps=12))


@case
def parameters_that_the_optimizer_has_not(dp):
    """Stay as they are, are saved, and their gradients are in the norm."""
    samples, model = Samples(8), make_model()
    plain = copy.deepcopy(model)
    theirs = torch.optim.SGD(plain.model.layers[3].parameters(), lr=0.1)
    norms = []
    for rows in groups_of(8, 2 * dp):
        total, count = token_losses(plain, [samples.tokens[i] for i in rows])
        (total / count).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        theirs.step()
        plain.zero_grad()
    accelerator = Accelerator()
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)
    optimizer = torch.optim.SGD(model.model.layers[3].parameters(), lr=0.1)
    prepared, opt, loader = accelerator.prepare(model, optimizer, loader)
    mine = []
    for batch in loader:
        accelerator.backward(prepared(**inputs_of(batch)).loss)
        mine.append(accelerator.clip_grad_norm_(prepared.parameters(), 0.5))
        opt.step()
    close(torch.stack(mine), torch.stack(norms))
    same_weights(accelerator, prepared, plain)


@case
def things_are_prepared_one_after_the_other(dp):
    samples, model = Samples(8), make_model()
    plain = copy.deepcopy(model)
    reference = plain_steps(plain, sgd(plain), samples, groups_of(8, 2 * dp))
    accelerator = Accelerator()
    optimizer = sgd(model)
    schedule = LambdaLR(optimizer, lambda step: 1.0)
    schedule, prepared = accelerator.prepare(schedule, model)
    loader = accelerator.prepare(DataLoader(samples, batch_size=2, collate_fn=collate))
    prepared.eval()
    with torch.no_grad():  # looked at before there is an optimizer
        first = prepared(**inputs_of(next(iter(loader)))).loss
    close(first, reference[0])
    prepared.train()
    optimizer = accelerator.prepare(optimizer)
    assert accelerator.prepare(model) is prepared and accelerator.unwrap_model(prepared) is model
    losses = train(accelerator, prepared, optimizer, loader)
    close(torch.stack(losses), reference)
    same_weights(accelerator, prepared, plain)
