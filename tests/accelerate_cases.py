"""Cases of ``ds4d.accelerate`` in one layout: a script that is started as users start theirs.

    torchrun --nproc-per-node N tests/accelerate_cases.py FOLDER

with ``ds4d.json`` in the folder. It runs all cases on the ranks of that layout, each against plain
Hugging Face on the whole global batch in the same process, and writes what came of each to
``results.json``. Ranks that disagree about a case would hang, so a case that fails ends the script.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import PartialState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import DummyOptim, DummyScheduler
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from ds4d.accelerate import Accelerator, lazily

from transformers import (  # isort: skip  (after ds4d, as the README says)
    AutoModelForCausalLM,
    BatchEncoding,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from accelerate.utils import gather_object  # isort: skip  (ds4d's, once it is imported)

VOCABULARY, IGNORE = 61, -100
CASES = {}
TOLERANCE = 1e-5


def case(function):
    CASES[function.__name__] = function
    return function


def close(actual, expected, tolerance=TOLERANCE):
    actual, expected = (torch.as_tensor(x).detach().double() for x in (actual, expected))
    off = float((actual - expected).norm() / expected.norm().clamp(min=1e-12))
    assert off < tolerance, f"{off:.2e} off: {actual.flatten()[:4]} for {expected.flatten()[:4]}"


@contextlib.contextmanager
def raises(kind, *words):
    try:
        yield
    except kind as error:
        assert all(word in str(error) for word in words), f"{words} not in: {error}"
    else:
        raise AssertionError(f"no {kind.__name__}")


def make_model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
            initializer_range=0.2, tie_word_embeddings=True, pad_token_id=0,
        )  # fmt: skip
        return LlamaForCausalLM(config)


class Samples(torch.utils.data.Dataset):
    """Of different lengths, by index."""

    def __init__(self, count, low=3, high=14):
        draw = torch.Generator().manual_seed(5)
        lengths = torch.randint(low, high, (count,), generator=draw).tolist()
        self.tokens = [torch.randint(1, VOCABULARY, (n,), generator=draw) for n in lengths]

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return {"id": index, "tokens": self.tokens[index]}


def collate(samples, left=False):
    width = max(len(s["tokens"]) for s in samples)
    rows = {"id": [], "input_ids": [], "attention_mask": [], "labels": []}
    for s in samples:
        side = (width - len(s["tokens"]), 0) if left else (0, width - len(s["tokens"]))
        rows["id"].append(torch.tensor(s["id"]))
        rows["input_ids"].append(F.pad(s["tokens"], side))
        rows["attention_mask"].append(F.pad(torch.ones_like(s["tokens"]), side))
        rows["labels"].append(F.pad(s["tokens"], side, value=IGNORE))
    return {key: torch.stack(values) for key, values in rows.items()}


def inputs_of(batch):
    return {key: batch[key] for key in ("input_ids", "attention_mask", "labels")}


def token_losses(model, rows):
    """The sum of the token losses of some samples, each alone, and how many tokens."""
    total, count = 0.0, 0
    for tokens in rows:
        logits = model(input_ids=tokens[None]).logits[0, :-1]
        total = total + F.cross_entropy(logits, tokens[1:], reduction="sum")
        count += len(tokens) - 1
    return total, count


def plain_steps(model, optimizer, samples, groups):
    """Steps on the mean over all tokens of each group of samples; the losses before them."""
    losses = []
    for rows in groups:
        total, count = token_losses(model, [samples.tokens[i] for i in rows])
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total / count))
    return losses


def groups_of(count, size):
    return [list(range(i, min(i + size, count))) for i in range(0, count, size)]


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


def same_weights(accelerator, prepared, plain):
    state = accelerator.get_state_dict(prepared)
    if accelerator.is_main_process:
        expected = plain.state_dict()
        assert state.keys() == expected.keys(), state.keys() ^ expected.keys()
        for name, tensor in expected.items():
            close(state[name], tensor)
    else:
        assert not state


def train(accelerator, prepared, optimizer, loader, **options):
    losses = []
    for batch in loader:
        with accelerator.accumulate(prepared):
            loss = prepared(**inputs_of(batch), **options).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


# -- data -----------------------------------------------------------------------------------------


@case
def ranks_agree_on_samples_without_a_seed(dp):
    torch.manual_seed(100 + dist.get_rank())  # as scripts without set_seed
    accelerator = Accelerator()
    loader = accelerator.prepare(
        DataLoader(Samples(24), batch_size=2, shuffle=True, collate_fn=collate)
    )
    for _ in range(2):
        mine = [int(i) for batch in loader for i in batch["id"]]
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        shares = {tuple(ids) for ids in everyone}
        assert len(shares) == dp
        assert sorted(i for ids in shares for i in ids) == list(range(24))
    assert accelerator.prepare(loader) is loader
    assert accelerator.num_processes == dp


@case
def an_error_of_the_data_is_raised_by_all_ranks(dp):
    class Broken(Samples):
        def __getitem__(self, index):
            if index == 2:
                raise KeyError("no such file")
            return super().__getitem__(index)

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Broken(8), batch_size=4, collate_fn=collate))
    failed = [False]
    try:
        list(loader)
    except KeyError:
        failed = [True]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, failed[0])
    mesh = accelerator._these.mesh
    assert everyone[dist.get_rank()] == (mesh.coordinate.dp == 0), everyone


# -- losses and gradients -------------------------------------------------------------------------


def _trained(dp, *, steps, left=False, count=24, batch=2, optimizer=sgd, **options):
    samples, model = Samples(count), make_model()
    plain = copy.deepcopy(model)
    size = batch * dp
    reference = plain_steps(plain, optimizer(plain), samples, groups_of(count, size * steps))
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    loader = DataLoader(samples, batch_size=batch, collate_fn=lambda s: collate(s, left))
    prepared, opt, loader = accelerator.prepare(model, optimizer(model), loader)
    losses = train(accelerator, prepared, opt, loader, **options)
    return accelerator, prepared, plain, losses, reference


@case
def steps_are_those_of_all_tokens(dp):
    """Rows of unequal lengths in unequal micro-batches, over accumulation."""
    accelerator, prepared, plain, losses, reference = _trained(dp, steps=3)
    assert len(losses) == 12 // dp
    same_weights(accelerator, prepared, plain)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [float(x) for x in losses])
    assert all(x == everyone[0] for x in everyone), "the loss is the same on all ranks"


@case
def the_loss_is_the_mean_over_the_ranks_tokens(dp):
    _, _, _, losses, reference = _trained(dp, steps=1)
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
def logits_in_evaluation(dp):
    samples, model = Samples(6), make_model()
    plain = copy.deepcopy(model).eval()
    accelerator = Accelerator()
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)
    prepared, loader = accelerator.prepare(model, loader)  # no optimizer: only looked at
    prepared.eval()
    for batch in loader:
        with torch.no_grad():
            output = prepared(**inputs_of(batch))
            expected = plain(**inputs_of(batch))
        real = batch["attention_mask"].bool()
        close(output.logits[real], expected.logits[real])
        assert output.logits.shape == expected.logits.shape
        loss, logits = output.to_tuple()
        assert loss is output.loss and logits is output["logits"]


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
def evaluation_between_steps(dp):
    """Case G07: other numbers and sizes of batches, and nothing of it changes training."""
    samples, model = Samples(16 * dp), make_model()
    held_out = Samples(11)
    plain = copy.deepcopy(model)
    opt = sgd(plain)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)
    prepared, mine, loader = accelerator.prepare(model, sgd(model), loader)
    held = [
        accelerator.prepare(DataLoader(held_out, batch_size=size, collate_fn=collate))
        for size in (3, 4, 5)
    ]
    steps = groups_of(16 * dp, 4 * dp)
    for number, batch in enumerate(loader):
        with accelerator.accumulate(prepared):
            loss = prepared(**inputs_of(batch)).loss
            accelerator.backward(loss)
            mine.step()
        if not accelerator.sync_gradients:
            continue
        plain_steps(plain, opt, samples, [steps[number // 2]])
        prepared.eval()
        with torch.no_grad():
            total, count = token_losses(plain, held_out.tokens)
            for each in held:
                pairs = []
                for rows in each:
                    tokens = (rows["labels"][:, 1:] != IGNORE).sum(1)
                    sums = torch.stack([prepared(**inputs_of(_row(rows, i))).loss * tokens[i]
                                        for i in range(len(tokens))]) if dp == 1 else None
                    loss = prepared(**inputs_of(rows)).loss
                    pairs.append((loss, accelerator.gather_for_metrics(tokens).sum()))
                    if sums is not None:
                        close(sums.sum() / tokens.sum(), loss)
                mean = sum(loss * n for loss, n in pairs) / sum(n for _, n in pairs)
                close(mean, total / count)
                assert int(sum(n for _, n in pairs)) == count
        prepared.train()
    same_weights(accelerator, prepared, plain)


def _row(batch, index):
    return {key: value[index : index + 1] for key, value in batch.items()}


@case
def metrics_count_every_sample_once(dp):
    accelerator = Accelerator()
    for count in (1, 5, 9, 13):
        loader = accelerator.prepare(
            DataLoader(Samples(count), batch_size=2, collate_fn=collate)
        )
        found = [accelerator.gather_for_metrics(batch["id"]) for batch in loader]
        assert torch.cat(found).tolist() == list(range(count))
        names = [
            accelerator.gather_for_metrics([str(int(i)) for i in batch["id"]]) for batch in loader
        ]
        assert [name for part in names for name in part] == [str(i) for i in range(count)]


@case
def generated_text_is_that_of_one_process(dp):
    model = make_model()
    plain = copy.deepcopy(model).eval()
    accelerator = Accelerator()
    loader = DataLoader(Samples(4), batch_size=2, collate_fn=collate)
    prepared, opt, loader = accelerator.prepare(model, sgd(model), loader)
    prompt = torch.tensor([[5, 9, 23, 4], [8, 1, 1, 40]])
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = plain.generate(prompt, **options)
    prepared.eval()
    assert prepared.generate(prompt, **options).tolist() == expected.tolist()
    assert model.generate(prompt, **options).tolist() == expected.tolist(), "the unwrapped one"
    if json.loads(Path("ds4d.json").read_text())["ds4d"].get("pipeline"):
        with raises(ValueError, "num_beams 2", "1f1b"):
            prepared.generate(prompt, num_beams=2, **options)
    prepared.train()
    train(accelerator, prepared, opt, loader)


@case
def operations_are_over_the_ranks_of_dp(dp):
    accelerator = Accelerator()
    mine = accelerator._these.mesh.coordinate.dp
    mean = accelerator.reduce(torch.tensor([float(mine)]), reduction="mean")
    close(mean + 1, torch.tensor([(dp - 1) / 2 + 1]))
    assert accelerator.gather(torch.tensor([mine])).tolist() == list(range(dp))
    assert gather_object([mine]) == list(range(dp))
    padded = accelerator.pad_across_processes(torch.ones(1, mine + 1), dim=1, pad_index=7)
    assert padded.tolist() == [[1.0] * (mine + 1) + [7.0] * (dp - 1 - mine)]
    with accelerator.split_between_processes(list(range(2 * dp))) as part:
        assert part == [2 * mine, 2 * mine + 1]
    with PartialState().split_between_processes(list(range(dp))) as part:
        assert part == [mine]
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        accelerator.set_trigger()
    assert accelerator.check_trigger() and not accelerator.check_trigger()
    assert accelerator.is_main_process == (dist.get_rank() == 0)
    assert accelerator.is_last_process == (dist.get_rank() == last)


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


# -- the Trainer ----------------------------------------------------------------------------------


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
    close(_logged(trainer, "learning_rate"), _rates_of_deepspeed(params, steps=6))


class FileTracker(GeneralTracker):
    """Of the user's own: writes lines."""

    name, requires_logging_directory = "file", False

    @on_main_process
    def __init__(self):
        self.file = Path("tracked.jsonl").open("w")

    @property
    def tracker(self):
        return self.file

    @on_main_process
    def store_init_configuration(self, values):
        self.log(values)

    @on_main_process
    def log(self, values, step=None, **_):
        print(json.dumps({"step": step, **values}), file=self.file, flush=True)


