"""From `deepspeed` typed to the first step finished: ds4d against a bare DeepSpeed script.

    python -m benchmarks.startup [--rounds 3] [--json]

Both train the quickstart's model for one step on two CPU ranks; ds4d also checks the file, finds
the data prepared, draws layout-independent weights and writes its run folder. They take turns; the
figure is wall seconds, the ratio the median over the rounds. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "ds_configs" / "quickstart.json"
LAUNCHER = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2"]


def seconds_until(command: list[str], line: str) -> float:
    """Wall time until a line of the output holds ``line``; the job is then left to end."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )
    found = None
    for text in process.stdout:
        if found is None and line in text:
            found = time.perf_counter() - start
    if process.wait() or found is None:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return found


def bare() -> float:
    command = [*LAUNCHER, "benchmarks/bare_deepspeed.py", str(CONFIG)]
    return seconds_until(command, "first step finished")


def ds4d(folder: Path) -> float:
    settings = ["ds4d.training.steps=1", "ds4d.checkpoint.final=false", "ds4d.data.eval=null"]
    settings += ["ds4d.training.eval_every=null", "ds4d.monitor.plot=false"]
    arguments = [part for setting in settings for part in ("--set", setting)]
    command = [*LAUNCHER, "launch/train.py", str(CONFIG), "--output", str(folder), *arguments]
    return seconds_until(command, "step 1/1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ds4d(Path(folder) / "warm-up")  # tokenises, fills the page cache
        pairs = [(bare(), ds4d(Path(folder) / str(i))) for i in range(args.rounds)]
    result = {
        "bare_seconds": statistics.median(b for b, _ in pairs),
        "ds4d_seconds": statistics.median(d for _, d in pairs),
        "ratio": statistics.median(d / b for b, d in pairs),
    }
    text = "first step: bare {bare_seconds:.1f} s, ds4d {ds4d_seconds:.1f} s, ratio {ratio:.2f}"
    print(json.dumps(result, indent=2) if args.json else text.format(**result))


if __name__ == "__main__":
    main()
