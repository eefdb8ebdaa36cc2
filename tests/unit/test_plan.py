"""``ds4d plan``: what a file's pipeline costs."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from ds4d import cli

LLAMA = {
    "model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 8, "num_attention_heads": 4,
}  # fmt: skip
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
    "ds4d": {
        "model": {"config": LLAMA},
        "data": {
            "seq_len": 64, "train": {"type": "python_stdlib"}, "tokenizer": {"vocab_size": 1000},
        },
        "parallel": {"pp": 4},
        "training": {"steps": 1},
    },
}  # fmt: skip


@pytest.fixture
def plan(tmp_path, capsys):
    """Call the command on the file, with so many keys changed; gives the code, what was printed and
    what was complained of."""
    file = tmp_path / "run.json"
    file.write_text(json.dumps(CONFIG))

    def call(*words, **keys) -> tuple[int, str, str]:
        changes = [f"ds4d.{key.replace('__', '.')}={json.dumps(v)}" for key, v in keys.items()]
        overrides = [word for change in changes for word in ("--set", change)]
        code = cli.main(["plan", str(file), *overrides, *map(str, words)])
        return code, *capsys.readouterr()

    return call


def test_for_people(plan):
    code, text, _ = plan(pipeline__split=[3, 2, 2, 1])
    lines = text.splitlines()
    assert code == 0
    assert lines[0] == "schedule   1f1b on 4 pipeline ranks, 8 micro-batches a step"
    assert lines[1].startswith("bubble     ") and "%" in lines[1]
    assert lines[2] == "split      3, 2, 2, 1 layers"
    rows = [line.split() for line in lines[-4:]]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("0", "0-2", "4"), ("1", "3-4", "3"), ("2", "5-6", "2"), ("3", "7", "1")
    ]  # fmt: skip


def test_for_programs_and_what_recomputation_costs(plan):
    told = {}
    for recompute in ("none", "full"):
        code, out, _ = plan("--json", pipeline__split=[2, 2, 2, 2], recompute=recompute)
        assert code == 0
        told[recompute] = json.loads(out)["pipeline"]
    plain, full = told["none"], told["full"]
    assert plain["split"] == [2, 2, 2, 2] and plain["guess"] is None
    assert plain["forward_costs"] == full["forward_costs"]
    assert sum(plain["forward_costs"]) == pytest.approx(4)
    middle = plain["forward_costs"][1]
    busy = {name: [rank["busy"] for rank in each["ranks"]] for name, each in told.items()}
    assert busy["none"] == pytest.approx([3 * 8 * cost for cost in plain["forward_costs"]])
    assert busy["full"][1] == pytest.approx(4 * 8 * middle)  # a forward pass more
    assert busy["full"][3] < 4 * busy["none"][3] / 3  # the head is not done again
    assert [rank["held_until_input"] for rank in plain["ranks"]] == [4, 3, 2, 1]
    for each in (plain, full):
        assert each["bubble"] == pytest.approx(
            sum(rank["idle"] for rank in each["ranks"]) / (4 * each["length"])
        )


@pytest.mark.parametrize(
    "schedule, chunks, stages",
    [
        ("interleaved", 2, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("dualpipev", 1, [[0, 7], [1, 6], [2, 5], [3, 4]]),
        ("zbv", 1, [[0, 7], [1, 6], [2, 5], [3, 4]]),
        ("zb-h1", 1, [[0], [1], [2], [3]]),
        ("gpipe", 1, [[0], [1], [2], [3]]),
    ],
)
def test_every_schedule(plan, schedule, chunks, stages):
    keys = {"pipeline__schedule": schedule, "pipeline__chunks": chunks}
    code, out, _ = plan("--json", **keys)
    told = json.loads(out)["pipeline"]
    assert code == 0 and (told["schedule"], told["micro_batches"]) == (schedule, 8)
    assert sum(told["split"]) == 8 and told["chunks"] == len(stages[0])
    assert [rank["stages"] for rank in told["ranks"]] == stages


def test_timelines(plan, tmp_path):
    svg, trace = tmp_path / "step.svg", tmp_path / "step.json"
    code, _, _ = plan("--timeline", svg, "--timeline", trace)
    assert code == 0
    passes = [rect for rect in ElementTree.parse(svg).iter() if rect.get("class") == "pass"]
    events = json.loads(trace.read_text())["traceEvents"]
    assert len(passes) == len([e for e in events if e["ph"] == "X"]) == 4 * 8 * 2


def test_a_model_that_is_not_here_is_guessed(plan):
    code, text, _ = plan(model={"path": "nobody/nothing"}, data__tokenizer={})
    assert code == 0 and "bubble     27.3%" in text  # (p - 1) / (m + p - 1)
    assert "a guess: the model nobody/nothing is not on this machine yet" in text


def test_without_a_pipeline(plan, tmp_path):
    code, text, _ = plan(parallel__pp=1)
    assert code == 0 and text.startswith("There is no pipeline") and text.count("\n") == 1
    assert json.loads(plan("--json", parallel__pp=1)[1]) == {"pipeline": None}
    code, _, err = plan("--timeline", tmp_path / "step.svg", parallel__pp=1)
    assert code == 2 and "There is no pipeline" in err and not (tmp_path / "step.svg").exists()


def test_a_schedule_that_the_file_cannot_have(plan):
    code, _, err = plan(pipeline__schedule="dualpipev", parallel__pp=5)
    assert code == 2 and "gradient_accumulation_steps" in err and "Traceback" not in err
