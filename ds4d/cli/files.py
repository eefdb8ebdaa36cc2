"""What can be said of a file before it is trained: ``check``, ``plan``, ``verify``, ``schema``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ds4d.cli.common import add_json, command, positive, quiet_libraries
from ds4d.launch.worker import add_set


def add_check(commands: Any) -> None:
    parser = command(
        commands, "check", _check,
        "find everything that is wrong with a file, or print it with every default filled in, and "
        "which rank holds what",
        "  ds4d check run.json --world-size 8\n"
        "  ds4d check run.json --hostfile hosts\n"
        "  ds4d check run.json --set ds4d.parallel.tp=2 --json",
    )  # fmt: skip
    _add_file(parser)
    add_json(parser)


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", type=Path)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--world-size", metavar="N", type=positive,
        help="ranks in all (default: what the file's own degrees need)",
    )  # fmt: skip
    where.add_argument(
        "--hostfile", metavar="FILE", type=Path,
        help="as many ranks as these hosts have; says where the layout is dear on them",
    )  # fmt: skip
    add_set(parser)


def _load(args: argparse.Namespace) -> Any:
    """The file of ``_add_file``, for the ranks that were asked for."""
    from ds4d.config.load import load

    hosts = None
    if args.hostfile is not None:
        quiet_libraries()
        from ds4d.launch.launcher import read_hostfile

        hosts = read_hostfile(args.hostfile)
    return load(
        args.config, overrides=args.overrides, world_size=args.world_size, hosts=hosts
    )


def _check(args: argparse.Namespace) -> None:
    from ds4d.config.report import as_dict, as_text

    run = _load(args)
    print(json.dumps(as_dict(run), indent=2) if args.json else as_text(run))


def add_plan(commands: Any) -> None:
    parser = command(
        commands, "plan", _plan,
        "say what a file's pipeline costs before it runs: its split, its idle time, the "
        "activations it holds",
        "  ds4d plan run.json\n"
        "  ds4d plan run.json --set ds4d.pipeline.schedule=interleaved --timeline step.svg",
    )  # fmt: skip
    _add_file(parser)
    parser.add_argument(
        "--timeline", metavar="FILE", type=_timeline, action="append", default=[],
        help="also write when each pass runs on each rank: .svg is a picture, .json a trace for "
        "Perfetto or chrome://tracing; may be repeated",
    )  # fmt: skip
    add_json(parser)


def _timeline(text: str) -> Path:
    from ds4d.pipeline.timeline import WRITERS

    if Path(text).suffix not in WRITERS:
        raise argparse.ArgumentTypeError(f"{text!r} ends neither in {' nor in '.join(WRITERS)}")
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no such folder")
    return Path(text)


def _plan(args: argparse.Namespace) -> None:
    from ds4d.config.report import plain
    from ds4d.planner.pipeline import as_dict, plan_pipeline, render, write_timelines

    plan = plan_pipeline(_load(args))
    write_timelines(plan, args.timeline)
    print(json.dumps(as_dict(plan), indent=2) if args.json else plain(render(plan)))


def add_verify(commands: Any) -> None:
    parser = command(
        commands, "verify", _verify,
        "train a small copy of a file's model in the file's layout, on CPU processes of this "
        "machine, and compare every number with one plain Hugging Face process",
        "  ds4d verify run.json\n"
        "  ds4d verify run.json --set ds4d.parallel.tp=2 --json\n"
        "  ds4d verify cluster.json --world-size 1024 --max-ranks 16",
    )  # fmt: skip
    _add_file(parser)
    parser.add_argument(
        "--max-ranks", metavar="N", type=positive, default=8,
        help="of a layout with more, degrees above 2 are reduced to 2, and it is said "
        "(default: 8)",
    )  # fmt: skip
    parser.add_argument("--steps", metavar="N", type=positive, default=3, help="(default: 3)")
    parser.add_argument(
        "--full", action="store_true",
        help="keep the model and the sequences as long as they are",
    )  # fmt: skip
    add_json(parser)


def _verify(args: argparse.Namespace) -> int:
    quiet_libraries()
    from ds4d.config.report import plain
    from ds4d.launch.failure import FAILURE
    from ds4d.verify.report import as_dict, render
    from ds4d.verify.run import verify

    report = verify(
        _load(args),
        steps=args.steps,
        max_ranks=args.max_ranks,
        full=args.full,
        say=lambda text: print(f"ds4d: {text}", file=sys.stderr),
    )
    print(json.dumps(as_dict(report), indent=2) if args.json else plain(render(report)))
    return 0 if report.passed else FAILURE


def add_schema(commands: Any) -> None:
    command(
        commands, "schema", _schema,
        "print the JSON Schema of the file: editors complete and explain with it",
        "  ds4d schema > schema.json",
    )  # fmt: skip


def _schema(_args: argparse.Namespace) -> None:
    from importlib.resources import files

    print(files("ds4d.config").joinpath("schema.json").read_text(encoding="utf-8"), end="")