@case
def trackers_and_screen_are_of_the_main_process(dp):
    accelerator = Accelerator(log_with=FileTracker())
    accelerator.init_trackers("project", config={"lr": 0.1})
    accelerator.log({"loss": 1.5}, step=3)
    with contextlib.redirect_stdout(io.StringIO()) as screen:
        accelerator.print("once")
    assert (screen.getvalue() == "once\n") == accelerator.is_main_process
    accelerator.wait_for_everyone()
    with accelerator.main_process_first():
        lines = Path("tracked.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": None, "lr": 0.1}, {"step": 3, "loss": 1.5}
    ]  # fmt: skip


# -- optimizers and schedules ---------------------------------------------------------------------


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
    close(rates, _rates_of_deepspeed(params, steps=12))


def _rates_of_deepspeed(params, *, steps):
    optimizer, rates = sgd(make_model()), []
    schedule = WarmupDecayLR(optimizer, **params)
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert max(rates) == params["warmup_max_lr"]
    return rates


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


# -- saving ---------------------------------------------------------------------------------------


@case
def saved_models_are_plain_folders(dp):
    accelerator, prepared, plain, *_ = _trained(dp, steps=1, count=8)
    unwrapped = accelerator.unwrap_model(prepared)
    folders = [Path("saved") / name for name in ("given", "by-itself")]
    state = accelerator.get_state_dict(prepared)
    main = accelerator.is_main_process
    save = {"is_main_process": main, "save_function": accelerator.save}
    unwrapped.save_pretrained(folders[0], state_dict=state, **save)
    unwrapped.save_pretrained(folders[1], **save)
    accelerator.wait_for_everyone()
    for folder in folders:
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        for name, tensor in plain.state_dict().items():
            close(loaded.state_dict()[name], tensor)
    if not accelerator._run.is_whole_here:
        with raises(RuntimeError, "get_state_dict"):
            unwrapped.state_dict()


