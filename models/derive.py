"""Blueprints from what transformers itself says: its plans, and the families in this folder."""

from __future__ import annotations

import importlib
import pkgutil
import re
from functools import lru_cache

from ds4d.models.blueprint import Blueprint, Cut, Plan, Style
from torch import nn
from transformers import PreTrainedModel

HOW_TO_ADD = (
    "add a blueprint: one file in models/, see 'Add a family' in the README"
)

# transformers' words for a module -> ours. Inside a block gradients are partial sums (see
# ds4d.tensor_parallel.blocks), so what transformers reduces there by a style of its own is
# replicated here and summed once a step.
_OF_MODULES: dict[str, Style] = {
    "colwise": "colwise",
    "colwise_rep": "colwise_gather_output",
    "colwise_gather_output": "colwise_gather_output",
    "packed_colwise": "packed_colwise",
    "rowwise": "rowwise",
    "rowwise_rep": "rowwise_split_input",
    "rowwise_split_input": "rowwise_split_input",
    "embedding_rowwise": "vocabulary",
    "moe_tp_experts": "experts",
    "moe_identity_expert": "shared_by_ranks",
    "replicated_with_grad_allreduce": "replicate",
    "mla_kv_a_proj": "replicate",
    "local_params": "replicate",
    "replicate": "replicate",
}

# transformers' words for a parameter, by its number of dims -> ours
_OF_PARAMETERS: dict[tuple[str, int], Style] = {
    ("colwise", 1): "by_head",
    ("colwise", 3): Cut(1),
    ("packed_colwise", 3): Cut(1, blocks=2),
    ("rowwise", 3): Cut(2),
    ("packed_rowwise", 3): Cut(2, blocks=2),
}


# What stands beside experts, by name, where transformers' plan does not say it: routers, and an MLP
# that all tokens share.
_ROUTERS = ("gate", "router")
_SHARED_MLP = re.compile(r"shared_(experts?|mlp)")
_OF_MLP: dict[str, Style] = {
    "gate_proj": "colwise",
    "up_proj": "colwise",
    "gate_up_proj": "packed_colwise",
    "down_proj": "rowwise",
}


@lru_cache(maxsize=None)
def families() -> dict[str, Blueprint]:
    """Every family file's blueprint, by model type."""
    package = importlib.import_module("ds4d.models")
    found: dict[str, Blueprint] = {}
    for module in pkgutil.iter_modules(package.__path__, "ds4d.models."):
        blueprint = getattr(importlib.import_module(module.name), "BLUEPRINT", None)
        if blueprint is not None:
            found |= dict.fromkeys(blueprint.model_types, blueprint)
    return found


def blueprint_of(model_type: str) -> Blueprint:
    """The family file's, or an empty one, which leaves everything to transformers' plan."""
    return families().get(model_type) or Blueprint((model_type,))


def plan_of(model: PreTrainedModel) -> dict[str, Style]:
    """Styles by path pattern, for this model (on meta will do).

    Raises:
        ValueError: neither transformers nor a family file has a plan, or it has a style that is
            not known here.
    """
    model_type = model.config.model_type
    family = blueprint_of(model_type).plan
    plan = _transformers_plan(model, skip=family)
    plan = _beside_experts(model, plan) | plan
    for pattern, style in family.items():
        plan[pattern] = style(model.config) if callable(style) else style
    sharding = [style for style in plan.values() if style not in ("replicate", "vocabulary")]
    if len(sharding) <= 1:  # the head at most
        raise ValueError(
            f"model_type {model_type} has no tensor-parallel plan in transformers and no family "
            f"file in ds4d; {HOW_TO_ADD}"
        )
    return plan


def _transformers_plan(model: PreTrainedModel, *, skip: Plan) -> dict[str, Style]:
    parameters = {_wildcard(name): p.dim() for name, p in model.named_parameters()}
    modules = {_wildcard(name) for name, _ in model.named_modules()}
    plan: dict[str, Style] = {}
    for pattern, word in (model.tp_plan or {}).items():
        if pattern in skip:
            continue
        if pattern in parameters:
            style = _OF_PARAMETERS.get((word, parameters[pattern]))
            if style == Cut(1) and "gate_up" in pattern:
                style = Cut(1, blocks=2)  # whatever the plan says, the model takes its two halves
        elif pattern in modules:
            style = _OF_MODULES.get(word)
        else:
            continue  # plans name what some configs leave out
        if style is None:
            raise ValueError(
                f"model_type {model.config.model_type}: transformers' plan for {pattern} is "
                f'"{word}", a style that ds4d does not know; {HOW_TO_ADD}'
            )
        plan[pattern] = style
    return plan


def _beside_experts(model: PreTrainedModel, plan: Plan) -> dict[str, Style]:
    found: dict[str, Style] = {}
    sparse = {p.rpartition(".")[0] for p, style in plan.items() if style == "experts"}
    for path, module in model.named_modules():
        parent, _, name = _wildcard(path).rpartition(".")
        if parent not in sparse:
            continue
        if name in _ROUTERS:
            found[f"{parent}.{name}"] = "replicate"
        elif _SHARED_MLP.fullmatch(name):
            linear = [n for n, m in module.named_modules() if isinstance(m, nn.Linear)]
            if set(linear) <= set(_OF_MLP):
                found |= {f"{parent}.{name}.{n}": _OF_MLP[n] for n in linear}
    return found


def _wildcard(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)
