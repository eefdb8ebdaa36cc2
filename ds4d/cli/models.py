"""A trained model at work: ``ds4d generate`` and ``eval``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds4d.cli.common import add_json, command, positive, quiet_libraries
from ds4d.launch.worker import add_set


def add_generate(commands: Any) -> None:
    parser = command(
        commands, "generate", _generate,
        "continue text with a trained model: a run folder, a checkpoint or a Hugging Face folder",
        "  ds4d generate runs/quickstart 'def main():'\n"
        "  ds4d generate exported 'import os' 'class A' --temperature 0.8 --seed 1 --json",
    )  # fmt: skip
    parser.add_argument("path", metavar="PATH", type=Path)
    parser.add_argument("prompts", metavar="TEXT", nargs="+", help="what to continue")
    parser.add_argument("--max-new-tokens", metavar="N", type=positive, default=64)
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
    add_json(parser)


def _generate(args: argparse.Namespace) -> None:
    quiet_libraries()
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


def add_eval(commands: Any) -> None:
    parser = command(
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
    add_json(parser)


def _source(text: str) -> dict[str, Any]:
    try:
        source = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(source, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return source


def _eval(args: argparse.Namespace) -> None:
    quiet_libraries()
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
        "--tp", metavar="N", type=positive, default=1,
        help="share each layer among N processes, each with its own GPU where there are some",
    )  # fmt: skip
    parser.add_argument(
        "--pp", metavar="N", type=positive, default=1,
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
