"""What all cases use: a tiny Llama, samples of different lengths, plain steps on them."""

from __future__ import annotations

import contextlib
import copy

import torch
import torch.nn.functional as F
from deepspeed.runtime.lr_schedules import WarmupDecayLR
from torch.utils.data import DataLoader
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)

from ds4d.accelerate import Accelerator

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


def trained(dp, *, steps, left=False, count=24, batch=2, optimizer=sgd, **options):
    samples, model = Samples(count), make_model()
    plain = copy.deepcopy(model)
    size = batch * dp
    reference = plain_steps(plain, optimizer(plain), samples, groups_of(count, size * steps))
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    loader = DataLoader(samples, batch_size=batch, collate_fn=lambda s: collate(s, left))
    prepared, opt, loader = accelerator.prepare(model, optimizer(model), loader)
    losses = train(accelerator, prepared, opt, loader, **options)
    return accelerator, prepared, plain, losses, reference


def rates_of_deepspeed(params, *, steps):
    optimizer, rates = sgd(make_model()), []
    schedule = WarmupDecayLR(optimizer, **params)
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        schedule.step()
    assert max(rates) == params["warmup_max_lr"]
    return rates