@case
def weights_are_read_when_the_run_begins(dp):
    samples, model, folder = Samples(8), make_model(), Path("lazy")
    plain = copy.deepcopy(model)
    reference = plain_steps(plain, sgd(plain), samples, groups_of(8, 2 * dp))
    accelerator = Accelerator()
    if accelerator.is_main_process:
        model.save_pretrained(folder)
    accelerator.wait_for_everyone()
    with lazily():
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is LlamaForCausalLM and all(p.is_meta for p in model.parameters())
    assert not any(p.is_meta for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)
    prepared, opt, loader = accelerator.prepare(model, sgd(model), loader)
    prepared.train()
    close(torch.stack(train(accelerator, prepared, opt, loader)), torch.tensor(reference))
    same_weights(accelerator, prepared, plain)


@case
def a_run_goes_on_in_the_middle_of_an_epoch(dp):
    """Shuffled anew in each pass, without a seedable sampler."""
    torch.manual_seed(3 + dist.get_rank())

    def parts():
        model = make_model()
        accelerator = Accelerator(gradient_accumulation_steps=2)
        data = DataLoader(Samples(8 * dp), batch_size=2, shuffle=True, collate_fn=collate)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = LambdaLR(optimizer, lambda step: 0.9**step)
        return accelerator, *accelerator.prepare(model, optimizer, data, schedule)

    def run(accelerator, prepared, optimizer, loader, schedule, passes, skip=0, save_at=None):
        losses = []
        for number in range(passes):
            first = skip if number == 0 else 0
            batches = accelerator.skip_first_batches(loader, first) if first else loader
            for index, batch in enumerate(batches, start=first):
                with accelerator.accumulate(prepared):
                    loss = prepared(**inputs_of(batch)).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                losses.append(float(loss.detach()))
                if save_at == (number, index):
                    accelerator.save_state("state")
        return losses

    whole = run(*parts(), passes=3, save_at=(1, 1))
    accelerator, *others = parts()
    accelerator.load_state("state")
    rest = run(accelerator, *others, passes=2, skip=2)
    close(rest, whole[-len(rest) :])
    assert len(rest) == 6


