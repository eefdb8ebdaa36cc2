"""What ``ds4d checkpoint`` does with the checkpoints of a run: list, verify, remove."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ds4d.checkpoint.errors import CheckpointError, WrongPath
from ds4d.checkpoint.files import checksum, damage, discard, replace_text
from ds4d.checkpoint.find import Checkpoint, list_checkpoints
from ds4d.checkpoint.folder import (
    LATEST,
    Manifest,
    checkpoints_folder,
    complete_manifest,
    is_checkpoint,
)
from ds4d.config.layout import AXES
from ds4d.data.progress import Bar
from ds4d.run_lock import locked

MIB = 2**20


@dataclass(frozen=True)
class Entry:
    """One checkpoint as ``ls`` shows it.

    Attributes:
        dtype: that was trained in; the masters and moments in the checkpoint are fp32.
        layout: that wrote it, as in ``"tp 2, pp 2, zero 1"``; None where that is not recorded.
        saved_at: UTC, ISO 8601.
        problem: why it cannot be used; None: it is complete.
    """

    step: int
    path: str
    newest: bool
    bytes: int
    dtype: str | None = None
    layout: str | None = None
    ranks: int | None = None
    saved_at: str | None = None
    problem: str | None = None


def entries(root: Path) -> list[Entry]:
    """All checkpoints of a run folder by step; what is not usable has its reason. Contents are not
    read, see ``verify``.

    Raises:
        WrongPath: no run folder is there.
    """
    found = list_checkpoints(_run_folder(root))
    newest = next((each for each in found if each.manifest), None)
    made = [_entry(each, newest=each is newest) for each in found]
    return sorted(made, key=lambda entry: (entry.step, entry.path))


def _run_folder(root: Path) -> Path:
    if not checkpoints_folder(root).is_dir():
        raise WrongPath(f"{root} is no run folder: it has no {checkpoints_folder(root).name}/")
    return root


def _entry(checkpoint: Checkpoint, *, newest: bool) -> Entry:
    folder, manifest = checkpoint.folder, checkpoint.manifest
    if manifest is None:
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        return Entry(checkpoint.step, str(folder), newest, size, problem=checkpoint.problem)
    return Entry(
        checkpoint.step,
        str(folder),
        newest,
        _bytes(manifest),
        manifest.extra.get("dtype"),
        _layout(manifest),
        manifest.world_size,
        manifest.saved_at,
    )


def _layout(manifest: Manifest) -> str | None:
    config = manifest.extra.get("config")
    if config is None:
        return None
    degrees = config["ds4d"]["parallel"]
    words = [f"{axis} {degrees[axis]}" for axis in AXES if degrees[axis] > 1]
    stage = config.get("zero_optimization", {}).get("stage", 0)
    return ", ".join([*words, f"zero {stage}"])


def render(listed: Sequence[Entry]) -> Group:
    table = Table(box=None, pad_edge=False)
    for name in ("step", "size"):
        table.add_column(name, justify="right")
    for name in ("dtype", "ranks", "layout", "saved (UTC)", ""):
        table.add_column(name)
    for entry in listed:
        state = "newest" if entry.newest else "UNUSABLE" if entry.problem else ""
        words = (entry.dtype, entry.ranks, entry.layout, (entry.saved_at or "-")[:19])
        cells = ["-" if word is None else str(word) for word in words]
        table.add_row(str(entry.step), f"{entry.bytes / MIB:,.1f} MiB", *cells, state)
    problems = [Text(f"unusable: {each.problem}") for each in listed if each.problem]
    return Group(table, *problems)


# -- verify ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """Attributes:
    bytes: that were read.
    problems: one line for each file that is not what was written; none: the checkpoint is right.
    """

    path: str
    bytes: int
    problems: tuple[str, ...]


def verify(path: Path, *, show: bool) -> list[Verdict]:
    """Read every file of a checkpoint, or of all checkpoints of a run folder, and compare its
    checksum with what was written.

    Args:
        show: a progress bar.

    Raises:
        WrongPath: neither is there.
    """
    folders = [path]
    if not is_checkpoint(path):
        folders = [each.folder for each in list_checkpoints(_run_folder(path))]
        if not folders:
            raise WrongPath(f"{checkpoints_folder(path)}: no checkpoint there")
    manifests = {folder: _manifest(folder) for folder in folders}
    readable = [each for each in manifests.values() if isinstance(each, Manifest)]
    total = sum(map(_bytes, readable))
    verdicts, done = [], 0
    with Bar("verifying, MiB", total // MIB, show=show) as bar:
        for folder, manifest in manifests.items():
            if isinstance(manifest, str):
                verdicts.append(Verdict(str(folder), 0, (manifest,)))
                continue
            damaged = []
            for record in manifest.files:

                def watch(count: int, name: str = f"{folder.name}/{record.name}") -> None:
                    nonlocal done
                    done += count
                    bar.update(done // MIB, name)

                try:
                    found = checksum(folder / record.name, watch=watch)
                except OSError as error:
                    damaged.append(f"{folder / record.name} cannot be read: {error.strerror}")
                    continue
                if found != record.xxh3:
                    damaged.append(damage(folder, record, found))
            verdicts.append(Verdict(str(folder), _bytes(manifest), tuple(damaged)))
    return verdicts


def _bytes(manifest: Manifest) -> int:
    return sum(record.bytes for record in manifest.files)


def _manifest(folder: Path) -> Manifest | str:
    try:
        return complete_manifest(folder)
    except CheckpointError as error:
        return str(error)


# -- remove ---------------------------------------------------------------------------------


def remove(root: Path, steps: Sequence[int], *, force: bool = False) -> list[Path]:
    """Remove the checkpoints of these steps; each vanishes from the list in one instant.

    Args:
        force: even where no complete checkpoint would be left.
    Returns:
        their folders.
    Raises:
        WrongPath: no checkpoint of such a step; or the last complete one is among them.
        FolderInUse: a run uses the folder.
        CheckpointError: the file system refuses.
    """
    folder = checkpoints_folder(_run_folder(root))
    with locked(root):
        found = list_checkpoints(root)
        chosen = [each for each in found if each.step in set(steps)]
        absent = sorted(set(steps) - {each.step for each in chosen})
        if absent:
            there = ", ".join(str(each.step) for each in found) or "none"
            raise WrongPath(f"{folder}: no checkpoint of step {absent[0]}; there are {there}")
        left = [each for each in found if each.manifest and each not in chosen]
        if not left and not force and any(each.manifest for each in chosen):
            raise WrongPath(
                f"{folder}: no complete checkpoint would be left to continue from; --force "
                "removes it all the same"
            )
        try:
            for each in chosen:
                discard(each.folder)
            latest = folder / LATEST
            if left:
                replace_text(latest, left[0].folder.name + "\n")
            else:
                latest.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"not all of them could be removed: {error}") from None
        return [each.folder for each in chosen]
