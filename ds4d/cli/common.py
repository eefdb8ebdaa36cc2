"""What subcommands share: how one is entered, and arguments of several of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

EXIT_CODES = "exit codes: 0 done, 2 wrong input, 1 failure"


def command(
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


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def quiet_libraries() -> None:
    """Before they are imported."""
    from ds4d.launch.runtime import quiet_libraries

    quiet_libraries()
