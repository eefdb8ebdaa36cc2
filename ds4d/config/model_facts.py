"""What can be known of the model without building it or asking the network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ds4d.config.errors import Problem, nearest
from ds4d.config.types import ModelConfig

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
PATH_KEY = "ds4d.model.path"
SOME_SIZE = 2**20  # of a vocabulary, where "auto" is settled when the tokenizer is there


@dataclass(frozen=True)
class ModelFacts:
    """Attributes:
    config: the transformers config, None where it cannot be had here (a hub id not yet fetched).
    problems: what is wrong with what the file says about the model.
    vocabulary_is_guessed: its size is that of a tokenizer that is not here yet.
    """

    config: Any = None
    problems: tuple[Problem, ...] = ()
    vocabulary_is_guessed: bool = False

    def get(self, name: str) -> Any:
        """A field of the (text) config, by transformers' common name; None where absent."""
        return None if self.config is None else field(_text_config(self.config), name)

    @property
    def max_positions(self) -> int | None:
        """Tokens that a sample may have: by learned positions, or by what rope was made for."""
        positions = self.get("max_position_embeddings")
        if not isinstance(positions, int) or positions <= 0:
            return None
        rope = self.get("rope_parameters") or {}
        original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
        return max(positions, int(original * factor)) if original and factor else positions

    @property
    def positions(self) -> int | None:
        """Rows of a table of learned positions; None: there is none, or it is not known yet."""
        return None if self.get("rope_parameters") else self.max_positions

    @property
    def why_not_packed(self) -> str | None:
        """Why several documents in a sequence can't be kept apart; None: they can."""
        if self.config is None:
            return None
        from ds4d.attention import supports

        return supports(self.config, documents=True)

    def why_not_cut(self, tp: int, *, sequence_parallel: bool) -> str | None:
        """Why the model can't be cut over tp ranks; None: it can, or it is not known yet."""
        if self.config is None or self.problems:
            return None
        from ds4d.tensor_parallel.check import why_not_cut

        return why_not_cut(self.config, tp, sequence_parallel=sequence_parallel)

    def why_not_staged(self) -> str | None:
        """Why the model can't be cut into pipeline stages; None as in ``why_not_cut``."""
        if self.config is None or self.problems:
            return None
        from ds4d.pipeline.check import why_not_staged

        return why_not_staged(self.config)

    def why_not_shared(self) -> str | None:
        """Why a sequence of the model can't be shared by ranks; None as in ``why_not_cut``."""
        if self.config is None or self.problems:
            return None
        from ds4d.attention.trial import why_not_shared

        return why_not_shared(self.config)


def look_up(model: Mapping[str, Any], *, tokenizer_size: int | None = None) -> ModelFacts:
    """Facts about ``ds4d.model``, its form checked.

    Args:
        tokenizer_size: of the tokenizer that the run trains.
    """
    path, config = model.get("path"), model.get("config")
    if path is None:
        if config is None:
            return ModelFacts()
        facts = _ask_transformers(ModelConfig(config=config), tokenizer_size or SOME_SIZE)
        guessed = config.get("vocab_size") == "auto" and tokenizer_size is None
        return replace(facts, vocabulary_is_guessed=guessed)
    if Path(path).expanduser().is_dir():
        return _ask_transformers(ModelConfig(path=path))
    if not HUB_ID.fullmatch(path):
        problem = Problem(PATH_KEY, f"{path!r} is neither a folder here nor a hub id (owner/name)")
        return ModelFacts(problems=(problem,))
    if cached := _in_hub_cache(path):
        return _ask_transformers(ModelConfig(path=str(cached)))
    return ModelFacts()


def _in_hub_cache(hub_id: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(hub_id, "config.json")
    return Path(file).parent if isinstance(file, str) else None


def _ask_transformers(model: ModelConfig, vocab_size: int | None = None) -> ModelFacts:
    # transformers takes seconds to import, and only these checks need it
    from ds4d.model.config import hf_config, why_not_trainable

    try:
        config = hf_config(model, vocab_size=vocab_size)
    except ValueError as error:
        return ModelFacts(problems=tuple(map(_problem, str(error).splitlines())))
    problems = _not_causal(config.model_type)
    if not problems and (reason := why_not_trainable(config)):
        problems = [Problem(PATH_KEY if model.path else "ds4d.model.config", reason)]
    return ModelFacts(config, tuple(problems))


def _problem(line: str) -> Problem:
    path, _, message = line.partition(": ")
    return Problem(path, message)


def _not_causal(model_type: str) -> list[Problem]:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN,
    )

    if model_type in KNOWN:
        return []
    near = nearest(model_type, KNOWN)
    hint = f"; did you mean {near}?" if near else ""
    message = f"{model_type} is not a causal language model of transformers{hint}"
    return [Problem(PATH_KEY, message)]


def field(config: Any, name: str) -> Any:
    """Of a transformers config; None where it is absent, or differs from layer to layer."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers' own, for what has no one value
        return None


def _text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True)
