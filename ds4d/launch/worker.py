"""One rank of the main job: what a launcher starts, once per device.

``launch/train.py`` and ``python -m ds4d.launch.worker`` are the same. Only the standard library is
imported until the rank's output goes to its log, see ``ds4d.launch.runtime``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what to train; ``ds4d train`` has the same."""
    parser.add_argument("config", metavar="CONFIG", type=Path, help="the JSON file of the run")
    add_set(parser)
    parser.add_argument(
        "--output", metavar="DIR", type=Path,
        help="the run folder: metrics, checkpoints, logs (default: runs/NAME-OF-CONFIG)",
    )  # fmt: skip
    parser.add_argument(
        "--resume", metavar="auto|latest|PATH",
        help="continue from the run folder's newest complete checkpoint, if there is one (auto), "
        "or else fail (latest), or from the checkpoint at PATH",
    )  # fmt: skip


def add_set(parser: argparse.ArgumentParser) -> None:
    """``--set``, the same for every command that reads a file."""
    parser.add_argument(
        "--set", dest="overrides", metavar="KEY=VALUE", action="append", default=[],
        help="replace a value of the file, as in --set ds4d.training.steps=100; may be repeated",
    )  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Says what is wrong on one rank only."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") != "0":
            sys.exit(2)
        super().error(f"{message} (the launcher's own options go before launch/train.py)")


def main(argv: Sequence[str] | None = None) -> int:
    """Train as this process's rank; returns the exit code."""
    parser = _Parser(prog="launch/train.py", description="One rank of a training run.")
    add_run_arguments(parser)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # launchers add it; env says it
    args = parser.parse_args(argv)

    from ds4d.launch import runtime
    from ds4d.monitor.screen import say

    output = runtime.run_folder(args.config, args.output)

    def body(rank: runtime.Rank) -> int:
        say(f"{args.config} on {rank.launch.world_size} x {rank.device.type}, run folder {output}")
        from ds4d import trainer  # torch, DeepSpeed, transformers: slow, and not silent

        return trainer.main(rank, args.config, overrides=args.overrides, resume=args.resume)

    return runtime.run_rank(body, output=output)


if __name__ == "__main__":
    sys.exit(main())
