"""The ``ds4d`` command: parses, calls, prints. No logic, and nothing heavy imported before it is
needed, so that ``ds4d --help`` answers at once."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from ds4d import __version__
from ds4d.cli.checkpoints import add_checkpoint, add_export
from ds4d.cli.common import EXIT_CODES
from ds4d.cli.files import add_check, add_plan, add_schema, add_verify
from ds4d.cli.models import add_eval, add_generate
from ds4d.cli.train import add_train


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
        add_train, add_check, add_plan, add_verify, add_schema, add_checkpoint, add_export,
        add_generate, add_eval,
    ):  # fmt: skip
        add(commands)
    return parser
