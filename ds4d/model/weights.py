"""The tensors of a Hugging Face folder, under the model's names, read one at a time.

What a file holds and what the model wants differ: names were changed, experts are stored one by
one and used as one tensor, packed projections are split. transformers knows these conversions; here
they are first all run on meta tensors of the files' shapes. That costs no reading and tells, before
anything is read, which file tensors make which model tensor and everything that does not fit. A
model tensor is then made by reading only its own sources, and of a source that is used as it is
stored only this rank's part: a process holds what it is converting now and no more.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from ds4d.tensor_file import TensorFile
from ds4d.tensor_parallel.shard import Shard, part_of

log = logging.getLogger(__name__)

SHOWN = 8  # names in one error message


@dataclass
class _Group:
    """File tensors that are converted together, and into what."""

    target: str  # the first model tensor; transformers' converters derive the others from it
    converter: WeightConverter | None
    sources: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def make(self, read: Callable[[str], Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """All tensors of the group. ``read`` gives a file tensor by its name."""
        if self.converter is None:
            ((source,),) = self.sources.values()
            return {self.target: read(source)}
        converter = deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names:
                converter.add_tensor(self.target, name, pattern, lambda name=name: read(name))
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}


class Weights:
    """``Weights(folder, model)(name)`` is that tensor as the folder has it.

    Args:
        folder: with ``model.safetensors``, or ``model.safetensors.index.json`` and its files.
        model: ``logical_model(config)``; borrowed for its names, shapes and conversions.

    Raises:
        ValueError: the folder cannot give this model its weights; all reasons in one message.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self._model = model
        self._files = {path: _open(path) for path in _weight_files(folder)}
        self._where = {name: file for file in self._files.values() for name in file.names}
        self._ties = dict(model.all_tied_weights_keys)
        wanted = {name: tuple(t.shape) for name, t in model.state_dict().items()}
        groups, unused = _group(self._where, model, wanted)
        self._groups: dict[str, _Group] = {}
        problems = []
        for group in groups:
            try:
                made = group.make(self._meta, model)
            except (RuntimeError, ValueError) as error:
                problems.append(f"{group.target}: cannot be made of its parts: {error}")
                continue
            for name, tensor in made.items():
                self._groups[name] = group
                if name not in wanted:
                    unused.append(name)
                elif (shape := tuple(tensor.shape)) != wanted[name]:
                    problems.append(
                        f"{name}: the files hold shape {list(shape)}, config.json asks for "
                        f"{list(wanted[name])}"
                    )
        missing = {name for name in wanted if name not in self}
        report = SimpleNamespace(missing_keys=missing, unexpected_keys=set(unused))
        model._adjust_missing_and_unexpected_keys(report)  # what transformers lets pass
        problems += [f"{name}: not in the files" for name in sorted(report.missing_keys)]
        if problems:
            raise ValueError(
                f"ds4d.model.path: the weights in {folder} do not fit its config.json "
                f"({type(model).__name__}):\n{_listed(problems)}\n"
                "Correct config.json, or the folder's weights"
            )
        if report.unexpected_keys:
            extra = sorted(report.unexpected_keys)
            message = "%s holds %d tensors that %s does not use:\n%s"
            log.warning(message, folder, len(extra), type(model).__name__, _listed(extra))

    def __contains__(self, name: str) -> bool:
        return any(tied in self._groups for tied in self._names(name))

    def __call__(self, name: str, shard: Shard | None = None) -> Tensor:
        """The tensor, or a rank's part of it, on the CPU and in the file's dtype.

        A part of a tensor that is stored as it is used is read alone; else its sources are read.

        Raises:
            ValueError: tied names have different tensors in the file.
        """
        found = [tied for tied in self._names(name) if tied in self._groups]
        tensor = self._make(found[0], shard)
        for other in found[1:]:
            if not torch.equal(tensor, self._make(other, shard)):
                raise ValueError(
                    f"ds4d.model.path: config.json ties {other} to {found[0]}, but the files hold "
                    'two different tensors; set "tie_word_embeddings": false in config.json'
                )
        return tensor

    def _names(self, name: str) -> list[str]:
        """All names of one logical tensor, the source of the tie first."""
        source = self._ties.get(name, name)
        return [source, *(tied for tied, of in self._ties.items() if of == source)]

    def _make(self, name: str, shard: Shard | None) -> Tensor:
        group = self._groups[name]
        if group.converter is None:
            ((source,),) = group.sources.values()
            file = self._where[source]
            if shard is None:
                return file.read(source)
            return shard.cut(lambda box: file.read(source, box), file.shape(source))
        return part_of(group.make(lambda n: self._where[n].read(n), self._model)[name], shard)

    def _meta(self, source: str) -> Tensor:
        return torch.empty(self._where[source].shape(source), dtype=torch.float32, device="meta")


def _group(
    sources: Iterable[str], model: PreTrainedModel, wanted: dict[str, tuple[int, ...]]
) -> tuple[list[_Group], list[str]]:
    """File tensors by the model tensors they make; and the names that make none.

    The same walk as transformers' ``convert_and_load_state_dict_in_model``.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix, meta = model.base_model_prefix, model.state_dict()
    groups: dict[str, _Group] = {}
    unused = []
    for source in sorted(sources, key=dot_natural_key):
        target, pattern = rename_source_key(source, renamings, converters, prefix, meta)
        if target not in wanted and source in wanted:  # a rule took a name that was right already
            target, pattern = rename_source_key(source, [], [], prefix, meta)
        if target not in wanted or (pattern is None and target in groups):
            unused.append(source)
            continue
        converter = None if pattern is None else by_pattern[pattern]
        group = groups.setdefault(target, _Group(target, converter))
        group.sources[source if pattern is None else pattern].append(source)
    return list(groups.values()), unused


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        absent = [name for name in files if not (folder / name).is_file()]
        if absent:
            raise ValueError(
                f"ds4d.model.path: {index} names {len(files)} files, of which these are not in "
                f"the folder:\n{_listed(absent)}\nCopy or download them again"
            )
        return [folder / name for name in files]
    if any(folder.glob("*.bin")):
        raise ValueError(
            f"ds4d.model.path: {folder} has its weights in *.bin files, which can run code when "
            "they are opened. Convert once:\n  python -c \"from transformers import "
            f"AutoModelForCausalLM as M; M.from_pretrained('{folder}', use_safetensors=False)"
            ".save_pretrained('OUT')\""
        )
    raise ValueError(
        f"ds4d.model.path: {folder} has neither model.safetensors nor model.safetensors.index.json"
    )


def _open(path: Path) -> TensorFile:
    try:
        return TensorFile(path)
    except SafetensorError as error:
        raise ValueError(
            f"ds4d.model.path: {path} ({path.stat().st_size} bytes) is damaged or cut short: "
            f"{error}; copy or download it again"
        ) from None


def _listed(lines: list[str]) -> str:
    shown = [f"  {line}" for line in lines[:SHOWN]]
    more = len(lines) - len(shown)
    return "\n".join(shown + ([f"  and {more} more"] if more else []))
