"""Which checkpoint to go on from."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4d.checkpoint.errors import CheckpointError, WrongPath
from ds4d.checkpoint.folder import (
    Manifest,
    checkpoints_folder,
    complete_manifest,
    is_checkpoint,
    step_folders,
)

logger = logging.getLogger(__name__)

Say = Callable[[str], Any]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder: complete with a manifest, or with the reason why it is not usable."""

    folder: Path
    step: int
    manifest: Manifest | None
    problem: str | None


def list_checkpoints(root: Path) -> list[Checkpoint]:
    """All checkpoints of a run folder: the complete ones, newest first, then the unusable ones.

    Reads each manifest and the size of each file, no contents.
    """
    found = []
    for step, folder in step_folders(root):
        try:
            manifest, problem = complete_manifest(folder), None
        except CheckpointError as error:
            manifest, problem = None, str(error)
        found.append(Checkpoint(folder, step, manifest, problem))
    complete = [each for each in found if each.manifest]
    unusable = [each for each in found if not each.manifest]
    return sorted(complete, key=lambda c: -c.manifest.generation) + unusable


def find(root: Path, which: str, *, say: Say = logger.warning) -> Path | None:
    """The folder of the checkpoint that ``which`` means. Not collective.

    Args:
        root: the run folder (``--output``).
        which: ``"auto"``: the newest complete checkpoint, None where there is none;
            ``"latest"``: the same, but there must be one;
            anything else: the path of a checkpoint, or of a run folder (its newest).
        say: gets a line for each checkpoint that is passed over because it is not usable.
    Raises:
        CheckpointError: there is none, or the one named is not complete.
    """
    if which == "auto":
        return _newest(root, say)
    return locate(root if which == "latest" else Path(which), say=say)


def locate(path: Path, *, say: Say = logger.warning) -> Path:
    """The checkpoint at a path: the folder itself, or a run folder's newest complete one.

    Raises:
        CheckpointError: the folder is not a complete checkpoint, or the run has none.
    """
    if is_checkpoint(path):
        complete_manifest(path)
        return path
    newest = _newest(path, say)
    if newest is None:
        raise WrongPath(f"{checkpoints_folder(path)}: no complete checkpoint there")
    return newest


def _newest(root: Path, say: Say) -> Path | None:
    checkpoints = list_checkpoints(root)
    for each in checkpoints:
        if each.problem:
            say(f"checkpoint passed over: {each.problem}")
    return next((each.folder for each in checkpoints if each.manifest), None)
