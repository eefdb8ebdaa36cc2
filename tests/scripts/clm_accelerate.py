"""Train a causal language model on text files with Accelerate, without a Trainer.

As users write it after transformers' ``run_clm_no_trainer.py``, DeepSpeed's optimizer and scheduler
included. Besides checkpoints and the model it writes ``log.jsonl``: an object an optimizer step,
whose "lr" is the scheduler's after the step, and one an evaluation.
"""

import argparse
import json
import logging
import math
import os
from itertools import chain

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import DataLoaderConfiguration, DummyOptim, DummyScheduler, set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    SchedulerType,
    default_data_collator,
    get_scheduler,
)

logger = get_logger(__name__)


def parse_args():
    parser = argparse.ArgumentParser(description="Finetune a causal language model on text files")
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--train_file", required=True, help="A text file.")
    parser.add_argument("--validation_file", required=True, help="A text file.")
    parser.add_argument("--cache_dir", default=None, help="Where datasets are cached.")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--block_size", type=int, default=None, help="Tokens of a sample.")
    parser.add_argument("--no_keep_linebreaks", action="store_true")
    parser.add_argument("--preprocessing_num_workers", type=int, default=None)
    parser.add_argument("--max_eval_samples", type=int, default=None)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--max_train_steps", type=int, default=None, help="Instead of epochs.")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--lr_scheduler_type", type=SchedulerType, default="linear")
    parser.add_argument("--num_warmup_steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument(
        "--use_seedable_sampler",
        action="store_true",
        help="The same order of samples on any number of processes and after resuming.",
    )
    parser.add_argument(
        "--checkpointing_steps", default=None, help="A number of steps, or 'epoch' for each epoch."
    )
    parser.add_argument(
        "--resume_from_checkpoint", default=None, help="A step_N or epoch_N folder."
    )
    parser.add_argument("--with_tracking", action="store_true")
    parser.add_argument("--report_to", default="all", help="Only with --with_tracking.")
    return parser.parse_args()


def make_accelerator(args):
    tracking = {"log_with": args.report_to, "project_dir": args.output_dir}
    return Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=args.use_seedable_sampler),
        **(tracking if args.with_tracking else {}),
    )


def set_up_folder_and_logging(args, accelerator):
    logging.basicConfig(
        format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", level=logging.INFO
    )
    logger.info(accelerator.state, main_process_only=False)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
        if not args.resume_from_checkpoint:
            open(os.path.join(args.output_dir, "log.jsonl"), "w").close()
    accelerator.wait_for_everyone()


def write_log(args, accelerator, entry):
    if accelerator.is_main_process:
        with open(os.path.join(args.output_dir, "log.jsonl"), "a") as log:
            log.write(json.dumps(entry) + "\n")


def load_model(args):
    config = AutoConfig.from_pretrained(args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, config=config)
    # Only where needed: a vocabulary that is larger than the tokenizer's, padded say, is kept.
    embedding_size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embedding_size:
        model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


def load_blocks(args, accelerator, tokenizer):
    """The texts of both files, end to end, in samples of block_size tokens."""
    raw_datasets = load_dataset(
        "text",
        data_files={"train": args.train_file, "validation": args.validation_file},
        cache_dir=args.cache_dir,
        keep_linebreaks=not args.no_keep_linebreaks,
    )
    block_size = min(args.block_size or 1024, tokenizer.model_max_length)

    def tokenize_function(examples):
        return tokenizer(examples["text"])

    def group_texts(examples):
        joined = {key: list(chain(*rows)) for key, rows in examples.items()}
        total_length = len(joined["input_ids"]) // block_size * block_size  # the rest is dropped
        result = {
            key: [tokens[i : i + block_size] for i in range(0, total_length, block_size)]
            for key, tokens in joined.items()
        }
        result["labels"] = result["input_ids"].copy()
        return result

    with accelerator.main_process_first():
        tokenized_datasets = raw_datasets.map(
            tokenize_function,
            batched=True,
            num_proc=args.preprocessing_num_workers,
            remove_columns=raw_datasets["train"].column_names,
            desc="Running tokenizer on dataset",
        )
        lm_datasets = tokenized_datasets.map(
            group_texts,
            batched=True,
            num_proc=args.preprocessing_num_workers,
            desc=f"Grouping texts in chunks of {block_size}",
        )
    train_dataset, eval_dataset = lm_datasets["train"], lm_datasets["validation"]
    if args.max_eval_samples is not None:
        eval_dataset = eval_dataset.select(range(min(len(eval_dataset), args.max_eval_samples)))
    return train_dataset, eval_dataset


