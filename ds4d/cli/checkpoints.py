"""What a run has saved: ``ds4d checkpoint`` and ``export``."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds4d.cli.common import add_json, command, positive, quiet_libraries


def add_checkpoint(commands: Any) -> None:
    parser = command(
        commands, "checkpoint", None, "list, verify or remove the checkpoints of a run",
        "  ds4d checkpoint ls runs/quickstart\n"
        "  ds4d checkpoint verify runs/quickstart\n"
        "  ds4d checkpoint rm runs/quickstart 40",
    )  # fmt: skip
    acts = parser.add_subparsers(metavar="ACTION", required=True)
    ls = command(
        acts, "ls", _list_checkpoints,
        "list them: step, size, what they were saved by and when, which is the newest, which are "
        "not usable and why",
        "  ds4d checkpoint ls runs/quickstart --json",
    )  # fmt: skip
    ls.add_argument("run", metavar="RUN", type=Path, help="the run folder")
    verify = command(
        acts, "verify", _verify_checkpoints,
        "read every file and compare its checksum with what was written; exit code 1 if one "
        "differs",
        "  ds4d checkpoint verify runs/quickstart\n"
        "  ds4d checkpoint verify runs/quickstart/checkpoints/step-00000080",
    )  # fmt: skip
    verify.add_argument(
        "path", metavar="PATH", type=Path, help="a checkpoint, or a run folder: all of its"
    )
    rm = command(
        acts, "rm", _remove_checkpoints,
        "remove those of these steps, unless a run uses the folder or none complete would be left",
        "  ds4d checkpoint rm runs/quickstart 20 40",
    )  # fmt: skip
    rm.add_argument("run", metavar="RUN", type=Path, help="the run folder")
    rm.add_argument("steps", metavar="STEP", type=positive, nargs="+")
    rm.add_argument("--force", action="store_true", help="even the only complete one")
    for each in (ls, verify, rm):
        add_json(each)


def _list_checkpoints(args: argparse.Namespace) -> None:
    from ds4d.checkpoint.manage import entries, render
    from ds4d.config.report import plain

    listed = entries(args.run)
    if args.json:
        print(json.dumps([asdict(entry) for entry in listed], indent=2))
    else:
        print(plain(render(listed)) if listed else f"{args.run} has no checkpoints")


def _verify_checkpoints(args: argparse.Namespace) -> int:
    from ds4d.checkpoint.manage import verify
    from ds4d.launch.failure import FAILURE

    verdicts = verify(args.path, show=not args.json)
    if args.json:
        print(json.dumps([asdict(verdict) for verdict in verdicts], indent=2))
    else:
        for verdict in verdicts:
            print("\n".join(verdict.problems) or f"{verdict.path}: {verdict.bytes:,} bytes, right")
    return FAILURE if any(verdict.problems for verdict in verdicts) else 0


def _remove_checkpoints(args: argparse.Namespace) -> None:
    from ds4d.checkpoint.manage import remove

    removed = [str(folder) for folder in remove(args.run, args.steps, force=args.force)]
    lines = "\n".join(f"removed {folder}" for folder in removed)
    print(json.dumps({"removed": removed}) if args.json else lines)


def add_export(commands: Any) -> None:
    parser = command(
        commands, "export", _export,
        "write a checkpoint as a Hugging Face folder, for AutoModelForCausalLM.from_pretrained",
        "  ds4d export runs/quickstart exported\n"
        "  ds4d export runs/quickstart/checkpoints/step-00000100 exported --dtype bf16",
    )  # fmt: skip
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="a checkpoint, or a run folder: its newest",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="default: as trained")
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", type=_size, default="5GB",
        help="of a file of weights: a number and KB, MB or GB (default: 5GB)",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace OUT if it is there")
    add_json(parser)


def _size(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*[KMG]B", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number and KB, MB or GB, as in 5GB")
    return text


def _export(args: argparse.Namespace) -> None:
    quiet_libraries()
    from ds4d.checkpoint.export import export

    out = export(
        args.checkpoint,
        args.out,
        dtype=args.dtype,
        max_shard_size=args.max_shard_size,
        force=args.force,
    )
    print(json.dumps({"path": str(out)}) if args.json else f"wrote {out}")
