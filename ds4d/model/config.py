"""The Hugging Face config of the model in the file, and the folder its weights are in.

transformers keeps config fields that it does not know without a word; here they are errors, for a
misspelt ``hidden_size`` would train another model than the one asked for.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ds4d.checkpoint.errors import CheckpointError
from ds4d.checkpoint.find import locate
from ds4d.checkpoint.folder import is_checkpoint, read_manifest, tokenizer_folder
from ds4d.config.model_facts import field
from ds4d.config.types import ModelConfig
from ds4d.router_trial import why_not_balanced
from ds4d.run_lock import FolderInUse, refuse_locked

# Kept by save_pretrained in every config.json; they say nothing about the model's shape.
BOOKKEEPING = ("model_type", "auto_map", "_name_or_path", "_attn_implementation_autoset")
_LOOKS_AHEAD = "is not causal: it sees later tokens"
_DRAFTS = "drafts for another model, whose keys and values it needs"
# Types whose loss on a row of tokens no other process would have.
NOT_TRAINED = {
    "xlnet": _LOOKS_AHEAD,  # trained by permutation
    "xlm": _LOOKS_AHEAD,
    "cpmant": _LOOKS_AHEAD,
    "gemma4_assistant": _DRAFTS,
    "gemma4_unified_assistant": _DRAFTS,
    "prophetnet": "gives a token other logits where more tokens follow, padding too",
    "reformer": "looks at keys that it draws at random, anew in each pass",
}
_EXAMPLES = re.compile(r"^ *>>> .*$", re.MULTILINE)  # in docstrings: no code of the model
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def hf_config(
    model: ModelConfig,
    *,
    vocab_size: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> PreTrainedConfig:
    """The transformers config of ``model``.

    Args:
        vocab_size: what "auto" in ``model.config`` stands for.
        tokenizer: gives a from-scratch model the special token ids that its config leaves out, so
            that generation stops where training texts did.

    Raises:
        ValueError: whatever a user can get wrong about it, each with its dotted key.
    """
    if model.path is not None:
        return _from_path(model.path)
    fields = dict(model.config)
    if fields.get("vocab_size") == "auto":
        if vocab_size is None:
            raise ValueError(
                'ds4d.model.config.vocab_size: "auto" is the size of the tokenizer, and this data '
                "has none; give the number"
            )
        fields["vocab_size"] = vocab_size
    config = _from_fields(fields)
    unknown = list(_unknown_fields("ds4d.model.config", fields, config))
    if unknown:
        raise ValueError("\n".join(unknown))
    if tokenizer is not None:
        tokens = {name: getattr(tokenizer, name) for name in SPECIAL_TOKENS}
        if tokens["pad_token_id"] == tokens["eos_token_id"]:
            tokens["pad_token_id"] = None  # the embedding of padding is never trained
        config = _from_fields({**tokens, **fields})
    return config


def why_not_trainable(config: PreTrainedConfig) -> str | None:
    """Why no causal language model can be made of this config; None: it can. Builds it on meta,
    which takes no memory; a small one where its routers' loss is asked for."""
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    source = _EXAMPLES.sub("", inspect.getsource(sys.modules[cls.__module__]))
    if "config.is_decoder" in source and "config.is_decoder = True" not in source:
        if not getattr(config, "is_decoder", True):
            return f"{config.model_type} sees later tokens unless is_decoder is true; set it"
    if config.model_type == "big_bird" and config.attention_type == "block_sparse":
        return 'attention_type: "block_sparse" sees later tokens; set "original_full"'
    if config.model_type in NOT_TRAINED:
        return f"{config.model_type} {NOT_TRAINED[config.model_type]}"
    try:
        text = config.get_text_config()
    except ValueError:  # of several models
        return f"{config.model_type} has several text models, and no one of them is meant"
    if field(text, "use_bidirectional_attention") is True:
        return "use_bidirectional_attention: true sees later tokens; set it to false"
    for name in ("layerdrop", "decoder_layerdrop"):
        if getattr(config, name, 0):
            return f"{name}: ranks would leave out different layers and wait for each other; set 0"
    heads, kv_heads = (
        field(config, name) for name in ("num_attention_heads", "num_key_value_heads")
    )
    if isinstance(heads, int) and isinstance(kv_heads, int) and kv_heads and heads % kv_heads:
        return f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
    try:
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(deepcopy(config))
    except Exception as error:  # whatever a field has led the model's code to
        return f"transformers cannot build this {config.model_type}: {_one_line(error)}"
    return why_not_balanced(config)


