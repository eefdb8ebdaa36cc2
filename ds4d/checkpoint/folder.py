"""What a checkpoint on the disk is: its names, its manifest, and whether it is complete.

    OUTPUT/checkpoints/step-00000100/     a complete checkpoint, or one damaged since
        data-00000.safetensors ...        the boxes of each rank that wrote some
        index.json                        tensor -> dtype, shape, which box lies in which file
        rank-00000.pt ...                 what belongs to one rank: random states
        manifest.json                     step, layout, ``extra``, every file's size and checksum
    OUTPUT/checkpoints/.old-step-00000100 the same, while another is put in its place
    OUTPUT/checkpoints/.tmp-*             unfinished or being deleted: the next save removes it
    OUTPUT/checkpoints/latest             the last one saved, for people and scripts

The manifest is the last file written and the rename to the final name the last act, so a folder
without a manifest, or whose files differ from it, is not a checkpoint. ``generation`` counts the
saves of a run folder: it tells the newest even after a run went back to an earlier step, and
without a clock.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds4d.checkpoint.errors import CheckpointError
from ds4d.checkpoint.files import FileRecord, write_json

FORMAT = 1
MANIFEST = "manifest.json"
LATEST = "latest"
SET_ASIDE = ".old-"
STEP_FOLDER = re.compile(r"(\.old-)?step-(\d{8,})")


@dataclass(frozen=True)
class Manifest:
    """``saved_at``: UTC, ISO 8601."""

    format: int
    step: int
    generation: int
    world_size: int
    saved_at: str
    versions: dict[str, str]
    files: list[FileRecord]
    extra: dict[str, Any]

    def write(self, folder: Path) -> None:
        write_json(folder / MANIFEST, asdict(self), indent=1)


def checkpoints_folder(root: Path) -> Path:
    return root / "checkpoints"


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of all that may be checkpoints in a run folder, by name."""
    parent = checkpoints_folder(root)
    paths = sorted(parent.iterdir()) if parent.is_dir() else []
    matches = ((STEP_FOLDER.fullmatch(path.name), path) for path in paths)
    return [(int(match[2]), path) for match, path in matches if match]


def is_checkpoint(path: Path) -> bool:
    """Whether a path is meant to be a checkpoint, complete or not, rather than a run folder."""
    return bool(STEP_FOLDER.fullmatch(path.resolve().name)) or (path / MANIFEST).exists()


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def rank_state_name(rank: int) -> str:
    return f"rank-{rank:05d}.pt"


def read_manifest(folder: Path) -> Manifest:
    """
    Raises:
        CheckpointError: there is none, or it is not one that this version reads.
    """
    path = folder / MANIFEST
    try:
        fields = json.loads(path.read_bytes())
        if fields["format"] != FORMAT:
            raise CheckpointError(
                f"{path}: checkpoint format {fields['format']}; this ds4d reads format {FORMAT}"
            )
        fields["files"] = [FileRecord(**each) for each in fields["files"]]
        return Manifest(**fields)
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: incomplete: it has no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def complete_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there in their full sizes.

    Raises:
        CheckpointError: with the first file that is not.
    """
    manifest = read_manifest(folder)
    for record in manifest.files:
        try:
            size = (folder / record.name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{folder / record.name}: {error.strerror}") from None
        if size != record.bytes:
            raise CheckpointError(
                f"{folder / record.name}: {size} bytes; {record.bytes} were written"
            )
    return manifest


def tokenizer_folder(checkpoint: Path) -> Path:
    """Where the run that wrote a checkpoint keeps its tokenizer."""
    return checkpoint.resolve().parent.parent / "tokenizer"
