"""What every tensor of a model is before training, by Hugging Face's own rules, one at a time.

transformers fills a model by calling a rule for each module (``_init_weights``), children first. A
rule may write to tensors of modules below its own (gpt2's attention rescales its output
projection), and it also computes buffers such as rotary frequencies. On meta tensors the rules
write nothing and cost nothing. So one tensor's value is found by making it alone real, on a model
that is otherwise on meta, and calling every rule that can reach it: those of the modules that hold
it and of all modules above.

Random numbers come from a CPU generator seeded by the run's seed and the tensor's name, in fp32.
So a tensor's value depends on nothing else: not on the device, the layout, or what other tensors
exist on this rank, and no more than one tensor is ever held.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from ds4d.tensor_parallel.shard import Shard, part_of


class InitialValues:
    """``InitialValues(model, seed=seed)(name)`` is the initial value of that tensor.

    Args:
        model: ``logical_model(config)``. Borrowed: on meta again after each call.
    """

    def __init__(self, model: PreTrainedModel, *, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._rules = {
            path: (position, rule, module)
            for position, (path, rule, module) in enumerate(_rules("", model, model))
        }
        self._tensors = dict(_named_tensors(model))
        self._holders = defaultdict(list)
        for name, tensor in self._tensors.items():
            self._holders[tensor].append(name)

    @torch.no_grad()
    def __call__(self, name: str, shard: Shard | None = None) -> Tensor:
        """The logical tensor, or a rank's part of it, on the CPU; floating ones in fp32. All of it
        is drawn, so that a part is the same numbers whatever the number of ranks.

        Raises:
            ValueError: transformers has no rule that gives this tensor a value.
        """
        target = self._tensors[self._model.all_tied_weights_keys.get(name, name)]
        names = self._holders[target]
        value = _real_like(target)
        torch.utils.swap_tensors(target, value)
        try:
            with torch.random.fork_rng(devices=[]), guard_torch_init_functions():
                torch.default_generator.manual_seed(_seed_of(self._seed, names[0]))
                for rule, module in self._rules_reaching(names):
                    rule(module)
        except NotImplementedError as error:  # the rule read another tensor, which is on meta
            raise self._no_value(name) from error
        finally:
            torch.utils.swap_tensors(target, value)
        if _is_unset(value):
            raise self._no_value(name)
        return part_of(value.detach(), shard)

    def _no_value(self, name: str) -> ValueError:
        return ValueError(
            f"ds4d.model: transformers has no rule in {type(self._model).__name__} that gives "
            f"{name} an initial value by itself, so this model can only be trained from weights: "
            "give ds4d.model.path instead of ds4d.model.config"
        )

    def _rules_reaching(self, names: list[str]) -> list[tuple[Callable, nn.Module]]:
        paths = {path for name in names for path in _module_paths(name)}
        found = [self._rules[path] for path in paths if path in self._rules]
        return [(rule, module) for _, rule, module in sorted(found, key=lambda entry: entry[0])]


def _rules(
    path: str, module: nn.Module, model: PreTrainedModel
) -> Iterator[tuple[str, Callable[[nn.Module], None], nn.Module]]:
    """(path, rule, module) in the order of transformers' ``initialize_weights``: children first, a
    module by the rule of the nearest PreTrainedModel at or above it."""
    for name, child in module.named_children():
        owner = child if isinstance(child, PreTrainedModel) else model
        yield from _rules(f"{path}.{name}" if path else name, child, owner)
    yield path, model._init_weights, module


def _module_paths(name: str) -> Iterator[str]:
    """The modules that a tensor is in: "a.b.weight" -> "a.b", "a", ""."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _real_like(tensor: Tensor) -> Tensor:
    """On the CPU, filled with what no rule writes, so that an element without a rule shows."""
    if tensor.is_floating_point():
        value = torch.full(tensor.shape, float("nan"), dtype=torch.float32, device="cpu")
    elif tensor.dtype == torch.bool:
        value = torch.zeros(tensor.shape, dtype=torch.bool, device="cpu")
    else:
        value = torch.full(
            tensor.shape, torch.iinfo(tensor.dtype).min, dtype=tensor.dtype, device="cpu"
        )
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    value.__dict__.update(tensor.__dict__)
    return value


def _is_unset(value: Tensor) -> bool:
    if value.is_floating_point():
        return bool(value.isnan().any())
    if value.dtype == torch.bool:
        return False
    return bool((value == torch.iinfo(value.dtype).min).any())
