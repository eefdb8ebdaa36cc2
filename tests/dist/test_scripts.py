"""Real scripts, as subprocesses: with the line that the README says, in any layout, they log and
save what they do unchanged in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds4d.launch.variables import free_port
from tests.harness import run_distributed
from tests.script_runs import (
    BLOCK_SIZE,
    ROOT,
    Inputs,
    compare_models,
    make_inputs,
    read_log,
    run_ds4d,
    run_plain,
)

TOLERANCE = 1e-5
BATCH = 4  # samples of a dp rank
# name: (ds4d.parallel, ZeRO stage)
LAYOUTS = {
    "dp2-z2": ({"dp": 2}, 2),
    "tp2": ({"tp": 2}, 0),
    "cp2": ({"cp": 2}, 0),
    "tp2-dp2-z1": ({"tp": 2, "dp": 2}, 1),
    "pp2": ({"pp": 2}, 0),
    "tp2-pp2": ({"tp": 2, "pp": 2}, 0),
    "z3-tp2": ({"tp": 2, "dp": 2}, 3),
}
SCRIPTS = ("clm_accelerate.py", "clm_trainer.py", "loop.py")
# In every push: each layout, and each script in a layout of its own kind; the rest behind a mark.
IN_CI = {
    ("clm_accelerate.py", "tp2-dp2-z1"), ("clm_accelerate.py", "z3-tp2"),
    ("clm_trainer.py", "tp2-pp2"), ("clm_trainer.py", "dp2-z2"), ("loop.py", "pp2"),
    ("loop.py", "cp2"),
}  # fmt: skip
CASES = [
    pytest.param(script, layout, marks=() if (script, layout) in IN_CI else pytest.mark.slow)
    for script in SCRIPTS
    for layout in LAYOUTS
]
# Times, and what the Trainer counts of the steps of one call of train() alone.
NOT_COMPARED = ("runtime", "per_second", "flos", "train_loss")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def plainly(inputs, tmp_path_factory):
    """The unchanged script in one process, once for each set of arguments."""
    done: dict[tuple[str, ...], Path] = {}

    def run(script: str, args: list[str]) -> Path:
        key = (script, *args)
        if key not in done:
            done[key] = run_plain(script, tmp_path_factory.mktemp("plain"), args)
        return done[key]

    return run


def arguments(inputs: Inputs, script: str, batch: int, *, steps: int = 6) -> list[str]:
    """Of a run with warm-up, accumulation (but in the loop, whose samples differ in length),
    clipping and evaluation."""
    words = inputs.arguments(script)
    if script == "loop.py":
        return [
            *words, f"--batch_size={batch}", f"--eval_batch_size={batch}", "--eval_every=3",
            f"--max_steps={steps}", "--eval_from_logits",
        ]  # fmt: skip
    words += [
        f"--block_size={BLOCK_SIZE}", f"--per_device_train_batch_size={batch}",
        f"--per_device_eval_batch_size={batch}", "--gradient_accumulation_steps=2",
        "--learning_rate=1e-3", "--weight_decay=0.1", "--seed=1",
    ]  # fmt: skip
    if script == "clm_accelerate.py":
        return [
            *words, f"--max_train_steps={steps}", "--num_warmup_steps=2", "--use_seedable_sampler"
        ]  # fmt: skip
    return [
        *words, f"--max_steps={steps}", "--do_train", "--do_eval", "--logging_steps=1",
        "--eval_strategy=steps", "--eval_steps=3", "--save_strategy=no", "--warmup_steps=2",
        "--report_to=none",
    ]  # fmt: skip


def config(layout: str) -> tuple[dict, int]:
    """The file, and how many ranks it is for."""
    degrees, stage = LAYOUTS[layout]
    world_size = 1
    for degree in degrees.values():
        world_size *= degree
    content = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_optimization": {"stage": stage},
        "ds4d": {"parallel": degrees},
    }  # fmt: skip
    return content, world_size


def same_logs(expected: Path, actual: Path, *, last: int | None = None) -> None:
    """Every number, but for times.

    Args:
        last: compare so many of the last objects.
    """
    logs = [read_log(folder)[-(last or 0) :] for folder in (expected, actual)]
    assert len(logs[0]) == len(logs[1]) > 0
    for one, other in zip(*logs):
        for key, value in one.items():
            if isinstance(value, (int, float)) and not any(w in key for w in NOT_COMPARED):
                assert other[key] == pytest.approx(value, rel=TOLERANCE, abs=1e-12), (key, one)


@pytest.mark.parametrize(("script", "layout"), CASES)
def test_losses_rates_and_model_are_those_of_the_unchanged_script(
    script, layout, inputs, plainly, tmp_path
):
    content, world_size = config(layout)
    dp = LAYOUTS[layout][0].get("dp", 1)
    expected = plainly(script, arguments(inputs, script, BATCH * dp))
    actual = run_ds4d(script, tmp_path, arguments(inputs, script, BATCH), content, world_size)
    same_logs(expected, actual)
    assert compare_models(expected, actual) < TOLERANCE


@pytest.mark.parametrize(
    "launcher", ["deepspeed", pytest.param("accelerate", marks=pytest.mark.slow)]
)
def test_other_launchers(launcher, inputs, plainly, tmp_path):
    script = "clm_accelerate.py"
    content, world_size = config("tp2")
    expected = plainly(script, arguments(inputs, script, BATCH))
    words = arguments(inputs, script, BATCH)
    actual = run_ds4d(script, tmp_path, words, content, world_size, launcher)
    same_logs(expected, actual)


def test_the_trainer_is_found_by_accelerate_launch(inputs, plainly, tmp_path):
    script = "clm_trainer.py"
    content, world_size = config("tp2")
    expected = plainly(script, arguments(inputs, script, BATCH))
    words = arguments(inputs, script, BATCH)
    actual = run_ds4d(script, tmp_path, words, content, world_size, "accelerate")
    same_logs(expected, actual)


def test_accelerate_goes_on_in_another_layout(inputs, plainly, tmp_path):
    script = "clm_accelerate.py"
    expected = plainly(script, arguments(inputs, script, BATCH * 2))
    content, world_size = config("tp2-dp2-z1")
    words = [*arguments(inputs, script, BATCH), "--checkpointing_steps=3"]
    first = run_ds4d(script, tmp_path / "first", words, content, world_size)
    content, world_size = config("pp2")
    words = [
        *arguments(inputs, script, BATCH * 2), f"--resume_from_checkpoint={first / 'step_3'}"
    ]  # fmt: skip
    actual = run_ds4d(script, tmp_path / "second", words, content, world_size)
    same_logs(expected, actual, last=4)
    assert compare_models(expected, actual) < TOLERANCE


def test_the_trainer_goes_on_in_another_layout_and_ends_with_its_best_model(
    inputs, plainly, tmp_path
):
    script = "clm_trainer.py"

    def words(batch: int, *more: str) -> list[str]:
        kept = [w for w in arguments(inputs, script, batch) if w != "--save_strategy=no"]
        return [*kept, "--save_strategy=steps", "--save_steps=3", "--gradient_checkpointing", *more]

    best = "--load_best_model_at_end", "--metric_for_best_model=eval_loss", "--save_total_limit=1"
    expected = plainly(script, words(BATCH * 2, *best))
    content, world_size = config("dp2-z2")
    first = run_ds4d(script, tmp_path / "first", words(BATCH), content, world_size)
    content, world_size = config("tp2-pp2")
    again = words(BATCH * 2, *best, f"--resume_from_checkpoint={first / 'checkpoint-3'}")
    actual = run_ds4d(script, tmp_path / "second", again, content, world_size)
    assert compare_models(expected, actual) < TOLERANCE
    kept = [sorted(p.name for p in folder.glob("checkpoint-*")) for folder in (expected, actual)]
    assert kept[0] == kept[1]
    same_logs(expected, actual)


LAYOUTS_OF_CASES = {
    "tp2-dp2-z2": ({"tp": 2, "dp": 2}, 2, {}),
    "pp2-z1": ({"pp": 2}, 1, {}),
    "cp2-z3": ({"cp": 2}, 3, {}),
    "pp2-dp2-zbv": ({"pp": 2, "dp": 2}, 0, {"pipeline": {"schedule": "zbv"}}),
}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=() if name in ("tp2-dp2-z2", "pp2-z1") else pytest.mark.slow)
        for name in LAYOUTS_OF_CASES
    ],
)
def test_cases(layout, tmp_path):
    """``tests/script_cases``, all of them in one job."""
    degrees, stage, more = LAYOUTS_OF_CASES[layout]
    content = {"zero_optimization": {"stage": stage}, "ds4d": {"parallel": degrees, **more}}
    world_size = 4 if "dp" in degrees else 2
    ranks = ["--nproc-per-node", str(world_size), "--master-port", str(free_port())]
    done = run_cases(tmp_path, content, ["-m", "torch.distributed.run", *ranks])
    failures = [p.read_text() for p in sorted(tmp_path.glob("failed-*.txt"))]
    assert done.returncode == 0, "\n".join(failures) or done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results.values()) == {"passed"} and len(results) > 20


def run_cases(folder: Path, content: dict, words: list[str], *cases: str, **variables: str):
    (folder / "ds4d.json").write_text(json.dumps(content))
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = kept | {
        "DS4D_CONFIG": str(folder / "ds4d.json"), "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **variables,
    }  # fmt: skip
    command = [sys.executable, *words, "-m", "tests.script_cases", str(folder), *cases]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )


def test_a_script_without_a_launcher_is_one_process(tmp_path):
    """Case E08; and "use_cpu" does not drop the file without a word (peers.md 4, wall 1)."""
    cases = "metrics_count_every_sample_once", "labels_that_the_script_makes"
    done = run_cases(tmp_path, {"ds4d": {}}, [], *cases, ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(json.loads((tmp_path / "results.json").read_text())) == 2


def test_half_a_launchers_variables_are_refused(tmp_path):
    done = run_cases(tmp_path, {"ds4d": {}}, [], WORLD_SIZE="2")
    assert done.returncode != 0
    assert "missing RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT" in done.stderr


def met(alone):
    """What comes of a meeting to which one rank comes alone, or both."""
    import torch.distributed as dist

    from ds4d.accelerate.gathered import meet

    rank = dist.get_rank()
    if alone and rank == 1:
        return None
    try:
        meet(f"save_pretrained {alone}", rank=rank, size=2, seconds=1.0 if alone else 60.0)
    except RuntimeError as error:
        return str(error)
    return "met"


def test_saving_on_the_main_process_alone_does_not_hang():
    assert run_distributed(met, 2, alone=False) == ["met", "met"]
    text, _ = run_distributed(met, 2, alone=True)
    assert "was called on 1 of 2 ranks" in text and "all of them must call it" in text
