"""Models and states of an ``Accelerator``: taken out, saved and loaded again, in any layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds4d.accelerate.loader import ScriptLoader
from ds4d.accelerate.model import ScriptModel
from ds4d.accelerate.optimizer import FilesSchedule, move_schedule
from ds4d.accelerate.run import ScriptRun

DATA_STATE = "ds4d_data.bin"


class States:
    """A part of ``accelerator.Accelerator``, in front of Accelerate's own."""

    _begin: Callable[[], ScriptRun]
    _dataloaders: list[ScriptLoader]

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        return model.module if isinstance(model, ScriptModel) else model

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Of the whole model; on the CPU of the main process, empty elsewhere."""
        return self._begin().whole_state()

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        self._begin()
        location = super().save_state(output_dir, *args, **kwargs)
        if self.is_main_process:
            state = {
                "loaders": [loader.state_dict() for loader in self._dataloaders],
                "num_processes": self.num_processes,
            }
            torch.save(state, Path(location) / DATA_STATE)
        self.wait_for_everyone()
        return location

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        self._begin()
        folder = self._state_folder(input_dir)
        super().load_state(folder, *args, **kwargs)
        path = Path(folder) / DATA_STATE
        if path.exists():
            state = torch.load(path, weights_only=False)
            for loader, its in zip(self._dataloaders, state["loaders"]):
                loader.load_state_dict(its)
            for prepared in self._schedulers:
                if not isinstance(prepared, FilesSchedule) and not prepared.split_batches:
                    move_schedule(prepared.scheduler, state["num_processes"], self.num_processes)

    def _state_folder(self, input_dir: str | None) -> str:
        if input_dir is not None:
            return input_dir
        folder = Path(self.project_dir) / "checkpoints"
        saved = sorted(folder.glob("checkpoint_*"), key=lambda p: int(p.name.split("_")[-1]))
        if not saved:
            raise ValueError(f"load_state(): there is no checkpoint in {folder}")
        return str(saved[-1])

    def free_memory(self, *objects: Any) -> Any:
        freed = super().free_memory(*objects)
        self._forget()
        return freed
