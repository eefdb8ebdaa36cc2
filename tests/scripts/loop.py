"""Train a causal language model on the lines of a file with a loop written by hand on Accelerate.

Its own data set, collator, learning rates and log: ``log.jsonl`` has an object an optimizer step,
whose "lr" is the one that the step took, and one an evaluation.
"""

import argparse
import json
import math
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

IGNORE = -100


class Lines(Dataset):
    """The lines of a file as token ids, each of its own length."""

    def __init__(self, path, tokenizer, max_length):
        lines = [line for line in Path(path).read_text().splitlines() if line.strip()]
        tokens = tokenizer(lines, truncation=True, max_length=max_length - 1)["input_ids"]
        self.samples = [ids + [tokenizer.eos_token_id] for ids in tokens]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return {"id": index, "tokens": self.samples[index]}


def collate(samples, pad_token_id, pad_left):
    width = max(len(sample["tokens"]) for sample in samples)

    def padded(tokens, value):
        padding = [value] * (width - len(tokens))
        return padding + tokens if pad_left else tokens + padding

    def rows(value, of=lambda tokens: tokens):
        return torch.tensor([padded(of(sample["tokens"]), value) for sample in samples])

    return {
        "id": torch.tensor([sample["id"] for sample in samples]),
        "input_ids": rows(pad_token_id),
        "attention_mask": rows(0, of=lambda tokens: [1] * len(tokens)),
        "labels": rows(IGNORE),
    }


def warmup_then_cosine(step, warmup_steps, total_steps):
    """The factor of the learning rate in a step, counted from 0."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def call(model, batch):
    return model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        labels=batch["labels"],
    )


def losses_of_samples(logits, labels):
    """Sums over the targets of each sample."""
    return F.cross_entropy(
        logits[:, :-1].float().transpose(1, 2),
        labels[:, 1:],
        ignore_index=IGNORE,
        reduction="none",
    ).sum(dim=1)


@torch.no_grad()
def evaluate(accelerator, model, loader, from_logits):
    """The mean loss of a target.

    The loss of a batch is given to its samples in proportion to their targets. Where the last
    batch was filled up with samples that came before, only ``from_logits`` is exact.
    """
    model.eval()
    ids = count = targets = 0
    total = 0.0
    for batch in loader:
        outputs = call(model, batch)
        num_targets = (batch["labels"][:, 1:] != IGNORE).sum(dim=1)
        if from_logits:
            losses = losses_of_samples(outputs.logits, batch["labels"])
        else:
            losses = outputs.loss * num_targets
        sample_ids, losses, num_targets = accelerator.gather_for_metrics(
            (batch["id"], losses, num_targets)
        )
        ids += sample_ids.sum().item()
        count += len(sample_ids)
        total += losses.double().sum().item()
        targets += num_targets.sum().item()
    model.train()
    return {"ids": ids, "count": count, "eval_loss": total / targets}


def make_optimizer(args, model):
    """Only matrices decay."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": args.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=args.lr,
        betas=(0.9, 0.95),
    )


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_length", type=int, default=32)
    parser.add_argument("--pad_left", action="store_true")
    parser.add_argument("--batch_size", type=int, default=8, help="of a process")
    parser.add_argument("--eval_batch_size", type=int, default=8, help="of a process")
    parser.add_argument("--grad_accum", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max_steps", type=int, default=None, help="stop early")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight_decay", type=float, default=0.1)
    parser.add_argument("--warmup_steps", type=int, default=2)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log_every", type=int, default=5)
    parser.add_argument("--eval_every", type=int, default=10, help="optimizer steps")
    parser.add_argument("--eval_from_logits", action="store_true")
    return parser.parse_args()


def make_loaders(args, tokenizer):
    fill_up = partial(collate, pad_token_id=tokenizer.pad_token_id, pad_left=args.pad_left)
    # A generator of its own: the order is then the same on any number of processes.
    train_loader = DataLoader(
        Lines(args.train_file, tokenizer, args.max_length),
        batch_size=args.batch_size,
        shuffle=True,
        collate_fn=fill_up,
        generator=torch.Generator().manual_seed(args.seed),
    )
    eval_loader = DataLoader(
        Lines(args.validation_file, tokenizer, args.max_length),
        batch_size=args.eval_batch_size,
        collate_fn=fill_up,
    )
    return train_loader, eval_loader


class Log:
    """Lines of JSON by the main process, and on the screen a running average of the loss."""

    def __init__(self, accelerator, folder, every):
        self.accelerator = accelerator
        self.file = folder / "log.jsonl"
        self.every = every
        self.average = None
        if accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            self.file.write_text("")

    def write(self, entry):
        if self.accelerator.is_main_process:
            with self.file.open("a") as file:
                file.write(json.dumps(entry) + "\n")

    def step(self, entry):
        self.write(entry)
        loss = entry["loss"]
        self.average = loss if self.average is None else 0.9 * self.average + 0.1 * loss
        if entry["step"] % self.every == 0:
            self.accelerator.print(f"step {entry['step']}: loss {self.average:.4f}")


def train(args, accelerator, model, optimizer, schedule, train_loader, eval_loader):
    log = Log(accelerator, Path(args.output_dir), args.log_every)

    def evaluation():
        log.write(evaluate(accelerator, model, eval_loader, args.eval_from_logits))

    step = 0
    losses = []
    model.train()
    for _ in range(args.epochs):
        for batch in train_loader:
            with accelerator.accumulate(model):
                loss = call(model, batch).loss
                losses.append(accelerator.gather(loss.detach()).mean())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), args.clip)
                lr = optimizer.param_groups[0]["lr"]
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            schedule.step()
            step += 1
            mean = torch.stack(losses).mean().item()
            norm = None if norm is None else float(norm)
            log.step({"step": step, "loss": mean, "lr": lr, "grad_norm": norm})
            losses = []
            if step % args.eval_every == 0:
                evaluation()
            if step == args.max_steps:
                break
        if step == args.max_steps:
            break
    if step % args.eval_every != 0:
        evaluation()


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.grad_accum)
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
    train_loader, eval_loader = make_loaders(args, tokenizer)
    optimizer = make_optimizer(args, model)

    samples_of_step = args.batch_size * accelerator.num_processes * args.grad_accum
    total_steps = args.epochs * math.ceil(len(train_loader.dataset) / samples_of_step)
    factor = partial(warmup_then_cosine, warmup_steps=args.warmup_steps, total_steps=total_steps)
    # Counted in optimizer steps, so it isn't prepared: then it would step once for every process.
    schedule = LambdaLR(optimizer, factor)

    model, optimizer, train_loader, eval_loader = accelerator.prepare(
        model, optimizer, train_loader, eval_loader
    )
    train(args, accelerator, model, optimizer, schedule, train_loader, eval_loader)

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.output_dir)
    accelerator.end_training()


if __name__ == "__main__":
    main()
