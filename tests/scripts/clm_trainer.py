"""Train a causal language model on text files with transformers' Trainer.

As users write it after transformers' ``run_clm.py``. Besides what the Trainer writes there is
``log.json``: the Trainer's ``log_history``.
"""

import json
import logging
import math
import os
import sys
from dataclasses import dataclass, field
from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    """Which model and tokenizer."""

    model_name_or_path: str = field(metadata={"help": "A folder, or a name of the Hub."})
    config_name: str | None = field(default=None, metadata={"help": "If not the model's."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "If not the model's."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where downloads are kept."})


@dataclass
class DataTrainingArguments:
    """Which texts, and how they become samples."""

    train_file: str | None = field(default=None, metadata={"help": "A text file."})
    validation_file: str | None = field(default=None, metadata={"help": "A text file."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Use the first ones."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Use the first ones."})
    block_size: int | None = field(default=None, metadata={"help": "Tokens of a sample."})
    preprocessing_num_workers: int | None = field(default=None)
    keep_linebreaks: bool = field(default=True)
    eval_accuracy: bool = field(
        default=True, metadata={"help": "Of next tokens: takes the logits of all samples."}
    )

    def __post_init__(self):
        for file in (self.train_file, self.validation_file):
            if file is not None and not file.endswith(".txt"):
                raise ValueError(f"{file} should be a txt file.")


def parse_arguments():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        return parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))
    return parser.parse_args_into_dataclasses()


def set_up_logging(training_args):
    logging.basicConfig(
        format="%(asctime)s - %(levelname)s - %(name)s - %(message)s",
        handlers=[logging.StreamHandler(sys.stdout)],
    )
    logger.setLevel(training_args.get_process_log_level())
    logger.warning(
        f"Process rank: {training_args.local_process_index}, device: {training_args.device}, "
        f"distributed training: {training_args.parallel_mode.value == 'distributed'}"
    )
    logger.info(f"Training/evaluation parameters {training_args}")


def load_model(model_args):
    cache = {"cache_dir": model_args.cache_dir}
    name = model_args.model_name_or_path
    config = AutoConfig.from_pretrained(model_args.config_name or name, **cache)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or name, **cache)
    model = AutoModelForCausalLM.from_pretrained(name, config=config, **cache)
    embedding_size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embedding_size:
        model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


def load_blocks(model_args, data_args, training_args, tokenizer):
    """The texts of each file, end to end, in samples of block_size tokens."""
    files = {"train": data_args.train_file, "validation": data_args.validation_file}
    raw_datasets = load_dataset(
        "text",
        data_files={split: file for split, file in files.items() if file is not None},
        cache_dir=model_args.cache_dir,
        keep_linebreaks=data_args.keep_linebreaks,
    )
    column_names = raw_datasets["train" if training_args.do_train else "validation"].column_names
    block_size = min(data_args.block_size or 1024, tokenizer.model_max_length)

    def tokenize_function(examples):
        return tokenizer(examples["text"])

    def group_texts(examples):
        joined = {key: list(chain(*rows)) for key, rows in examples.items()}
        total_length = len(joined["input_ids"]) // block_size * block_size  # the rest is dropped
        if total_length == 0:
            raise ValueError(f"block_size of {block_size} is too big for the texts")
        result = {
            key: [tokens[i : i + block_size] for i in range(0, total_length, block_size)]
            for key, tokens in joined.items()
        }
        result["labels"] = result["input_ids"].copy()
        return result

    with training_args.main_process_first(desc="dataset map tokenization"):
        tokenized_datasets = raw_datasets.map(
            tokenize_function,
            batched=True,
            num_proc=data_args.preprocessing_num_workers,
            remove_columns=column_names,
            desc="Running tokenizer on dataset",
        )
    with training_args.main_process_first(desc="grouping texts together"):
        return tokenized_datasets.map(
            group_texts,
            batched=True,
            num_proc=data_args.preprocessing_num_workers,
            desc=f"Grouping texts in chunks of {block_size}",
        )


def first_samples(lm_datasets, split, wanted, limit):
    if not wanted:
        return None
    if split not in lm_datasets:
        raise ValueError(f"--do_{'train' if split == 'train' else 'eval'} requires --{split}_file")
    dataset = lm_datasets[split]
    return dataset if limit is None else dataset.select(range(min(len(dataset), limit)))


def preprocess_logits_for_metrics(logits, labels):
    if isinstance(logits, tuple):  # a cache may come after them
        logits = logits[0]
    return logits.argmax(dim=-1)


def compute_metrics(eval_preds):
    preds, labels = eval_preds
    preds, labels = preds[:, :-1].reshape(-1), labels[:, 1:].reshape(-1)
    return {"accuracy": float((preds == labels).mean())}


def train(trainer, checkpoint):
    train_result = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()  # the tokenizer too

    metrics = train_result.metrics
    metrics["train_samples"] = len(trainer.train_dataset)
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()


def evaluate(trainer):
    logger.info("*** Evaluate ***")
    metrics = trainer.evaluate()
    metrics["eval_samples"] = len(trainer.eval_dataset)
    try:
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
    except OverflowError:
        metrics["perplexity"] = float("inf")
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


def main():
    model_args, data_args, training_args = parse_arguments()
    set_up_logging(training_args)
    set_seed(training_args.seed)

    model, tokenizer = load_model(model_args)
    lm_datasets = load_blocks(model_args, data_args, training_args, tokenizer)
    train_dataset = first_samples(
        lm_datasets, "train", training_args.do_train, data_args.max_train_samples
    )
    eval_dataset = first_samples(
        lm_datasets, "validation", training_args.do_eval, data_args.max_eval_samples
    )

    accuracy = training_args.do_eval and data_args.eval_accuracy
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics if accuracy else None,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics if accuracy else None,
    )
    if training_args.do_train:
        train(trainer, training_args.resume_from_checkpoint)
    if training_args.do_eval:
        evaluate(trainer)
    if trainer.is_world_process_zero():
        with open(os.path.join(training_args.output_dir, "log.json"), "w") as log:
            json.dump(trainer.state.log_history, log, indent=2)


if __name__ == "__main__":
    main()