# -- refusals -------------------------------------------------------------------------------------


@case
def what_cannot_be_right_is_refused_by_name(dp):
    accelerator = Accelerator()
    with raises(ValueError, "PEFT"):
        accelerator.prepare(torch.nn.Linear(2, 2))
    changed = make_model()
    changed.model.layers[2].register_forward_hook(lambda *_: None)
    with raises(ValueError, "forward hook", "model.layers.2"):
        accelerator.prepare(changed)
    shorter = make_model()
    shorter.model.layers = shorter.model.layers[:2]
    with raises(ValueError, "not that of its config"):
        accelerator.prepare(shorter)
    model = make_model()

    class Matrixwise(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 1.0})

    with raises(ValueError, "Matrixwise", "AdamW"):
        accelerator.prepare(Matrixwise(model.parameters()))
    loader = DataLoader(Samples(8), batch_size=2, collate_fn=collate)
    prepared, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    with raises(ValueError, "second model"):
        accelerator.prepare(make_model())
    batches = iter(loader)
    batch = next(batches)
    with raises(ValueError, "inputs_embeds"):
        prepared(**inputs_of(batch), inputs_embeds=torch.zeros(2, 3, 32))
    with raises(ValueError, "output_hidden_states"):
        prepared(**inputs_of(batch), output_hidden_states=True)
    with raises(RuntimeError, "not of the last"):
        accelerator.backward(torch.zeros((), requires_grad=True))
    loss = prepared(**inputs_of(batch)).loss
    accelerator.backward(loss)
    loss = prepared(**inputs_of(batch)).loss
    with raises(RuntimeError, "gradient_accumulation_steps"):
        accelerator.backward(loss)
    optimizer.step()
    with raises(ValueError, "accelerator.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(prepared.parameters(), 1.0)
    if accelerator._these.mesh.parallel.pp == 1:
        prepared(**inputs_of(batch)).loss.detach()
        with raises(RuntimeError, "without accelerator.backward"):
            optimizer.step()
    with raises(ValueError, "norm_type"):
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0, norm_type=1)
    accelerator.backward(prepared(**inputs_of(batch)).loss)
    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
    optimizer.param_groups[0]["lr"] *= 0.5
    with raises(RuntimeError, "between clip_grad_norm_"):
        optimizer.step()


