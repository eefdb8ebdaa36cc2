"""Losses and gradients are those of plain Hugging Face on the whole global batch."""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import (
    BatchEncoding,
)

from ds4d.accelerate import Accelerator
from tests.script_cases.common import (
    IGNORE,
    Samples,
    case,
    close,
    collate,
    groups_of,
    inputs_of,
    make_model,
    plain_steps,
    raises,
    same_weights,
    sgd,
    token_losses,
    train,
    trained,
)


@case
def steps_are_those_of_all_tokens(dp):
    """Rows of unequal lengths in unequal micro-batches, over accumulation."""
    accelerator, prepared, plain, losses, reference = trained(dp, steps=3)
    assert len(losses) == 12 // dp
    same_weights(accelerator, prepared, plain)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [float(x) for x in losses])
    assert all(x == everyone[0] for x in everyone), "the loss is the same on all ranks"


@case
def the_loss_is_the_mean_over_the_ranks_tokens(dp):
    _, _, _, losses, reference = trained(dp, steps=1)
    close(torch.stack(losses), torch.tensor(reference))


@case
def padding_on_the_left(dp):
    """The token before the first one of a row predicts it, and is counted, as in transformers; its
    embedding is not zero."""
    samples, model = Samples(24), make_model()
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.2, generator=_drawn())
    plain = copy.deepcopy(model)
    reference, opt = [], sgd(plain)
    for rows in groups_of(24, 2 * dp):
        loss = plain(**inputs_of(collate([samples[i] for i in rows], left=True))).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        reference.append(float(loss.detach()))
    accelerator = Accelerator()
    loader = DataLoader(samples, batch_size=2, collate_fn=lambda s: collate(s, True))
    prepared, opt, loader = accelerator.prepare(model, sgd(model), loader)
    if dp == 1:  # else ranks pad each their own rows, and what they count differs from one process
        close(torch.stack(train(accelerator, prepared, opt, loader)), torch.tensor(reference))
        same_weights(accelerator, prepared, plain)


def _drawn():
    return torch.Generator().manual_seed(2)


@case
def the_last_step_of_an_epoch_may_be_short(dp):
    """As in one process: accumulate() divides by its number of batches all the same."""
    samples, model = Samples(10 * dp), make_model()
    plain = copy.deepcopy(model)
    opt = sgd(plain)
    whole, rest = list(range(8 * dp)), list(range(8 * dp, 10 * dp))
    for rows, share in ((whole, 1.0), (rest, 0.25)):
        total, count = token_losses(plain, [samples.tokens[i] for i in rows])
        (total / count * share).backward()
        opt.step()
        opt.zero_grad()
    accelerator = Accelerator(gradient_accumulation_steps=4)
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)
    prepared, opt, loader = accelerator.prepare(model, sgd(model), loader)
    train(accelerator, prepared, opt, loader)
    same_weights(accelerator, prepared, plain)


@case
def labels_that_the_script_makes(dp):
    samples, model = Samples(8, low=8, high=9), make_model()
    plain = copy.deepcopy(model)
    reference = plain_steps(plain, sgd(plain), samples, groups_of(8, 2 * dp))
    accelerator = Accelerator()
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)
    prepared, opt, loader = accelerator.prepare(model, sgd(model), loader)
    losses = []
    for batch in loader:
        loss = prepared(batch["input_ids"], labels=batch["input_ids"].clone()).loss
        accelerator.backward(loss)
        opt.step()
        losses.append(float(loss))
    close(losses, reference)
    same_weights(accelerator, prepared, plain)


@case
def batches_that_are_no_dicts(dp):
    """Tuples, and transformers' BatchEncoding, which is moved to a device in place."""
    kinds = (
        lambda rows: tuple(inputs_of(collate(rows)).values()),
        lambda rows: BatchEncoding(inputs_of(collate(rows))),
    )
    for kind in kinds:
        samples, model = Samples(6 * dp + 1), make_model()
        plain = copy.deepcopy(model)
        groups = groups_of(len(samples), 2 * dp)
        reference = plain_steps(plain, sgd(plain), samples, groups)
        accelerator = Accelerator()
        loader = DataLoader(samples, batch_size=2, collate_fn=kind)
        prepared, opt, loader = accelerator.prepare(model, sgd(model), loader)
        losses = []
        for batch in loader:
            if isinstance(batch, tuple):
                batch = dict(zip(("input_ids", "attention_mask", "labels"), batch))
            loss = prepared(**batch).loss
            accelerator.backward(loss)
            opt.step()
            losses.append(loss.detach())
        close(torch.stack(losses), torch.tensor(reference))
        same_weights(accelerator, prepared, plain)


