"""Cases of ``ds4d.accelerate`` in one layout: a script that is started as users start theirs.

    torchrun --nproc-per-node N -m tests.script_cases FOLDER [CASE ...]

with ``ds4d.json`` in the folder. It runs all cases on the ranks of that layout, each against plain
Hugging Face on the whole global batch in the same process, and writes what came of each to
``results.json``. Ranks that disagree about a case would hang, so a case that fails ends the script.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from ds4d.accelerate import Accelerator
from tests.script_cases import (  # noqa: F401  (their cases enter CASES)
    data,
    evaluation,
    losses,
    optimizers,
    refusals,
    saving,
    trainer,
)
from tests.script_cases.common import CASES


def main() -> None:
    folder = Path(sys.argv[1])
    names = sys.argv[2:] or list(CASES)
    results = {}
    accelerator = Accelerator()
    dp = accelerator._these.mesh.parallel.dp
    for name in names:
        torch.manual_seed(0)
        try:
            CASES[name](dp)
        except BaseException:
            text = f"{name}, rank {dist.get_rank()}\n{traceback.format_exc()}"
            (folder / f"failed-{dist.get_rank()}.txt").write_text(text)
            print(text, file=sys.stderr, flush=True)
            raise
        results[name] = "passed"
        print(f"passed: {name}", flush=True)
    if accelerator.is_main_process:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