def model_folder(path: str) -> Path:
    """The local folder of ``ds4d.model.path``, with a ``config.json`` or a ds4d checkpoint: of a run
    folder its newest. A hub id is downloaded (once a host).

    Raises:
        ValueError: there is no such folder, and no such model can be had from the hub.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _local(folder)
    try:
        patterns = ["*.json", "model*.safetensors", "*.model", "*.txt", "*.jinja"]
        return Path(snapshot_download(path, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise _not_found(path, error) from error


def _local(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    try:
        if not is_checkpoint(folder):
            refuse_locked(folder)  # else ranks might each find another one the newest
        return locate(folder)
    except FolderInUse as error:
        raise ValueError(f"ds4d.model.path: {error}, or one of its checkpoints") from None
    except CheckpointError as error:
        raise ValueError(
            f"ds4d.model.path: {folder} has no config.json, so it is no Hugging Face folder, nor is "
            f"it a checkpoint or run folder of ds4d: {error}"
        ) from None


def tokenizer_source(path: str) -> str:
    """Where the tokenizer of ``ds4d.model.path`` is, in transformers' words."""
    folder = Path(path).expanduser()
    if not folder.is_dir() or (folder / "config.json").is_file():
        return path
    return str(tokenizer_folder(_local(folder)))


def _from_path(path: str) -> PreTrainedConfig:
    folder = Path(path).expanduser()
    local = folder.is_dir()
    if local and not (folder := _local(folder)).joinpath("config.json").is_file():
        return AutoConfig.for_model(**read_manifest(folder).extra["hf_config"])
    try:
        config = AutoConfig.from_pretrained(
            folder if local else path, local_files_only=local, trust_remote_code=False
        )
    except StrictDataclassError as error:
        raise ValueError(f"ds4d.model.path: {path}/config.json: {_one_line(error)}") from error
    except (OSError, ValueError, KeyError) as error:
        if not local:
            raise _not_found(path, error) from error
        raise ValueError(
            f"ds4d.model.path: {folder}/config.json is no config that transformers reads (code in "
            f"model folders is not run): {_one_line(error)}"
        ) from error
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"ds4d.model.path: the weights in {path} are quantized (quantization_config in its "
            "config.json), and training needs the full ones; dequantize and save them first"
        )
    return config


def _not_found(path: str, error: Exception) -> ValueError:
    return ValueError(
        f"ds4d.model.path: {path!r} is no folder here ({Path(path).expanduser().absolute()}), and "
        f"no model of that id could be had from the hub: {_one_line(error)}"
    )


def _from_fields(fields: Mapping[str, Any]) -> PreTrainedConfig:
    model_type = fields.get("model_type")
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        known = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        raise ValueError(
            f"ds4d.model.config.model_type: {model_type!r} is no causal language model of "
            f"transformers{_nearest(str(model_type), known) or '. Known: ' + ', '.join(known)}"
        )
    try:
        return CONFIG_MAPPING[model_type](
            **{name: value for name, value in fields.items() if name not in BOOKKEEPING}
        )
    except StrictDataclassError as error:
        raise ValueError(f"ds4d.model.config: {_one_line(error)}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"ds4d.model.config: {model_type}: {_one_line(error)}") from error


def _unknown_fields(
    path: str, fields: Mapping[str, Any], config: PreTrainedConfig
) -> Iterator[str]:
    """A field is unknown when it has no effect: the config does not declare it and kept it all the
    same, and the model's code does not read it.

    Older spellings (``rope_theta``) are not declared either but are turned into what is; a few
    fields (``head_dim`` of qwen3_moe) are only read.
    """
    declared = {field.name for field in dataclasses.fields(config)} | set(config.attribute_map)
    for name, value in fields.items():
        if name in config.sub_configs and isinstance(value, Mapping):
            yield from _unknown_fields(f"{path}.{name}", value, getattr(config, name))
        elif (
            name not in declared
            and name not in BOOKKEEPING
            and name in vars(config)
            and not _is_read(name, config)
        ):
            close = _nearest(name, sorted(declared))
            yield f"{path}.{name}: {config.model_type} has no such field{close}"


def _is_read(name: str, config: PreTrainedConfig) -> bool:
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is None:
        return False
    modules = {base.__module__ for base in model.__mro__ if issubclass(base, PreTrainedModel)}
    reads = re.compile(rf"\bconfig\.{name}\b|attr\([^()]*config, \"{name}\"")
    return any(reads.search(inspect.getsource(sys.modules[module])) for module in modules)


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