@case
def packed_rows(dp):
    """Positions that begin anew, as transformers' flattening collator has them."""
    samples, model = Samples(12), make_model()
    plain = copy.deepcopy(model)
    reference = plain_steps(plain, sgd(plain), samples, groups_of(12, 3 * dp))

    def flat(rows):
        tokens = [row["tokens"] for row in rows]
        labels = [torch.cat([torch.tensor([IGNORE]), t[1:]]) for t in tokens]
        positions = torch.cat([torch.arange(len(t)) for t in tokens])[None]
        ids, labels = torch.cat(tokens)[None], torch.cat(labels)[None]
        return {"input_ids": ids, "labels": labels, "position_ids": positions}

    accelerator = Accelerator()
    loader = DataLoader(samples, batch_size=3, collate_fn=flat)
    prepared, opt, loader = accelerator.prepare(model, sgd(model), loader)
    losses = []
    for batch in loader:
        loss = prepared(**batch).loss
        accelerator.backward(loss)
        opt.step()
        losses.append(float(loss.detach()))
    close(losses, reference)


@case
def a_loss_of_the_scripts_own(dp):
    samples, model = Samples(8, low=9, high=10), make_model()
    plain = copy.deepcopy(model)
    accelerator = Accelerator()
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)
    prepared, opt, loader = accelerator.prepare(model, sgd(model), loader)

    def own(logits, ids):  # no cross-entropy: of all logits
        return (logits.float().softmax(-1)[..., 7] * (1 + ids % 3)).mean()

    if accelerator._these.mesh.parallel.pp > 1:
        with raises(ValueError, "ds4d.parallel.pp", "labels"):
            prepared(input_ids=next(iter(loader))["input_ids"])
        return
    reference = sgd(plain)
    for batch, rows in zip(loader, groups_of(8, 2 * dp)):
        logits = prepared(input_ids=batch["input_ids"]).logits
        loss = own(logits, batch["input_ids"])
        accelerator.backward(loss)
        opt.step()
        ids = torch.stack([samples.tokens[i] for i in rows])
        expected = own(plain(ids).logits, ids)
        expected.backward()
        reference.step()
        reference.zero_grad()
        close(accelerator.reduce(loss.detach(), "mean"), expected)
    same_weights(accelerator, prepared, plain)


@case
def a_loss_that_the_script_multiplies(dp):
    samples, model = Samples(8), make_model()
    plain = copy.deepcopy(model)
    opt = sgd(plain, lr=0.05)
    plain_steps(plain, opt, samples, groups_of(8, 2 * dp))
    accelerator = Accelerator()
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)
    prepared, opt, loader = accelerator.prepare(model, sgd(model), loader)
    for batch in loader:
        accelerator.backward(prepared(**inputs_of(batch)).loss * 0.5)
        opt.step()
    same_weights(accelerator, prepared, plain)


@case
def frozen_parameters_stay(dp):
    samples, model = Samples(8), make_model()
    model.model.layers[1].requires_grad_(False)
    plain = copy.deepcopy(model)
    plain_steps(plain, sgd(plain), samples, groups_of(8, 2 * dp))
    accelerator = Accelerator()
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)
    learning = [p for p in model.parameters() if p.requires_grad]
    prepared, opt, loader = accelerator.prepare(model, torch.optim.SGD(learning, lr=0.1), loader)
    train(accelerator, prepared, opt, loader)
    same_weights(accelerator, prepared, plain)


@case
def gradient_checkpointing_changes_nothing(dp):
    samples, model = Samples(8), make_model()
    plain = copy.deepcopy(model)
    plain_steps(plain, sgd(plain), samples, groups_of(8, 2 * dp))
    model.gradient_checkpointing_enable()
    accelerator = Accelerator()
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)
    prepared, opt, loader = accelerator.prepare(model, sgd(model), loader)
    train(accelerator, prepared, opt, loader)
    assert accelerator._run.config.recompute == "full"
    same_weights(accelerator, prepared, plain)


