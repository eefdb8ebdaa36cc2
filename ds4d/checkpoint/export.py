"""A checkpoint as a Hugging Face folder that ``AutoModelForCausalLM.from_pretrained`` loads."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any, Iterator

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ds4d.checkpoint.errors import CheckpointError, WrongPath
from ds4d.checkpoint.files import discard, temp_beside
from ds4d.checkpoint.find import locate
from ds4d.checkpoint.folder import read_manifest, tokenizer_folder
from ds4d.checkpoint.load import mismatches, raise_mismatches, read_here
from ds4d.checkpoint.logical import LogicalTensor, Piece
from ds4d.checkpoint.storage import SafetensorsReader
from ds4d.model.build import DTYPES

logger = logging.getLogger(__name__)

MAX_SHARD = "5GB"
_LAYER = re.compile(r".*?\.\d+\.")  # what is converted together has one of these in common


def export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str | None = None,
    max_shard_size: str = MAX_SHARD,
    force: bool = False,
) -> Path:
    """Write config, weights and tokenizer to ``out``, which appears whole or not at all.

    Tied weights are written once; names are those that the family has on the hub. Works in one
    process, whether or not ``torch.distributed`` is initialised there.

    Args:
        checkpoint: a checkpoint, or a run folder (its newest).
        dtype: ``"fp32" | "bf16" | "fp16"``; default: the dtype that was trained in. What the
            family keeps in fp32 stays so.
        max_shard_size: of a file of weights, as ``"5GB"``; a larger tensor has a file of its own.
        force: replace ``out`` where it is an exported model.
    Returns:
        ``out``.
    Raises:
        WrongPath: ``out`` is not empty, or holds something else than an exported model.
        CheckpointError: the checkpoint does not hold the whole model; the folder cannot be written.
    """
    checkpoint = locate(checkpoint)
    _check_target(out, checkpoint, force)
    extra = read_manifest(checkpoint).extra
    model = _meta_model(extra["hf_config"], _dtype(dtype or extra["dtype"]))
    temp = temp_beside(out)
    try:
        temp.mkdir(parents=True)
        tensors = _as_stored(model, _read(checkpoint, model, temp), temp)
        model.save_pretrained(
            temp, state_dict=tensors, max_shard_size=max_shard_size, save_original_format=False
        )
        _copy_tokenizer(checkpoint, temp)
        for weights in temp.glob("*.safetensors"):  # the library makes them private to the user
            weights.chmod((temp / "config.json").stat().st_mode)
        if out.exists():
            discard(out)
        os.rename(temp, out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {out}: {error}") from None
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return out


def _check_target(out: Path, checkpoint: Path, force: bool) -> None:
    """Never remove anything but an older export."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir():
        raise WrongPath(f"{out} is a file: name a folder")
    if not force:
        raise WrongPath(f"{out} is not empty: name another folder, or replace it with --force")
    if out.resolve() in checkpoint.resolve().parents or not (out / "config.json").is_file():
        raise WrongPath(f"{out} is no exported model, so it is not replaced: name another folder")
    strange = sorted(path.name for path in out.iterdir() if path.is_dir())
    if strange:
        raise WrongPath(f"{out} has the folder {strange[0]}, which no export has: not replaced")


def _dtype(word: str) -> torch.dtype:
    if word not in DTYPES:
        raise CheckpointError(f'dtype "{word}" is not one of {", ".join(DTYPES)}')
    return DTYPES[word]


def _meta_model(hf_config: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """The model without memory: what it consists of and how its family is stored."""
    config = AutoConfig.for_model(**hf_config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _wanted(model: PreTrainedModel) -> Iterator[tuple[str, str, torch.Size, torch.dtype]]:
    """Key in the checkpoint, name, shape and dtype of all that the folder is to hold."""
    in_fp32 = [glob.replace("*", ".*") for glob in model._get_dtype_plan(model.dtype)]
    parameters = dict(model.named_parameters())  # tied ones once
    persistent = model.state_dict()
    buffers = {n: b for n, b in model.named_buffers() if n in persistent}
    ignored = set(model._keys_to_ignore_on_save or ())
    for kind, tensors in (("weight", parameters), ("buffer", buffers)):
        for name, tensor in tensors.items():
            if name in ignored:
                continue
            keep = any(re.search(pattern, name) for pattern in in_fp32)
            yield f"{kind}/{name}", name, tensor.shape, torch.float32 if keep else tensor.dtype


def _read(checkpoint: Path, model: PreTrainedModel, scratch: Path) -> dict[str, torch.Tensor]:
    """All tensors of the folder, each converted on its way from the checkpoint, box by box.

    They lie in mapped files, so that a model larger than the memory can be exported.
    """
    reader = SafetensorsReader(checkpoint)
    tensors, state = {}, {}
    for key, name, shape, dtype in _wanted(model):
        tensors[name] = _mapped(scratch / "tensor", shape, dtype)
        whole = Piece((0,) * len(shape), tensors[name])
        state[key] = LogicalTensor(tuple(shape), dtype, (whole,))
    raise_mismatches(checkpoint, mismatches(reader.metadata, state, convert=True))
    read_here(reader, state)
    return tensors


def _as_stored(
    model: PreTrainedModel, tensors: dict[str, torch.Tensor], scratch: Path
) -> dict[str, torch.Tensor]:
    """Under the names and in the shapes that the family has on the hub: experts one by one, say.

    transformers converts all that it is given in memory, so it is given a layer at a time; what it
    makes goes to mapped files again. Empties ``tensors``.
    """
    layers: dict[str, list[str]] = {}
    for name in tensors:
        layer = _LAYER.match(name)
        layers.setdefault(layer[0] if layer else "", []).append(name)
    stored = {}
    for names in layers.values():
        given = {name: tensors.pop(name) for name in names}
        whole = {id(tensor) for tensor in given.values()}
        for name, tensor in revert_weight_conversion(model, given).items():
            if id(tensor) not in whole:
                made = tensor
                tensor = _mapped(scratch / "tensor", made.shape, made.dtype).copy_(made)
            stored[name] = tensor
    return stored


def _mapped(path: Path, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a file without a name. The space is taken at once: a full disk under a mapped
    file would kill the process later."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    with open(path, "xb") as file:
        os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
    tensor = torch.from_file(str(path), shared=True, size=count, dtype=dtype)
    path.unlink()
    return tensor.view(shape)


def _copy_tokenizer(checkpoint: Path, out: Path) -> None:
    folder = tokenizer_folder(checkpoint)
    if folder.is_dir():
        shutil.copytree(folder, out, dirs_exist_ok=True)
    else:
        logger.warning("no tokenizer is exported: there is none in %s", folder)
