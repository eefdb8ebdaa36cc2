"""The tokenizer of a run: given, trained once on the training text, or the model's own."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ds4d.config.types import ModelConfig, TokenizerConfig
from ds4d.data.cache import Cache, digest
from ds4d.data.corpus import Corpus
from ds4d.data.errors import DataError
from ds4d.data.progress import Bar
from ds4d.data.tokenise import segments
from ds4d.model.config import tokenizer_source

EOS, PAD = "<|endoftext|>", "<|pad|>"
SMALLEST_VOCAB = 256 + 2  # every byte, EOS, PAD
TRAINING_BYTES = 1 << 30  # of a larger corpus, an even sample of about this size is learned from


def get_tokenizer(
    config: TokenizerConfig,
    model: ModelConfig,
    corpus: Corpus,
    cache: Cache,
    *,
    needed: bool,
    show: bool,
) -> PreTrainedTokenizerFast | None:
    """Args:
    corpus: the training text.
    needed: False where all samples are token ids already; then None when the model has none.
    """
    if config.vocab_size is not None:
        if config.path is not None:
            raise DataError("ds4d.data.tokenizer: give path or vocab_size, not both")
        return _train_once(config.vocab_size, corpus, cache, show=show)
    if config.path is not None:
        return _load("ds4d.data.tokenizer.path", config.path)
    if model.path is not None:
        try:
            return _load("ds4d.model.path", tokenizer_source(model.path))
        except DataError:
            if needed:
                raise
    if needed:
        raise DataError(
            "ds4d.data.tokenizer: a model from scratch brings no tokenizer; set path, or "
            "vocab_size to train one on the training text"
        )
    return None


def fingerprint(tokenizer: PreTrainedTokenizerFast | None) -> dict[str, Any] | None:
    """What the ids of a text are a function of."""
    if tokenizer is None:
        return None
    return {
        "tokenizer": digest(tokenizer.backend_tokenizer.to_str()),
        "eos": tokenizer.eos_token_id,
        "tokenizers": tokenizers.__version__,
    }


def _load(key: str, name: str) -> PreTrainedTokenizerFast:
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of many kinds, where a family's own code misses its files
        raise DataError(f"{key}: no tokenizer in '{name}': {error}") from None
    if not tokenizer.is_fast:
        raise DataError(f"{key}: '{name}' has only a slow tokenizer; a tokenizer.json is needed")
    return tokenizer


def _train_once(size: int, corpus: Corpus, cache: Cache, *, show: bool) -> PreTrainedTokenizerFast:
    if corpus.config.type == "tokens":
        raise DataError(
            "ds4d.data.tokenizer.vocab_size: a tokenizer is trained on text, and the training "
            "source is of type 'tokens'; set path, or nothing"
        )
    if size < SMALLEST_VOCAB:
        raise DataError(
            f"ds4d.data.tokenizer.vocab_size: {size} is less than {SMALLEST_VOCAB} "
            f"(256 bytes, {EOS} and {PAD})"
        )
    settings = {"corpus": corpus.identity, "size": size, "tokenizers": tokenizers.__version__}

    def make(folder: Path) -> None:
        _train(size, corpus, show=show).save_pretrained(folder)

    return PreTrainedTokenizerFast.from_pretrained(
        cache.entry(f"tokenizer-{digest(settings)}", make)
    )


def _train(size: int, corpus: Corpus, *, show: bool) -> PreTrainedTokenizerFast:
    """A byte-level BPE: it has an id for every text, and decodes to exactly that text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    total_bytes = sum(path.stat().st_size for path in corpus.source.files)
    every = max(1, total_bytes // TRAINING_BYTES)
    with Bar("training the tokenizer", corpus.num_documents, show=show) as bar:
        documents = bar.track(corpus.documents(), "documents")
        texts = (segment.text for segment in islice(segments(documents), 0, None, every))
        tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS, pad_token=PAD
    )
