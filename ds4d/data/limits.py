"""What the model allows the data: the ids and the positions that it has embeddings for."""

from __future__ import annotations

from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerFast

from ds4d.config.types import ModelConfig, RunConfig
from ds4d.data.errors import DataError


def vocab_size(run: RunConfig, tokenizer: PreTrainedTokenizerFast | None) -> int:
    """Rows of the model's embedding table; ``"auto"`` takes the tokenizer's.

    Raises:
        DataError: the tokenizer has ids that the table has no row for.
    """
    if (run.model.config or {}).get("vocab_size") == "auto":
        if tokenizer is None:
            raise DataError("ds4d.model.config.vocab_size: 'auto' needs a tokenizer; give a number")
        return len(tokenizer)
    size = _text_config(run.model).vocab_size
    if tokenizer is not None and len(tokenizer) > size:
        raise DataError(
            f"ds4d.data.tokenizer: has {len(tokenizer):,} tokens, more than the {size:,} that the "
            f"model has embeddings for (vocab_size); use the model's own tokenizer, or for a model "
            f"from scratch set ds4d.model.config.vocab_size to 'auto'"
        )
    return size


def check_positions(run: RunConfig) -> None:
    """Samples must not be longer than the model's last position."""
    positions = getattr(_text_config(run.model), "max_position_embeddings", None)
    if positions and run.data.seq_len > positions:
        raise DataError(
            f"ds4d.data.seq_len: {run.data.seq_len:,} is more than the {positions:,} positions of "
            f"the model (max_position_embeddings); lower it, or raise the model's"
        )


def _text_config(model: ModelConfig) -> PretrainedConfig:
    try:
        if model.path is not None:
            return AutoConfig.from_pretrained(model.path).get_text_config()
        fields = {name: value for name, value in model.config.items() if value != "auto"}
        return AutoConfig.for_model(**fields).get_text_config()
    except (OSError, ValueError) as error:
        raise DataError(f"ds4d.model: {error}") from None