def in_deepspeed_config(accelerator, key):
    plugin = accelerator.state.deepspeed_plugin
    return plugin is not None and key in plugin.deepspeed_config


def make_optimizer(args, accelerator, model):
    """The second group is empty for models that have no bias and call their norms otherwise."""
    no_decay = ["bias", "LayerNorm.weight"]
    optimizer_grouped_parameters = [
        {
            "params": [
                p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)
            ],
            "weight_decay": args.weight_decay,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer_cls = (
        DummyOptim if in_deepspeed_config(accelerator, "optimizer") else torch.optim.AdamW
    )
    return optimizer_cls(optimizer_grouped_parameters, lr=args.learning_rate)


def make_scheduler(args, accelerator, optimizer, num_training_steps):
    """
    Args:
        num_training_steps: the optimizer's times the number of processes, since a prepared
            scheduler makes a step for each of them. Accelerate divides that of a DummyScheduler,
            but not its warm-up.
    """
    if in_deepspeed_config(accelerator, "scheduler"):
        return DummyScheduler(
            optimizer,
            total_num_steps=num_training_steps,
            warmup_num_steps=args.num_warmup_steps,
        )
    return get_scheduler(
        name=args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps * accelerator.num_processes,
        num_training_steps=num_training_steps,
    )


def evaluate(args, accelerator, model, eval_dataloader):
    model.eval()
    losses = []
    for batch in eval_dataloader:
        with torch.no_grad():
            outputs = model(**batch)
        loss = outputs.loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(args.per_device_eval_batch_size)))
    eval_loss = torch.mean(torch.cat(losses)).item()
    try:
        perplexity = math.exp(eval_loss)
    except OverflowError:
        perplexity = float("inf")
    return eval_loss, perplexity


def resume(args, accelerator, num_update_steps_per_epoch):
    """
    Returns:
        The epoch to go on in, the micro-batches of it that are done, and the steps done.
    """
    accelerator.print(f"Resumed from checkpoint: {args.resume_from_checkpoint}")
    accelerator.load_state(args.resume_from_checkpoint)
    kind, number = os.path.basename(os.path.normpath(args.resume_from_checkpoint)).split("_")
    if kind == "epoch":
        starting_epoch = int(number) + 1
        return starting_epoch, 0, starting_epoch * num_update_steps_per_epoch
    completed_steps = int(number)
    starting_epoch, steps = divmod(completed_steps, num_update_steps_per_epoch)
    return starting_epoch, steps * accelerator.gradient_accumulation_steps, completed_steps


def train_epoch(
    args, accelerator, model, optimizer, lr_scheduler, dataloader, completed_steps, progress_bar
):
    """
    Returns:
        The steps done, those of earlier epochs among them.
    """
    model.train()
    losses = []
    for batch in dataloader:
        grad_norm = None
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            losses.append(accelerator.gather(loss.detach()).mean())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue

        progress_bar.update(1)
        completed_steps += 1
        entry = {
            "step": completed_steps,
            "loss": torch.stack(losses).mean().item(),
            "lr": lr_scheduler.get_last_lr()[0],
            "grad_norm": None if grad_norm is None else float(grad_norm),
        }
        write_log(args, accelerator, entry)
        losses = []
        steps = args.checkpointing_steps
        if steps is not None and steps.isdigit() and completed_steps % int(steps) == 0:
            accelerator.save_state(os.path.join(args.output_dir, f"step_{completed_steps}"))
        if args.with_tracking:
            accelerator.log({"train_loss": entry["loss"]}, step=completed_steps)
        if completed_steps >= args.max_train_steps:
            break
    return completed_steps


