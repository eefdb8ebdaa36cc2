"""The ``ds4d`` command: parses, calls, prints. No logic, and nothing heavy imported before it is
needed, so that ``ds4d --help`` answers at once."""

from __future__ import annotations

import argparse
import json
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds4d import __version__
from ds4d.launch.worker import add_run_arguments, add_set

EXIT_CODES = "exit codes: 0 done, 2 wrong input, 1 failure"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    args = make_parser().parse_args(argv)
    try:
        return args.call(args) or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # | head
        sys.stderr.close()
        return 0
    except Exception as error:
        from ds4d.launch.failure import FAILURE, exit_code_for_people

        code = exit_code_for_people(error)
        if code is None:
            traceback.print_exc()
            return FAILURE
        print(f"ds4d: {error}", file=sys.stderr)
        return code


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ds4d",
        description="Train any Hugging Face causal language model in any layout: one JSON file, "
        "the same training curve.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"ds4d {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (
        _add_train, _add_check, _add_plan, _add_verify, _add_schema, _add_checkpoint, _add_export,
        _add_generate, _add_eval,
    ):  # fmt: skip
        add(commands)
    return parser


def _command(
    commands: Any, name: str, call: Callable[[argparse.Namespace], Any], about: str, examples: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=about,
        description=about[0].upper() + about[1:] + ".",
        epilog=f"examples:\n{examples}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(call=call)
    return parser


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


# -- train ----------------------------------------------------------------------------------


def _add_train(commands: Any) -> None:
    parser = _command(
        commands, "train", _train, "check a file, then train with the deepspeed launcher",
        "  ds4d train ds_configs/quickstart.json\n"
        "  ds4d train run.json --nproc 4 --set optimizer.params.lr=1e-4 --output runs/lr1e-4\n"
        "  ds4d train run.json --hostfile hosts --resume auto",
    )  # fmt: skip
    add_run_arguments(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--nproc", metavar="N", type=_positive,
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


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 1 to 65535")
    return int(text)


# -- files ----------------------------------------------------------------------------------


def _add_check(commands: Any) -> None:
    parser = _command(
        commands, "check", _check,
        "find everything that is wrong with a file, or print it with every default filled in, and "
        "which rank holds what",
        "  ds4d check run.json --world-size 8\n"
        "  ds4d check run.json --hostfile hosts\n"
        "  ds4d check run.json --set ds4d.parallel.tp=2 --json",
    )  # fmt: skip
    _add_file(parser)
    _add_json(parser)


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", type=Path)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--world-size", metavar="N", type=_positive,
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
        _quiet_libraries()
        from ds4d.launch.launcher import read_hostfile

        hosts = read_hostfile(args.hostfile)
    return load(
        args.config, overrides=args.overrides, world_size=args.world_size, hosts=hosts
    )


def _check(args: argparse.Namespace) -> None:
    from ds4d.config.report import as_dict, as_text

    run = _load(args)
    print(json.dumps(as_dict(run), indent=2) if args.json else as_text(run))


def _add_plan(commands: Any) -> None:
    parser = _command(
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
    _add_json(parser)


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


def _add_verify(commands: Any) -> None:
    parser = _command(
        commands, "verify", _verify,
        "train a small copy of a file's model in the file's layout, on CPU processes of this "
        "machine, and compare every number with one plain Hugging Face process",
        "  ds4d verify run.json\n"
        "  ds4d verify run.json --set ds4d.parallel.tp=2 --json\n"
        "  ds4d verify cluster.json --world-size 1024 --max-ranks 16",
    )  # fmt: skip
    _add_file(parser)
    parser.add_argument(
        "--max-ranks", metavar="N", type=_positive, default=8,
        help="of a layout with more, degrees above 2 are reduced to 2, and it is said "
        "(default: 8)",
    )  # fmt: skip
    parser.add_argument("--steps", metavar="N", type=_positive, default=3, help="(default: 3)")
    parser.add_argument(
        "--full", action="store_true",
        help="keep the model and the sequences as long as they are",
    )  # fmt: skip
    _add_json(parser)


def _verify(args: argparse.Namespace) -> int:
    _quiet_libraries()
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


def _add_schema(commands: Any) -> None:
    _command(
        commands, "schema", _schema,
        "print the JSON Schema of the file: editors complete and explain with it",
        "  ds4d schema > schema.json",
    )  # fmt: skip


def _schema(_args: argparse.Namespace) -> None:
    from importlib.resources import files

    print(files("ds4d.config").joinpath("schema.json").read_text(encoding="utf-8"), end="")


# -- after training -------------------------------------------------------------------------


def _add_checkpoint(commands: Any) -> None:
    parser = _command(
        commands, "checkpoint", None, "list, verify or remove the checkpoints of a run",
        "  ds4d checkpoint ls runs/quickstart\n"
        "  ds4d checkpoint verify runs/quickstart\n"
        "  ds4d checkpoint rm runs/quickstart 40",
    )  # fmt: skip
    acts = parser.add_subparsers(metavar="ACTION", required=True)
    ls = _command(
        acts, "ls", _list_checkpoints,
        "list them: step, size, what they were saved by and when, which is the newest, which are "
        "not usable and why",
        "  ds4d checkpoint ls runs/quickstart --json",
    )  # fmt: skip
    ls.add_argument("run", metavar="RUN", type=Path, help="the run folder")
    verify = _command(
        acts, "verify", _verify_checkpoints,
        "read every file and compare its checksum with what was written; exit code 1 if one "
        "differs",
        "  ds4d checkpoint verify runs/quickstart\n"
        "  ds4d checkpoint verify runs/quickstart/checkpoints/step-00000080",
    )  # fmt: skip
    verify.add_argument(
        "path", metavar="PATH", type=Path, help="a checkpoint, or a run folder: all of its"
    )
    rm = _command(
        acts, "rm", _remove_checkpoints,
        "remove those of these steps, unless a run uses the folder or none complete would be left",
        "  ds4d checkpoint rm runs/quickstart 20 40",
    )  # fmt: skip
    rm.add_argument("run", metavar="RUN", type=Path, help="the run folder")
    rm.add_argument("steps", metavar="STEP", type=_positive, nargs="+")
    rm.add_argument("--force", action="store_true", help="even the only complete one")
    for each in (ls, verify, rm):
        _add_json(each)


def _list_checkpoints(args: argparse.Namespace) -> None:
    from dataclasses import asdict

    from ds4d.checkpoint.manage import entries, render
    from ds4d.config.report import plain

    listed = entries(args.run)
    if args.json:
        print(json.dumps([asdict(entry) for entry in listed], indent=2))
    else:
        print(plain(render(listed)) if listed else f"{args.run} has no checkpoints")


def _verify_checkpoints(args: argparse.Namespace) -> int:
    from dataclasses import asdict

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


def _add_export(commands: Any) -> None:
    parser = _command(
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
    _add_json(parser)


def _size(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*[KMG]B", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number and KB, MB or GB, as in 5GB")
    return text


def _quiet_libraries() -> None:
    """Before they are imported."""
    from ds4d.launch.runtime import quiet_libraries

    quiet_libraries()


def _export(args: argparse.Namespace) -> None:
    _quiet_libraries()
    from ds4d.checkpoint.export import export

    out = export(
        args.checkpoint,
        args.out,
        dtype=args.dtype,
        max_shard_size=args.max_shard_size,
        force=args.force,
    )
    print(json.dumps({"path": str(out)}) if args.json else f"wrote {out}")


def _add_generate(commands: Any) -> None:
    parser = _command(
        commands, "generate", _generate,
        "continue text with a trained model: a run folder, a checkpoint or a Hugging Face folder",
        "  ds4d generate runs/quickstart 'def main():'\n"
        "  ds4d generate exported 'import os' 'class A' --temperature 0.8 --seed 1 --json",
    )  # fmt: skip
    parser.add_argument("path", metavar="PATH", type=Path)
    parser.add_argument("prompts", metavar="TEXT", nargs="+", help="what to continue")
    parser.add_argument("--max-new-tokens", metavar="N", type=_positive, default=64)
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.0,
        help="0 takes the likeliest token, more takes more risk (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--top-p", metavar="P", type=float, default=1.0,
        help="draw from the likeliest tokens that together have this probability (default: 1)",
    )  # fmt: skip
    parser.add_argument("--seed", metavar="N", type=int, default=0)
    _add_ranks(parser)
    _add_json(parser)


def _generate(args: argparse.Namespace) -> None:
    _quiet_libraries()
    from ds4d.generate import generate

    texts = _on_model(
        args,
        generate,
        args.prompts,
        generates=True,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        seed=args.seed,
    )
    if args.json:
        pairs = [{"prompt": p, "text": text} for p, text in zip(args.prompts, texts, strict=True)]
        print(json.dumps(pairs, indent=2, ensure_ascii=False))
    else:
        print("\n---\n".join(map("".join, zip(args.prompts, texts, strict=True))))


def _add_eval(commands: Any) -> None:
    parser = _command(
        commands, "eval", _eval,
        "the loss of a trained model on held-out data: of a run folder, a checkpoint or a Hugging "
        "Face folder",
        "  ds4d eval runs/quickstart\n"
        "  ds4d eval exported --source '{\"type\": \"text\", \"path\": \"held_out/*.txt\"}' --json",
    )  # fmt: skip
    parser.add_argument("path", metavar="PATH", type=Path)
    parser.add_argument(
        "--config", metavar="FILE", type=Path,
        help="take ds4d.data from this file (default: the file that the checkpoint was made with)",
    )  # fmt: skip
    parser.add_argument(
        "--source", metavar="JSON", type=_source, help="evaluate on this instead of ds4d.data.eval"
    )
    add_set(parser)
    _add_ranks(parser)
    _add_json(parser)


def _source(text: str) -> dict[str, Any]:
    try:
        source = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(source, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return source


def _eval(args: argparse.Namespace) -> None:
    _quiet_libraries()
    from ds4d.evaluate import evaluate

    found = _on_model(
        args,
        evaluate,
        config=args.config,
        source=args.source,
        overrides=args.overrides,
        progress=not args.json,
    )
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print("  ".join(f"{name} {value:,.6g}" for name, value in found.items()))


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    """Where the model is: see ``_on_model``."""
    parser.add_argument(
        "--tp", metavar="N", type=_positive, default=1,
        help="share each layer among N processes, each with its own GPU where there are some",
    )  # fmt: skip
    parser.add_argument(
        "--pp", metavar="N", type=_positive, default=1,
        help="share the layers among N stages of --tp processes each, which work in turn",
    )  # fmt: skip
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")


def _on_model(
    args: argparse.Namespace,
    function: Callable[..., Any],
    *more: Any,
    generates: bool = False,
    **kwargs: Any,
) -> Any:
    """``function(PATH, *more, **kwargs)``, in this process or on --pp x --tp ranks."""
    from ds4d.config.types import ParallelConfig
    from ds4d.launch.call import call_on_ranks
    from ds4d.saved_model import check_can_be_cut

    if args.pp * args.tp == 1:
        return function(args.path, *more, **kwargs, device=args.device or _default_device())
    check_can_be_cut(args.path, pp=args.pp, tp=args.tp, generates=generates)  # before ranks start
    parallel = ParallelConfig(pp=args.pp, tp=args.tp)
    return call_on_ranks(
        function, args.path, *more, **kwargs, parallel=parallel, device=args.device
    )


def _default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    sys.exit(main())
