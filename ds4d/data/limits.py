"""What the model allows the data: the ids and the positions that it has embeddings for."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from ds4d.config.model_facts import ModelFacts
from ds4d.config.types import RunConfig
from ds4d.data.errors import DataError
from ds4d.model.config import hf_config


def vocab_size(run: RunConfig, tokenizer: PreTrainedTokenizerFast | None) -> int:
    """Rows of the model's embedding table; ``"auto"`` takes the tokenizer's.

    Raises:
        DataError: the tokenizer has ids that the table has no row for, or a sample has positions
            that the model has not (``check`` says so too, where it can read the model's config).
    """
    tokens = None if tokenizer is None else len(tokenizer)
    model = ModelFacts(config=hf_config(run.model, vocab_size=tokens))
    size, positions = model.get("vocab_size"), model.max_positions
    if tokens is not None and tokens > size:
        raise DataError(
            f"ds4d.data.tokenizer: has {tokens:,} tokens, more than the {size:,} that the model "
            f"has embeddings for (vocab_size); use the model's own tokenizer, or for a model from "
            f"scratch set ds4d.model.config.vocab_size to 'auto'"
        )
    if positions is not None and run.data.seq_len > positions:
        raise DataError(
            f"ds4d.data.seq_len: {run.data.seq_len:,} is more than the {positions:,} positions of "
            f"the model (max_position_embeddings); lower it, or raise the model's"
        )
    return size
