"""The Trainer, in the same process."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    Trainer,
    TrainingArguments,
)

from tests.script_cases.common import (
    Samples,
    case,
    close,
    collate,
    groups_of,
    make_model,
    plain_steps,
    raises,
    rates_of_deepspeed,
    same_weights,
    sgd,
    token_losses,
)


def _trainer(model, samples, *, batch=2, evaluation=None, content=None, **options):
    optimizers = options.pop("optimizers", (None, None))
    content = json.loads(Path("ds4d.json").read_text()) | (content or {})
    arguments = TrainingArguments(
        "trainer", per_device_train_batch_size=batch, per_device_eval_batch_size=4,
        max_grad_norm=0.0, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
        train_sampling_strategy="sequential", deepspeed=content, use_cpu=True,
        remove_unused_columns=False,
        **{"max_steps": len(samples) // (batch * PLACE["dp"]), **options},
    )  # fmt: skip
    return Trainer(
        model, arguments, train_dataset=samples, eval_dataset=evaluation,
        data_collator=_without_ids, optimizers=optimizers,
    )  # fmt: skip


PLACE = {"dp": 1}


def _without_ids(samples):
    return {k: v for k, v in collate(samples).items() if k != "id"}


def _logged(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


@case
def the_trainer_with_an_optimizer_of_the_users(dp):
    PLACE["dp"] = dp
    samples, model = Samples(8), make_model()
    plain = copy.deepcopy(model)
    theirs = sgd(plain)
    schedule = LambdaLR(theirs, lambda step: 0.5**step)
    rates, losses = [], []
    for rows in groups_of(8, 2 * dp):
        rates.append(theirs.param_groups[0]["lr"])
        losses += plain_steps(plain, theirs, samples, [rows])
        schedule.step()
    optimizer = sgd(model)
    own = (optimizer, LambdaLR(optimizer, lambda step: 0.5**step))
    trainer = _trainer(model, samples, optimizers=own)
    trainer.train()
    close(_logged(trainer, "learning_rate"), rates)
    close(_logged(trainer, "loss"), losses)
    same_weights(trainer.accelerator, trainer.model_wrapped, plain)


@case
def the_trainers_label_smoothing(dp):
    """A loss of the script's on logits, over the targets of all ranks."""
    PLACE["dp"] = dp
    samples, model = Samples(8), make_model()
    optimizer = sgd(model)
    if json.loads(Path("ds4d.json").read_text())["ds4d"]["parallel"].get("pp", 1) > 1:
        trainer = _trainer(model, samples, label_smoothing_factor=0.1, optimizers=(optimizer, None))
        with raises(ValueError, "ds4d.parallel.pp"):
            trainer.train()
        return
    plain, losses = copy.deepcopy(model), []
    theirs = sgd(plain)
    for rows in groups_of(8, 2 * dp):
        total, count = 0.0, 0
        for tokens in (samples.tokens[i] for i in rows):
            logits = plain(tokens[None]).logits[0, :-1]
            total = total + F.cross_entropy(
                logits, tokens[1:], reduction="sum", label_smoothing=0.1
            )
            count += len(tokens) - 1
        (total / count).backward()
        theirs.step()
        theirs.zero_grad()
        losses.append(float(total / count))
    own = (optimizer, LambdaLR(optimizer, lambda step: 1.0))
    trainer = _trainer(model, samples, label_smoothing_factor=0.1, optimizers=own)
    trainer.train()
    close(_logged(trainer, "loss"), losses)


@case
def the_trainer_evaluates_before_it_trains(dp):
    PLACE["dp"] = dp
    samples, model, held = Samples(8), make_model(), Samples(10)
    plain = copy.deepcopy(model)
    with torch.no_grad():
        means = []
        for rows in groups_of(10, 4 * dp):
            total, count = token_losses(plain, [held.tokens[i] for i in rows])
            means += [float(total / count)] * len(rows)
    optimizer = sgd(model)
    own = (optimizer, LambdaLR(optimizer, lambda step: 1.0))
    trainer = _trainer(model, samples, evaluation=held, optimizers=own)
    close(trainer.evaluate()["eval_loss"], sum(means) / len(means))
    reference = plain_steps(plain, sgd(plain), samples, groups_of(8, 2 * dp))
    trainer.train()
    close(_logged(trainer, "loss"), reference)
    same_weights(trainer.accelerator, trainer.model_wrapped, plain)


@case
def the_trainer_fills_in_a_schedule_of_the_file(dp):
    PLACE["dp"] = dp
    samples, model = Samples(12 * dp), make_model()
    content = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": "auto", "warmup_num_steps": "auto", "warmup_min_lr": "auto",
                "warmup_max_lr": "auto", "warmup_type": "linear",
            },
        },
    }  # fmt: skip
    trainer = _trainer(model, samples, content=content, learning_rate=1e-2, warmup_steps=2)
    trainer.train()
    params = content["scheduler"]["params"] | {
        "total_num_steps": 6, "warmup_num_steps": 2, "warmup_max_lr": 1e-2, "warmup_min_lr": 0
    }  # fmt: skip
    close(_logged(trainer, "learning_rate"), rates_of_deepspeed(params, steps=6))