def train(args, accelerator, model, optimizer, lr_scheduler, train_dataloader, eval_dataloader):
    accumulation = accelerator.gradient_accumulation_steps
    total_batch_size = args.per_device_train_batch_size * accelerator.num_processes * accumulation
    logger.info("***** Running training *****")
    logger.info(f"  Num Epochs = {args.num_train_epochs}")
    logger.info(f"  Total train batch size = {total_batch_size}")
    logger.info(f"  Total optimization steps = {args.max_train_steps}")
    progress_bar = tqdm(range(args.max_train_steps), disable=not accelerator.is_local_main_process)
    starting_epoch = done_batches = completed_steps = 0
    if args.resume_from_checkpoint:
        starting_epoch, done_batches, completed_steps = resume(
            args, accelerator, math.ceil(len(train_dataloader) / accumulation)
        )
        progress_bar.update(completed_steps)

    for epoch in range(starting_epoch, args.num_train_epochs):
        train_dataloader.set_epoch(epoch)
        active_dataloader = train_dataloader
        if epoch == starting_epoch and done_batches:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, done_batches)
        completed_steps = train_epoch(
            args, accelerator, model, optimizer, lr_scheduler, active_dataloader, completed_steps,
            progress_bar,
        )  # fmt: skip
        eval_loss, perplexity = evaluate(args, accelerator, model, eval_dataloader)
        logger.info(f"epoch {epoch}: perplexity: {perplexity} eval_loss: {eval_loss}")
        write_log(args, accelerator, {"eval_loss": eval_loss})
        if args.with_tracking:
            accelerator.log({"perplexity": perplexity, "eval_loss": eval_loss}, completed_steps)
        if args.checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))


def save(args, accelerator, model, tokenizer):
    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(
        args.output_dir,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.output_dir)


def main():
    args = parse_args()
    accelerator = make_accelerator(args)
    set_up_folder_and_logging(args, accelerator)
    if args.seed is not None:
        set_seed(args.seed)

    model, tokenizer = load_model(args)
    train_dataset, eval_dataset = load_blocks(args, accelerator, tokenizer)
    train_dataloader = DataLoader(
        train_dataset,
        shuffle=True,
        collate_fn=default_data_collator,
        batch_size=args.per_device_train_batch_size,
    )
    eval_dataloader = DataLoader(
        eval_dataset,
        collate_fn=default_data_collator,
        batch_size=args.per_device_eval_batch_size,
    )

    optimizer = make_optimizer(args, accelerator, model)
    accumulation = accelerator.gradient_accumulation_steps
    if args.max_train_steps is None:
        # The length is that of all processes here: what the scheduler needs, not the loop.
        updates_per_epoch = math.ceil(len(train_dataloader) / accumulation)
        num_training_steps = args.num_train_epochs * updates_per_epoch
    else:
        num_training_steps = args.max_train_steps * accelerator.num_processes
    lr_scheduler = make_scheduler(args, accelerator, optimizer, num_training_steps)

    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    # Now it is that of this process.
    updates_per_epoch = math.ceil(len(train_dataloader) / accumulation)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * updates_per_epoch
    args.num_train_epochs = math.ceil(args.max_train_steps / updates_per_epoch)

    if args.with_tracking:
        experiment_config = vars(args) | {"lr_scheduler_type": str(args.lr_scheduler_type)}
        accelerator.init_trackers("clm_no_trainer", experiment_config)
    train(args, accelerator, model, optimizer, lr_scheduler, train_dataloader, eval_dataloader)
    if args.with_tracking:
        accelerator.end_training()
    save(args, accelerator, model, tokenizer)


if __name__ == "__main__":
    main()
