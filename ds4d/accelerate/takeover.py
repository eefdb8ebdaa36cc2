"""A script's own model, whole on every rank, becomes this rank's part of it.

The script's object stays, for it is held in many places (a Trainer has it, callbacks have it); what
it consists of is built anew, cut and filled from the weights it had. What the script had set on it
stays: frozen parameters, gradient checkpointing, its generation config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from ds4d import attention
from ds4d.config.types import ModelConfig, RunConfig
from ds4d.mesh import Mesh
from ds4d.model.build import DTYPES, Stored, build_model
from ds4d.model.meta import meta_model
from ds4d.pipeline.stage import stage_cutter
from ds4d.router_loss import asks_for_loss
from ds4d.tensor_parallel.shard import Shard, part_of

# Of the script's object: what is not made anew.
KEPT = (
    "generation_config", "name_or_path", "warnings_issued", "_weight_conversions",
    "save_pretrained", "state_dict", "load_state_dict", "generate",
)  # fmt: skip


@dataclass(frozen=True)
class Original:
    """What is known of the script's model, before it is cut.

    Attributes:
        names: of its parameters, tied ones by their first name.
        tied: second name -> first.
        frozen: names of parameters that do not learn.
        num_parameters: by (only those that learn, without embeddings).
    """

    config: PreTrainedConfig
    names: Mapping[nn.Parameter, str]
    tied: Mapping[str, str]
    frozen: frozenset[str]
    num_parameters: Mapping[tuple[bool, bool], int]

    @classmethod
    def of(cls, model: nn.Module) -> Original:
        """Raises: ValueError: ds4d does not train such models."""
        _refuse(model)
        _refuse_changes(model)
        names = {p: name for name, p in model.named_parameters()}
        counts = {
            (trainable, plain): model.num_parameters(trainable, plain)
            for trainable in (False, True)
            for plain in (False, True)
        }
        frozen = frozenset(name for p, name in names.items() if not p.requires_grad)
        return cls(model.config, names, dict(model.all_tied_weights_keys), frozen, counts)


def _refuse(model: nn.Module) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"ds4d.accelerate trains causal language models of transformers, whole; the model is a "
            f"{type(model).__name__}. Adapters (PEFT) and wrappers are not supported: hand the "
            "model itself to prepare()"
        )
    meant = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), None)
    if type(model) is not meant:
        raise ValueError(
            f"ds4d.accelerate: the model is a {type(model).__name__}, but what ds4d can cut for "
            f"its config is a {meant and meant.__name__}: load it by AutoModelForCausalLM"
        )
    if asks_for_loss(model.config):
        raise ValueError(
            "ds4d.accelerate: output_router_logits is true, but the loss that balances experts is "
            "of the whole global batch, which a script's loop does not know: set it to false, or "
            "train by `ds4d train`, which has that loss"
        )


HOOKS = {
    "_forward_hooks": "forward hook", "_forward_pre_hooks": "forward hook",
    "_backward_hooks": "backward hook", "_backward_pre_hooks": "backward hook",
}  # fmt: skip
# transformers' own, with gradient checkpointing
WITHOUT_EFFECT = ("make_inputs_require_grads",)
CHANGED = (
    "ds4d.accelerate: {what} was set on {where} before prepare(); the model's inside is built anew "
    "for each rank, so it would be lost"
)


def _refuse_changes(model: PreTrainedModel) -> None:
    """What was done to this object, and would not be done to the one that is built."""
    for path, module in model.named_modules():
        where = f"the model's {path}" if path else "the model"
        for kind, name in HOOKS.items():
            hooks = (getattr(module, kind, None) or {}).values()
            if any(getattr(hook, "__name__", "") not in WITHOUT_EFFECT for hook in hooks):
                raise ValueError(CHANGED.format(what=f"a {name}", where=where))
        if "forward" in module.__dict__:
            raise ValueError(CHANGED.format(what="another forward()", where=where))
    if "_loss_function" in model.__dict__:
        raise ValueError(CHANGED.format(what="another loss_function", where="the model"))
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(CHANGED.format(what="a gradient hook", where=name))
    of_config = meta_model(model.config, dtype=model.dtype)
    shapes = [{n: tuple(p.shape) for n, p in m.named_parameters()} for m in (model, of_config)]
    if differing := sorted(dict(shapes[0].items() ^ shapes[1].items())):
        raise ValueError(
            "ds4d.accelerate: the model is not that of its config, by which ds4d builds it: "
            f"{', '.join(differing[:3])} differ; change the config with it"
        )


class Given:
    """The script's weights, as ``build_model`` reads them; each is let go once it is read, but for
    those that are wider than ``dtype``, of which master weights are made later.

    Args:
        dtype: that is computed in.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._tensors: dict[str, Tensor] = {
            name: tensor.detach()
            for tensors in (model.named_parameters, model.named_buffers)
            for name, tensor in tensors(remove_duplicate=False)
        }
        wide = dtype != torch.float32
        self._kept = {n for n, x in self._tensors.items() if wide and x.dtype == torch.float32}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __call__(self, name: str, shard: Shard | None = None) -> Tensor:
        tensor = self._tensors[name] if name in self._kept else self._tensors.pop(name)
        return part_of(tensor, shard)

    @property
    def is_wide(self) -> bool:
        return bool(self._kept)


def take_over(
    model: PreTrainedModel,
    original: Original,
    run: RunConfig,
    mesh: Mesh,
    *,
    given: Stored,
    device: torch.device,
    partition: Callable[[nn.Module], None] | None,
) -> PreTrainedModel:
    """Make ``model`` this rank's part, on ``device``.

    Args:
        given: its weights.
        partition: see ``build_model``.

    Returns:
        the same object.

    Raises:
        ValueError: it can't be cut so.

    Collective: what ``partition`` is.
    """
    attention.register()
    config, training = model.config, model.training
    kept = {name: model.__dict__[name] for name in KEPT if name in model.__dict__}
    model.__dict__["_modules"].clear()  # so that weights go when they are read
    built = build_model(
        ModelConfig(config={}),
        config=config,
        dtype=DTYPES[run.precision.param_dtype],
        device=device,
        seed=run.training.seed,
        attn_implementation=attention.implementation_for(config),
        recompute=run.recompute,
        partition=partition,
        tp=mesh.tensor_parallel(),
        cp=mesh.context_parallel(run.context),
        cut=partial(_freeze_and_cut, original.frozen, stage_cutter(run, mesh, config)),
        given=given,
    )
    _move(built, model)
    model.__dict__ |= kept
    model.num_parameters = _counts(original)
    return model.train(training)


def _move(built: PreTrainedModel, model: PreTrainedModel) -> None:
    """All that ``built`` consists of. What refers to ``built`` itself then refers to ``model``."""
    if type(built) is not type(model):
        raise ValueError(f"{type(model).__name__} is not the {type(built).__name__} that was built")
    model.__dict__.clear()
    model.__dict__.update(built.__dict__)
    stages = getattr(model, "ds4d_stages", None)
    if stages is not None:
        stages.model = model


def _freeze_and_cut(
    frozen: frozenset[str], cut: Callable[[PreTrainedModel], Any] | None, built: PreTrainedModel
) -> None:
    for name, parameter in built.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    if cut is not None:
        cut(built)


def _counts(original: Original) -> Callable[..., int]:
    def num_parameters(only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Of the whole model."""
        return original.num_parameters[only_trainable, exclude_embeddings]

    return num_parameters