@case
def another_stage_says_so(dp):
    accelerator, prepared, *_ = _trained(dp, steps=1, count=8)
    if accelerator._these.mesh.parallel.pp == 1:
        return
    unwrapped = accelerator.unwrap_model(prepared)
    kinds = [type(layer).__name__ for layer in unwrapped.model.layers]
    elsewhere = kinds.index("Passage")
    with raises(AttributeError, "another stage"):
        unwrapped.model.layers[elsewhere].self_attn.q_proj
    with raises(RuntimeError, "stage", "prepare()"):
        unwrapped(input_ids=torch.ones(1, 3, dtype=torch.long))


def main() -> None:
    folder = Path(sys.argv[1])
    names = sys.argv[2:] or list(CASES)
    results = {}
    accelerator = Accelerator()
    dp = accelerator._these.mesh.parallel.dp
    for name in names:
        torch.manual_seed(0)
        try:
            CASES[name](dp)
        except BaseException:
            text = f"{name}, rank {dist.get_rank()}\n{traceback.format_exc()}"
            (folder / f"failed-{dist.get_rank()}.txt").write_text(text)
            print(text, file=sys.stderr, flush=True)
            raise
        results[name] = "passed"
        print(f"passed: {name}", flush=True)
    if accelerator.is_main_process:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
