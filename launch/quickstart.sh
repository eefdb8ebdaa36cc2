#!/usr/bin/env bash
# From a fresh clone to a trained model: sets everything up, trains ds_configs/quickstart.json
# through the deepspeed launcher on all GPUs (or eight processes on CPU: tp 2 x pp 2 x cp 2), exports
# it, lets it write.
# Arguments go to `ds4d train`: bash launch/quickstart.sh --set ds4d.training.steps=20
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
setup plots
cd "$root"

run=runs/quickstart # the first name that is not taken: an earlier run is never overwritten
for ((n = 2; ; n++)); do
    [ -e "$run" ] || break
    run=runs/quickstart-$n
done
gpus=$("$python" -c 'from ds4d.launch.runtime import visible_gpus; print(len(visible_gpus()))')
if [ "$gpus" -gt 0 ]; then
    how=(--set bf16.enabled=true) # the quicker one there; on most CPUs it is far slower
else
    how=(--nproc 8)
fi

ds4d() { "$python" -m ds4d "$@"; }
ds4d train ds_configs/quickstart.json --output "$run" "${how[@]}" "$@"
ds4d export "$run" "$run/exported"
echo
echo "What the model writes after \"def \":"
ds4d generate "$run/exported" "def " --max-new-tokens 60 --temperature 0.7
echo
"$python" - "$run" <<'SUMMARY'
import sys
from pathlib import Path

from ds4d.monitor.metrics import read_metrics

run = Path(sys.argv[1])
steps = read_metrics(run / "metrics.jsonl")
print(f"loss {steps[0]['loss']:.2f} at step 1, {steps[-1]['loss']:.2f} at step {steps[-1]['step']}")
for what, path in (
    ("this run", run),
    ("every step", run / "metrics.jsonl"),
    ("loss curve", run / "loss.png"),
    ("file as used", run / "config.resolved.json"),
    ("checkpoints", run / "checkpoints"),
    ("HF model", run / "exported"),
    ("logs", run / "logs"),
):
    print(f"  {what:<14}{path}{'' if path.exists() else '  (not made)'}")
SUMMARY
