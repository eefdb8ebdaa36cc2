"""Text from a trained model: an exported Hugging Face folder, or a ds4d checkpoint as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

import torch
from transformers import (
    BatchEncoding,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from ds4d.mesh import Mesh
from ds4d.pipeline.actions import Placement
from ds4d.pipeline.generate import join_stages
from ds4d.saved_model import load_model, load_tokenizer


def generate(
    path: Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
    mesh: Mesh | None = None,
) -> list[str]:
    """Continue each prompt; together in one batch, whatever their lengths.

    The ranks of a mesh draw the same tokens and stop together: each has the same logits, to the
    bit, and a generator in the same state.

    Args:
        path: a Hugging Face folder, a ds4d checkpoint, or a run folder (its newest checkpoint).
        temperature: 0 takes the likeliest token at each step; else tokens are drawn.
        top_p: drawn from the likeliest tokens that have this much probability together.
        seed: of the drawing.
        mesh: whose pp and tp ranks hold the model together; all else is the same on every rank.
            None: this process holds it.

    Returns:
        What follows each prompt, up to the model's end-of-text token, without special tokens; the
        same on all ranks.

    Raises:
        ValueError: no model or no tokenizer there, or a prompt that the model cannot continue.

    Collective: pp, tp.
    """
    _check_settings(prompts, max_new_tokens, temperature, top_p)
    tokenizer = load_tokenizer(path)
    model = load_model(path, device=device, mesh=mesh)
    if mesh is not None and mesh.parallel.pp > 1:
        join_stages(model.ds4d_stages, mesh, Placement.loop(mesh.parallel.pp, 1))
    batch = _encode(tokenizer, prompts).to(device)
    _check_lengths(batch, model.config, max_new_tokens)
    drawn = {"temperature": temperature, "top_p": top_p, "top_k": 0} if temperature > 0 else {}
    # not the folder's own settings, which may ask for sampling or penalties
    model.generation_config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        disable_compile=mesh is not None,  # ranks send in a call
        **drawn,
    )
    torch.manual_seed(seed)
    output = model.generate(**batch, synced_gpus=False)
    new = output[:, batch["input_ids"].shape[1] :]
    return tokenizer.batch_decode(new, skip_special_tokens=True)


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