@case
def labels_that_the_script_changes_in_the_batch(dp):
    """Put in their place, written into, or made where the collator has none."""

    def replaced(batch):
        batch["labels"] = torch.where(batch["labels"] < 30, IGNORE, batch["labels"])

    def written(batch):
        batch["labels"][batch["labels"] < 30] = IGNORE

    def added(batch):
        labels = batch["input_ids"].clone()
        batch["labels"] = torch.where(labels < 30, IGNORE, labels)

    for change in (replaced, written, added):
        samples, model = Samples(8, low=9, high=10), make_model()
        plain = copy.deepcopy(model)
        accelerator = Accelerator()

        def collated(rows, change=change):
            batch = collate(rows)
            return {k: v for k, v in batch.items() if change is not added or k != "labels"}

        loader = DataLoader(samples, batch_size=2, collate_fn=collated)
        prepared, opt, loader = accelerator.prepare(model, sgd(model), loader)
        theirs = sgd(plain)
        for batch, rows in zip(loader, groups_of(8, 2 * dp)):
            change(batch)
            loss = prepared(**inputs_of(batch)).loss
            accelerator.backward(loss)
            opt.step()
            whole = collate([samples[i] for i in rows])
            change(whole)
            expected = plain(**inputs_of(whole)).loss
            expected.backward()
            theirs.step()
            theirs.zero_grad()
            close(loss, expected)


@case
def losses_over_the_scripts_own_number_of_targets(dp):
    """As Accelerate's example for accumulation with autoregressive models has it."""
    samples, model = Samples(16 * dp), make_model()
    plain = copy.deepcopy(model)
    reference = plain_steps(plain, sgd(plain), samples, groups_of(16 * dp, 4 * dp))
    accelerator = Accelerator(gradient_accumulation_steps=2)
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)
    prepared, opt, loader = accelerator.prepare(model, sgd(model), loader)
    batches, losses = iter(loader), []
    for _ in range(4):
        of_step = [next(batches), next(batches)]
        count = sum((batch["labels"][:, 1:] != IGNORE).sum() for batch in of_step)
        count = accelerator.gather(count).sum().item()
        for index, batch in enumerate(of_step):
            with prepared.no_sync() if index == 0 else contextlib.nullcontext():
                loss = prepared(**inputs_of(batch), num_items_in_batch=count).loss
                accelerator.backward(loss * 2 * accelerator.num_processes)
            losses.append(loss.detach() * accelerator.num_processes)
        opt.step()
        opt.zero_grad()
    close(torch.stack(losses).view(4, 2).sum(1), torch.tensor(reference))
    same_weights(accelerator, prepared, plain)


@case
def a_model_that_was_left_in_eval_mode(dp):
    samples, model = Samples(8), make_model().eval()
    plain = copy.deepcopy(model)
    plain_steps(plain, sgd(plain), samples, groups_of(8, 2 * dp))
    accelerator = Accelerator()
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)
    prepared, opt, loader = accelerator.prepare(model, sgd(model), loader)
    if accelerator._these.mesh.parallel.pp > 1:
        with raises(RuntimeError, "model.train()"):
            train(accelerator, prepared, opt, loader)
        return
    train(accelerator, prepared, opt, loader)
    same_weights(accelerator, prepared, plain)


@case
def several_losses_go_back_together(dp):
    samples, model = Samples(8, low=9, high=10), make_model()
    accelerator = Accelerator()
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)
    plain = copy.deepcopy(model)
    theirs = sgd(plain, lr=0.05)
    prepared, opt, loader = accelerator.prepare(model, sgd(model, lr=0.05), loader)
    pipelined = accelerator._these.mesh.parallel.pp > 1
    for batch, rows in zip(loader, groups_of(8, 2 * dp)):
        ids = torch.stack([samples.tokens[i] for i in rows])
        one = prepared(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        turned = batch["input_ids"].flip(1)
        if pipelined:
            with raises(RuntimeError, "model.eval()"):
                prepared(input_ids=turned, labels=turned)
            return
        other = prepared(input_ids=turned, labels=turned).loss
        accelerator.backward(one + other)
        opt.step()
        (plain(ids, labels=ids).loss + plain(ids.flip(1), labels=ids.flip(1)).loss).backward()
        theirs.step()
        theirs.zero_grad()
    same_weights(accelerator, prepared, plain)
