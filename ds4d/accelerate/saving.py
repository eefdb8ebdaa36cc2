"""``save_pretrained`` and ``state_dict`` of a script's model, of which this rank has a part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds4d.accelerate.run import ScriptRun, run_of
from ds4d.model.meta import meta_model

PART = (
    "ds4d.accelerate: state_dict() of the unwrapped model would give this rank's part of it, for "
    "in this layout no rank holds the whole: use accelerator.get_state_dict(model), on all ranks"
)


LOADED_LATE = (
    "ds4d.accelerate: load_state_dict() when the run has begun: each rank has a part of the model, "
    "and the optimizer master weights; load before that, or with accelerator.load_state(folder)"
)


def install_on(
    model: PreTrainedModel,
    begin: Callable[[], ScriptRun | None],
    generate: Callable[..., Any],
) -> None:
    """From now on the model saves itself whole, from any layout, and generates over all ranks."""

    def save_pretrained(
        folder: Any, is_main_process: bool = True, state_dict: Any = None, **kwargs: Any
    ) -> None:
        """transformers' own, of the whole model. Collective: the world, unless ``state_dict`` is
        given or each rank has the whole model."""
        run = begin()
        if state_dict is None:
            state_dict = run.whole_state("save_pretrained")
        if is_main_process and state_dict and dist.get_rank() == 0:
            kwargs.pop("save_function", None)  # safetensors writes
            _write(model, state_dict, Path(folder), kwargs)

    def whole_state_dict(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
        run = begin()
        if run is not None and not run.is_whole_here:
            raise RuntimeError(PART)
        return nn.Module.state_dict(model, *args, **kwargs)

    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        if run_of(model) is not None:
            raise RuntimeError(LOADED_LATE)
        return nn.Module.load_state_dict(model, *args, **kwargs)

    model.save_pretrained, model.state_dict = save_pretrained, whole_state_dict
    model.load_state_dict, model.generate = load_state_dict, generate


def _write(
    model: PreTrainedModel, state: dict[str, Tensor], folder: Path, options: dict[str, Any]
) -> None:
    """By a model that has no memory of its own, but the names and the ties of the whole."""
    dtype = next((x.dtype for x in state.values() if x.is_floating_point()), torch.float32)
    whole = meta_model(model.config, dtype=dtype)
    if model.can_generate():
        whole.generation_config = model.generation_config
    whole.save_pretrained(folder, state_dict=dict(state), **options)
