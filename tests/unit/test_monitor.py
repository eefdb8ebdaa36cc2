from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from ds4d.checkpoint.saver import Saved
from ds4d.monitor import Monitor, screen
from ds4d.monitor.display import Display, duration
from ds4d.monitor.metrics import MetricsFile, read_metrics
from ds4d.monitor.plot import plot_losses
from ds4d.pipeline.recorder import Measured
from ds4d.pipeline.schedules import make_schedule
from ds4d.pipeline.simulate import Costs, simulate


def metrics(step: int, **more) -> dict:
    values = {
        "step": step, "loss": 4.0 / step, "grad_norm": 1.5, "lr": 3e-4, "tokens": 1000,
        "samples": 8, "consumed_samples": 8 * step, "step_seconds": 0.5,
        "tokens_per_second": 2000.0, "peak_memory_bytes": 3 * 2**30,
    }  # fmt: skip
    return values | more


def write(path, steps, start=0):
    file = MetricsFile(path, start=start)
    for step in steps:
        file.write(metrics(step))
    file.close()


def test_each_line_is_there_at_once(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl", start=0)
    file.write(metrics(1))
    assert read_metrics(tmp_path / "m.jsonl") == [metrics(1)]


def test_resume_continues_one_curve(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, [1, 2, 3, 4])
    with open(path, "a") as file:
        file.write('{"step": 5, "lo')  # killed while it wrote
    write(path, [3, 4, 5, 6], start=2)
    assert [entry["step"] for entry in read_metrics(path)] == [1, 2, 3, 4, 5, 6]


def test_a_new_run_keeps_the_old_file(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, [1, 2])
    write(path, [1])
    assert len(read_metrics(path)) == 1
    assert len(read_metrics(tmp_path / "m.jsonl.old")) == 2


def test_numbers_that_json_lacks_become_null(tmp_path):
    file = MetricsFile(tmp_path / "m.jsonl", start=0)
    file.write(metrics(1, loss=math.nan, grad_norm=math.inf))
    line = (tmp_path / "m.jsonl").read_text()
    strict = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert strict["loss"] is None and strict["grad_norm"] is None


def show(*lines, terminal=False, **options) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=40)
    display = Display(console, total_steps=100, **options)
    for line in lines:
        display.step(line)
    display.close()
    return output.getvalue()


def test_a_step_is_one_plain_line_in_a_log():
    text = show(metrics(1), num_devices=2, flops_per_step=2e12, peak_tflops=10.0)
    assert text == (
        "step   1/100  loss 4.0000  grad norm 1.500  lr 3.00e-04  2,000 tokens/s (1,000/device)  "
        "2.000 TFLOP/s/device  MFU 20.0%  peak 3.00 GiB  500 ms  ETA 00:50\n"
    )


def test_no_mfu_without_a_peak_and_optional_figures():
    text = show(metrics(2, eval_loss=3.25, loss_scale=1024.0, skipped=True))
    assert "MFU" not in text and "TFLOP" not in text
    assert "eval loss 3.2500" in text and "loss scale 1024" in text and "SKIPPED" in text


def test_not_finite_is_shown_as_it_is():
    assert "loss nan" in show(metrics(1, loss=math.nan))


def test_a_terminal_has_a_bar_below_the_lines():
    text = show(metrics(50), terminal=True)
    assert "step  50/100" in text and "50%" in text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "00:00"),
        (42, "00:42"),
        (3723.4, "1:02:03"),
        (86400 * 2, "2 days, 0:00:00"),
        (math.inf, "?"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_plot_writes_a_png(tmp_path):
    path = tmp_path / "m.jsonl"
    file = MetricsFile(path, start=0)
    for step in range(1, 4):
        file.write(metrics(step, **({"eval_loss": 3.0} if step == 2 else {})))
    plot_losses(path, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def output(monkeypatch):
    text = io.StringIO()
    monkeypatch.setattr(screen, "_console", Console(file=text, width=40))
    return text


def test_what_a_save_cost_is_in_the_line_of_its_step(tmp_path, output):
    """It is shown at once, and written when the save is through, or the run ends in it."""
    with Monitor(tmp_path, is_speaker=True, total_steps=3) as monitor:
        monitor.step(metrics(1), complete=False)
        assert "step 1/3" in output.getvalue() and not read_metrics(tmp_path / "metrics.jsonl")
        monitor.waited_for_save(0.5)
        monitor.complete()
        monitor.saved(Saved(tmp_path, 123, 7.0))
        monitor.step(metrics(2))
        monitor.step(metrics(3), complete=False)
    first, second, third = read_metrics(tmp_path / "metrics.jsonl")
    assert first == metrics(1) | {"save_seconds": 0.5}
    assert second == metrics(2) | {"save_bytes": 123, "background_save_seconds": 7.0}
    assert third == metrics(3)


@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_run_killed_before_its_line_gets_it_from_the_checkpoint(tmp_path, left):
    write(tmp_path / "metrics.jsonl", range(1, left + 1))
    MetricsFile(tmp_path / "metrics.jsonl", start=2, last=metrics(2)).close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [metrics(1), metrics(2)]


def test_monitor_ends_by_saying_where_things_are(tmp_path, output):
    with Monitor(tmp_path, is_speaker=True, total_steps=2) as monitor:
        monitor.step(metrics(1))
        monitor.step(metrics(2))
        monitor.saved(Saved(tmp_path / "checkpoints" / "step-00000002", 1))
        monitor.finished()
    summary = output.getvalue().split("done in", 1)[1]
    for name in ("metrics.jsonl", "loss.png", "step-00000002", "logs"):
        assert str(tmp_path) in summary and name in summary
    assert (tmp_path / "loss.png").exists()


def test_a_measured_pipeline_is_told_beside_the_simulated_one(tmp_path, output):
    schedule = make_schedule("1f1b", ranks=2, chunks=1, micro_batches=4)
    slow, ideal = (
        simulate(schedule, Costs((2.0, second), (4.0, second), (0.0, 0.0))).timeline
        for second in (4.0, 2.0)
    )
    with Monitor(tmp_path, is_speaker=True, total_steps=2, plot=False) as monitor:
        monitor.step(metrics(2))
        monitor.timeline(Measured(slow, ideal))
        monitor.finished()
    told = output.getvalue()
    idle = [f"{each.bubble:.1%} (by rank {first:.1%}, {last:.1%})"
            for each in (slow, ideal) for first, last in [each.idle_fraction]]  # fmt: skip
    assert idle[0] != idle[1]
    assert f"step 2: measured idle {idle[0]}; simulated with the same mean costs {idle[1]}" in told
    assert str(tmp_path / "timeline.svg") in told
    assert "1f1b, 2 ranks, 4 micro-batches: step 2" in (tmp_path / "timeline.svg").read_text()
    assert len(json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]) == 3 + 16


def test_other_ranks_are_silent(tmp_path, output):
    with Monitor(tmp_path, is_speaker=False, total_steps=2) as monitor:
        monitor.step(metrics(1))
        monitor.note("x")
        monitor.finished()
    assert output.getvalue() == "" and not list(tmp_path.iterdir())
