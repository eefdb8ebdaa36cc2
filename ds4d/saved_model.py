"""A trained model from the disk: an exported Hugging Face folder, or a ds4d checkpoint as it is;
whole, or on each rank its part."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ds4d import attention
from ds4d.checkpoint.errors import CheckpointError, WrongPath
from ds4d.checkpoint.find import locate
from ds4d.checkpoint.folder import read_manifest, tokenizer_folder
from ds4d.config.errors import ConfigError, Problem
from ds4d.config.types import ModelConfig
from ds4d.mesh import Mesh
from ds4d.model.build import DTYPES, Stored, fill, stored_or_initial
from ds4d.model.checkpoint_weights import CheckpointWeights
from ds4d.model.config import hf_config
from ds4d.model.initial import InitialValues
from ds4d.model.meta import logical_model, meta_model
from ds4d.model.weights import Weights
from ds4d.pipeline.check import why_not_generated, why_not_staged
from ds4d.pipeline.stage import inference_cutter
from ds4d.router_loss import asks_for_loss
from ds4d.tensor_parallel.check import why_not_cut
from ds4d.tensor_parallel.inject import inject
from ds4d.tensor_parallel.shard import Shard
from ds4d.tensor_parallel.state import NoGroup, TensorParallel
from ds4d.tensor_parallel.vocab import install_head


def load_model(
    path: Path, *, device: torch.device | str, mesh: Mesh | None = None
) -> PreTrainedModel:
    """The model in eval mode, in the dtype it was saved or trained in.

    Args:
        path: a Hugging Face folder, a ds4d checkpoint, or a run folder (its newest checkpoint).
        mesh: whose pp and tp ranks hold the model together, each pp rank one chunk of its layers
            (``pipeline/stage.py``); None: it is all here.

    Raises:
        ValueError: weights that do not fit, or a model that can't be cut so.
        CheckpointError: ``WrongPath`` where no model is, else a checkpoint that cannot be read.
    """
    attention.register()
    folder = find_model(path)
    is_exported = (folder / "config.json").is_file()
    return (_from_folder if is_exported else _from_checkpoint)(folder, device, mesh).eval()


def find_model(path: Path) -> Path:
    """The folder that the model at ``path`` is in: a Hugging Face folder, or a checkpoint.

    Raises:
        CheckpointError: ``WrongPath`` where there is none, else what is wrong with a checkpoint.
    """
    if (path / "config.json").is_file():
        return path
    try:
        return locate(path)
    except CheckpointError as error:
        raise WrongPath(
            f"{path} is neither a Hugging Face folder (no config.json) nor a checkpoint or run "
            f"folder of ds4d ({error})"
        ) from None


def check_can_be_cut(path: Path, *, pp: int, tp: int, generates: bool) -> None:
    """Args:
        generates: it is for generation, not for one pass over given tokens.

    Raises:
        ConfigError: the model at ``path`` can't be cut over so many ranks.
        CheckpointError: see ``find_model``.
    """
    config = _config(find_model(path))
    why_no_stages = partial(_why_not_staged, generates=generates)
    asked = (("--pp", pp, why_no_stages), ("--tp", tp, why_not_cut))
    problems = [
        Problem(option, reason)
        for option, ranks, why_not in asked
        if ranks > 1 and (reason := why_not(config, ranks))
    ]
    if problems:
        raise ConfigError(problems, name=str(path))


def _why_not_staged(config: PreTrainedConfig, pp: int, *, generates: bool) -> str | None:
    layers = config.get_text_config(decoder=True).num_hidden_layers
    if pp > layers:
        return f"{pp} stages for {layers} layers would leave some empty; pp can be {layers} at most"
    return why_not_staged(config) or (why_not_generated(config) if generates else None)


def _config(folder: Path) -> PreTrainedConfig:
    if (folder / "config.json").is_file():
        return _without_router_loss(hf_config(ModelConfig(path=str(folder))))
    return _without_router_loss(AutoConfig.for_model(**read_manifest(folder).extra["hf_config"]))


def _without_router_loss(config: PreTrainedConfig) -> PreTrainedConfig:
    """Which is for training."""
    if asks_for_loss(config):
        config.get_text_config().output_router_logits = False
    return config


def _from_folder(
    folder: Path, device: torch.device | str, mesh: Mesh | None
) -> PreTrainedModel:
    if mesh is None or mesh.size("model") == 1:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        config = _without_router_loss(config)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype="auto",
            attn_implementation=attention.implementation_for(config),
            local_files_only=True,
        ).to(device)
        install_head(model)
        return model
    config = _config(folder)
    logical = logical_model(config)
    weights = Weights(folder, logical)
    model = _build(config, _dtype(config, weights, logical), weights, logical, device, mesh)
    if (folder / "generation_config.json").is_file():  # as from_pretrained: it may end texts
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def _from_checkpoint(
    folder: Path, device: torch.device | str, mesh: Mesh | None
) -> PreTrainedModel:
    config = _config(folder)
    logical = logical_model(config)
    tensors = CheckpointWeights(folder, logical)
    dtype = DTYPES[read_manifest(folder).extra["dtype"]]
    return _build(config, dtype, tensors, logical, device, mesh)


def _dtype(config: PreTrainedConfig, weights: Weights, logical: PreTrainedModel) -> torch.dtype:
    """What ``from_pretrained(dtype="auto")`` takes."""
    if config.dtype is not None:
        return config.dtype
    stored = ((name, p) for name, p in logical.named_parameters() if name in weights)
    name, parameter = next(stored)
    return weights(name, Shard(0, len(parameter), ranges=())).dtype  # nothing of it is read


def _build(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    stored: Stored,
    logical: PreTrainedModel,
    device: torch.device | str,
    mesh: Mesh | None,
) -> PreTrainedModel:
    implementation = attention.implementation_for(config)
    model = meta_model(config, dtype=dtype, attn_implementation=implementation)
    inject(model, TensorParallel(NoGroup()) if mesh is None else mesh.tensor_parallel())
    if mesh is not None and (cut := inference_cutter(mesh, config)) is not None:
        cut(model)
    fill(model, stored_or_initial(stored, InitialValues(logical, seed=0)), device=device)
    return model


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the model at ``path``.

    Raises:
        ValueError: there is none; a model that was trained on tokens has none.
        CheckpointError: see ``find_model``.
    """
    folder = find_model(path)
    if not (folder / "config.json").is_file():
        folder = tokenizer_folder(folder)
    if any(folder.glob("tokenizer*")):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    raise ValueError(
        f"{path}: no tokenizer in {folder}, so text can't be turned into tokens; copy the "
        "tokenizer's files there"
    )
