"""Text from a trained model: an exported Hugging Face folder, or a ds4d checkpoint as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BatchEncoding,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ds4d import attention
from ds4d.checkpoint.errors import CheckpointError, WrongPath
from ds4d.checkpoint.find import locate
from ds4d.checkpoint.folder import read_manifest, tokenizer_folder
from ds4d.checkpoint.load import read_here
from ds4d.checkpoint.logical import LogicalTensor, Piece
from ds4d.checkpoint.storage import SafetensorsReader
from ds4d.model.build import DTYPES, fill, stored_or_initial
from ds4d.model.initial import InitialValues
from ds4d.model.meta import logical_model, meta_model


def generate(
    path: Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[str]:
    """Continue each prompt; together in one batch, whatever their lengths.

    Args:
        path: a Hugging Face folder, a ds4d checkpoint, or a run folder (its newest checkpoint).
        temperature: 0 takes the likeliest token at each step; else tokens are drawn.
        top_p: drawn from the likeliest tokens that have this much probability together.
        seed: of the drawing.

    Returns:
        What follows each prompt, up to the model's end-of-text token, without special tokens.

    Raises:
        ValueError: no model or no tokenizer there, or a prompt that the model cannot continue.
    """
    _check_settings(prompts, max_new_tokens, temperature, top_p)
    model, tokenizer = load_model(path, device=device)
    batch = _encode(tokenizer, prompts).to(device)
    _check_lengths(batch, model.config, max_new_tokens)
    drawn = {"temperature": temperature, "top_p": top_p, "top_k": 0} if temperature > 0 else {}
    # not the folder's own settings, which may ask for sampling or penalties
    model.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **drawn,
    )
    torch.manual_seed(seed)
    output = model.generate(**batch)
    new = output[:, batch["input_ids"].shape[1] :]
    return tokenizer.batch_decode(new, skip_special_tokens=True)


def load_model(
    path: Path, *, device: torch.device | str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in eval mode, in the dtype it was saved or trained in, and its tokenizer.

    Raises:
        ValueError: see ``generate``.
    """
    attention.register()
    if (path / "config.json").is_file():
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype="auto",
            attn_implementation=attention.implementation_for(config),
            local_files_only=True,
        ).to(device)
        return model.eval(), _tokenizer(path, path)
    try:
        checkpoint = locate(path)
    except CheckpointError as error:
        raise WrongPath(
            f"{path} is neither a Hugging Face folder (no config.json) nor a checkpoint or run "
            f"folder of ds4d ({error})"
        ) from None
    extra = read_manifest(checkpoint).extra
    model = _from_checkpoint(checkpoint, extra["hf_config"], DTYPES[extra["dtype"]], device)
    return model, _tokenizer(path, tokenizer_folder(checkpoint))


class _CheckpointTensors:
    """The weights and buffers of a checkpoint by name, each read when it is asked for."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self._reader = SafetensorsReader(folder)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._sources = model.all_tied_weights_keys

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def __call__(self, name: str) -> Tensor:
        kind = "weight" if name in self._parameters else "buffer"
        key = f"{kind}/{self._sources.get(name, name)}"
        saved = self._reader.metadata.state_dict_metadata.get(key)
        if saved is None or tuple(saved.size) != self._shapes[name]:
            raise CheckpointError(
                f"{self._reader.folder}: {key} of shape {list(self._shapes[name])} is not there; "
                "the checkpoint was made with another version of transformers"
            )
        tensor = torch.empty(saved.size, dtype=saved.properties.dtype)
        whole = Piece((0,) * tensor.dim(), tensor)
        read_here(
            self._reader, {key: LogicalTensor(tuple(tensor.shape), tensor.dtype, (whole,))}
        )
        return tensor


def _from_checkpoint(
    folder: Path, config: dict, dtype: torch.dtype, device: torch.device | str
) -> PreTrainedModel:
    config = AutoConfig.for_model(**config)
    implementation = attention.implementation_for(config)
    model = meta_model(config, dtype=dtype, attn_implementation=implementation)
    logical = logical_model(config)
    values = stored_or_initial(_CheckpointTensors(folder, logical), InitialValues(logical, seed=0))
    fill(model, values, device=device)
    return model.eval()


def _tokenizer(path: Path, folder: Path) -> PreTrainedTokenizerBase:
    if any(folder.glob("tokenizer*")):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    raise ValueError(
        f"{path}: no tokenizer in {folder}, so text can't be turned into tokens; copy the "
        "tokenizer's files there"
    )


def _encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> BatchEncoding:
    """Padded on the left, so that all prompts end where the new tokens begin."""
    if tokenizer.pad_token_id is None:  # what stands there is masked
        tokenizer.pad_token_id = 0 if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    batch = tokenizer(
        list(prompts),
        return_tensors="pt",
        padding=True,
        padding_side="left",
        return_token_type_ids=False,
    )
    for number, length in enumerate(batch["attention_mask"].sum(-1).tolist(), start=1):
        if length == 0:
            text = prompts[number - 1]
            raise ValueError(f"prompt {number} has no token: {text!r}; give some text")
    return batch


def _check_settings(
    prompts: Sequence[str], max_new_tokens: int, temperature: float, top_p: float
) -> None:
    for ok, message in (
        (len(prompts) > 0, "no prompts: give at least one"),
        (max_new_tokens >= 1, f"max_new_tokens {max_new_tokens}: must be at least 1"),
        (temperature >= 0, f"temperature {temperature}: must be 0 (likeliest token) or more"),
        (0 < top_p <= 1, f"top_p {top_p}: must be over 0 and at most 1"),
        (top_p == 1 or temperature > 0, f"top_p {top_p} has no effect at temperature 0"),
    ):
        if not ok:
            raise ValueError(message)


def _check_lengths(batch: BatchEncoding, config: PreTrainedConfig, max_new_tokens: int) -> None:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = batch["input_ids"].shape[1]
    if limit is not None and longest + max_new_tokens > limit:
        raise ValueError(
            f"the longest prompt ({longest} tokens) and max_new_tokens {max_new_tokens} make "
            f"{longest + max_new_tokens} positions, but the model has {limit}; ask for at most "
            f"{max(0, limit - longest)} new tokens"
        )
