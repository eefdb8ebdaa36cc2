"""``ds4d train``."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds4d.cli.common import command, positive
from ds4d.launch.worker import add_run_arguments


def add_train(commands: Any) -> None:
    parser = command(
        commands, "train", _train, "check a file, then train with the deepspeed launcher",
        "  ds4d train ds_configs/quickstart.json\n"
        "  ds4d train run.json --nproc 4 --set optimizer.params.lr=1e-4 --output runs/lr1e-4\n"
        "  ds4d train run.json --hostfile hosts --resume auto",
    )  # fmt: skip
    add_run_arguments(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--nproc", metavar="N", type=positive,
        help="ranks on this machine (default: every GPU, or on CPU as many as the file needs)",
    )  # fmt: skip
    where.add_argument(
        "--hostfile", metavar="FILE", type=Path,
        help="train on these hosts, a line each: HOST slots=N",
    )  # fmt: skip
    parser.add_argument(
        "--master-addr", metavar="ADDR",
        help="address of the first host that the others reach (default: found by the launcher)",
    )  # fmt: skip
    parser.add_argument(
        "--master-port", metavar="PORT", type=_port, help="default: one that is free here"
    )


def _train(args: argparse.Namespace) -> int:
    from ds4d.launch.launcher import plan_job, run_job
    from ds4d.launch.runtime import run_folder

    job = plan_job(
        args.config,
        overrides=args.overrides,
        output=run_folder(args.config, args.output),
        resume=args.resume,
        nproc=args.nproc,
        hostfile=args.hostfile,
    )
    return run_job(replace(job, address=args.master_addr, port=args.master_port))


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 1 to 65535")
    return int(text)
