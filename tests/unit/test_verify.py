"""``ds4d verify`` without ranks: what is made small, compared, blamed and said."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from ds4d import cli
from ds4d.config.errors import ConfigError, Problem
from ds4d.config.report import plain
from ds4d.config.types import ParallelConfig
from ds4d.verify import run as verify_run
from ds4d.verify.bisect import Finding, Trial, axes_of, bisect, overrides
from ds4d.verify.compare import EXACT, Off, Row, allowing_rounding, compare, tensor_rows
from ds4d.verify.layout import fewer_ranks
from ds4d.verify.plain import Result, read_steps, train_plainly
from ds4d.verify.ranks import LayoutResult
from ds4d.verify.report import Report, as_dict, render
from ds4d.verify.small import make_small
from tests.verify_runs import run_of

# -- small ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "degrees, most, left, noted",
    [
        (dict(dp=4, tp=2), 8, dict(dp=4, tp=2), []),
        (dict(dp=128, tp=8), 8, dict(dp=2, tp=2), ["dp", "tp"]),
        (dict(dp=4, tp=4), 8, dict(dp=2, tp=4), ["dp"]),
        (dict(dp=4, cp=8, pp=4, tp=8), 16, dict(dp=2, cp=2, pp=2, tp=2), ["dp", "cp", "pp", "tp"]),
    ],
)
def test_degrees_above_two_are_reduced_one_after_the_other(degrees, most, left, noted):
    parallel, notes = fewer_ranks(ParallelConfig(**degrees), most)
    assert parallel == ParallelConfig(**left)
    assert [note.split()[0] for note in notes] == noted


def test_too_few_ranks_allowed():
    with pytest.raises(
        ConfigError, match="--max-ranks: 8 is too few for pp 2 x dp 2 x cp 2 x tp 2"
    ):
        fewer_ranks(ParallelConfig(tp=2, pp=2, cp=4, dp=4), 8)


def small_of(tmp_path, run, **options):
    return make_small(run, tmp_path, **{"steps": 2, "max_ranks": 8} | options)


def test_the_layout_stays_and_the_rest_is_small(tmp_path):
    run = run_of(
        tp=2, pp=2, pipeline={"schedule": "interleaved", "chunks": 2}, recompute="selective",
        training={"label_smoothing": 0.1, "z_loss": 1e-3, "decay_all": True, "seed": 7},
        keys={"scheduler": {"type": "cosine"}, "bf16": {"enabled": True}},
    )  # fmt: skip
    small = small_of(tmp_path, run).run()
    assert small.parallel == run.parallel and small.pipeline.schedule == "interleaved"
    assert small.pipeline.split == (2, 2, 2, 1)  # the last has the head
    assert (small.recompute, small.zero_stage) == (run.recompute, run.zero_stage)
    assert small.precision == run.precision
    assert replace(small.training, steps=10) == run.training
    assert small.batch.accumulation == 4 and "scheduler" not in small.deepspeed
    assert small.data.seq_len < run.data.seq_len


def test_what_divides_and_what_does_not_stays_so(tmp_path):
    small = small_of(tmp_path, run_of(tp=4)).run()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["vocab_size"] % 4 == 4097 % 4
    assert config["num_key_value_heads"] == 4 and config["num_attention_heads"] == 8
    assert small.parallel.tp == 4


def test_an_uneven_split_stays_uneven(tmp_path):
    run = run_of(pp=2, pipeline={"split": [3, 5]})
    assert small_of(tmp_path, run).run().pipeline.split == (1, 2)


def test_dropout_is_off_and_said(tmp_path):
    model = dict(model_type="gpt2", vocab_size=4097, n_embd=64, n_layer=2, n_head=4)
    small = small_of(tmp_path, run_of(model | {"bos_token_id": 1, "eos_token_id": 2}))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["resid_pdrop"] == config["embd_pdrop"] == config["attn_pdrop"] == 0
    assert any("resid_pdrop" in note for note in small.notes)


def test_full_keeps_the_model(tmp_path):
    run = run_of(pp=2)
    small = small_of(tmp_path, run, full=True).run()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"]) == (256, 8)
    assert small.data.seq_len == run.data.seq_len and small.pipeline.split == run.pipeline.split


def test_own_data_are_taken_as_they_are_and_others_drawn(tmp_path):
    run = run_of()
    own, drawn = tmp_path / "own", tmp_path / "drawn"
    for folder in (own, drawn):
        folder.mkdir()
    assert small_of(own, run).samples.startswith("samples of ds4d.data.train (tokens)")
    lines = [json.loads(line) for line in (own / "samples.jsonl").read_text().splitlines()]
    assert {-100} < {label for line in lines for label in line["labels"]}
    assert max(token for line in lines for token in line["input_ids"]) < 256
    hub = replace(run.data, train=replace(run.data.train, type="hf", path="some/data"))
    made = small_of(drawn, run.replace(data=hub))
    assert made.samples.startswith("random tokens: ds4d.data.train is a data set")
    lines = [json.loads(line) for line in (drawn / "samples.jsonl").read_text().splitlines()]
    assert max(map(max, (line["document_ids"] for line in lines))) > 0


def test_the_reference_reads_what_was_written(tmp_path):
    small = small_of(tmp_path, run_of(), steps=2).run()
    steps = list(read_steps(small))
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert sum(ids.numel() for step in steps for ids, _, _ in step) == sum(
        len(line["input_ids"]) for line in lines
    )
    result = train_plainly(small)
    assert len(result.losses) == 2 and min(g.norm() for g in result.gradients.values()) > 1e-4


# -- compare -------------------------------------------------------------------------------------


def result(scale: float = 1.0) -> Result:
    first, second = torch.linspace(1, 2, 6).view(2, 3), torch.ones(3)
    gradients = {"first": first * scale, "second": second}
    before = {"first": first, "second": second}
    after = {"first": first * (1 - 0.01 * scale), "second": second * 0.99}
    return Result([5.0, 4.0], [5.0, 4.0], [10, 11], gradients, before, after)


def layout(whole: Result, **changes) -> LayoutResult:
    return replace(LayoutResult(whole, 0, (0.0, ""), True, Counter(), Counter(), []), **changes)


def failed(rows) -> list[str]:
    return [f"{row.what} {row.where}".strip() for row in rows if not row.passed]


def test_equal_results_pass():
    assert not failed(compare(layout(result()), result()))


def test_more_bytes_than_the_formula_says_are_not_within():
    sent = layout(
        result(),
        sent=Counter({"block": 101, "loss": 7, "pipeline": 5, "gradient norm": 16}),
        foretold=Counter({"block": 100, "loss": 9, "pipeline": 0, "head": 0}),
    )
    rows = [row for row in compare(sent, result()) if row.what.startswith("bytes")]
    assert {row.what: (row.expected, row.found) for row in rows} == {
        "bytes sent: block": (100, 101),
        "bytes sent: loss": (9, 7),
        "bytes sent: pipeline": (0, 5),
    }
    assert failed(rows) == ["bytes sent: block", "bytes sent: pipeline"]


def test_more_activations_than_the_schedule_keeps_are_not_within():
    rows = compare(layout(result(), activations=[(90, 100), (110, 100), (0, 0)]), result())
    assert failed(rows) == ["activation bytes held rank 1"]
    assert not failed(compare(layout(result(), activations=[(90, 100), (100, 100)]), result()))


@pytest.mark.parametrize(
    "change, rows",
    [
        (dict(losses=[5.0, 4.001]), ["loss, step 2"]),
        (dict(losses=[5.0, math.nan]), ["loss, step 2"]),
        (dict(grad_norms=[5.001, 4.0]), ["grad norm, step 1"]),
        (dict(tokens=[10, 12]), ["tokens, step 2"]),
        (dict(gradients=result(1.001).gradients), ["gradient first"]),
        (dict(gradients={"first": torch.full((2, 3), math.nan)}), ["gradient first"]),
        (dict(after=result(1.1).after), ["weight first"]),
        (dict(after={"first": result().after["first"]}),
         ["tensors that only one has second", "weight second"]),
    ],
)  # fmt: skip
def test_each_number_has_its_row(change, rows):
    assert failed(compare(layout(replace(result(), **change)), result())) == rows


@pytest.mark.parametrize(
    "change, row",
    [
        (dict(skipped=1), "steps left out"),
        (dict(disagreement=(1e-7, "first")), "copies first"),
        (dict(steps_agree=False), "what ranks say of the steps"),
    ],
)
def test_ranks_must_agree(change, row):
    assert failed(compare(layout(result(), **change), result())) == [row]


def test_rounding_counts_as_much_as_in_the_plain_process():
    off = compare(layout(result(1 + 3e-5)), result())
    assert failed(off) == ["gradient first"]
    assert not failed(allowing_rounding(off, result(), result(1 + 2e-5)))
    assert failed(allowing_rounding(off, result(), result(1 + 5e-6))) == failed(off)


def test_a_gradient_that_is_nothing_may_become_small_steps():
    gradients = {"first": result().gradients["first"], "second": torch.full((3,), 1e-8)}
    after = {"first": result().after["first"], "second": torch.ones(3) * (1 - 1e-6)}
    still = replace(result(), gradients=gradients, after={**after, "second": torch.ones(3)})
    found = layout(replace(still, after=after))
    assert not failed(compare(found, still))
    learned = replace(still, gradients=result().gradients)
    found = layout(replace(learned, after=after))
    assert failed(compare(found, learned)) == ["weight second"]


def test_half_precision_may_be_as_far_as_plain_half_precision():
    near, far = result(1.01), result(1.2)
    assert not failed(compare(layout(near), result(), near, precision="bf16"))
    wrong = failed(compare(layout(far), result(), near, precision="bf16"))
    assert wrong == ["gradients, all", "gradient first", "updates, all", "update first"]


def test_any_small_weight_may_be_the_one_that_rounding_moves():
    def moved(**off: float) -> Result:
        """Ten weights, some of which are off by a part of their move."""
        before = {f"w{i}": torch.ones(4) for i in range(10)}
        after = {n: x * (0.99 - 0.01 * off.get(n, 0.001)) for n, x in before.items()}
        return Result([5.0], [5.0], [10], before, before, after)

    half = moved(w0=0.08)
    for off, is_right in ((0.12, True), (0.4, False)):
        rows = tensor_rows(layout(moved(w1=off)), moved(), half, precision="bf16")["update"]
        assert [row.where for row in rows if not row.passed] == ([] if is_right else ["w1"])


# -- bisect --------------------------------------------------------------------------------------

OFF = (Off("gradient", "first", 1.0),)
WHOLE = Trial(False, OFF)


def blamed(axes: tuple[str, ...], *culprits: set[str]) -> tuple[Finding, int]:
    """Of faults that show where all of some axes are."""
    tried = []

    def attempt(without: tuple[str, ...]) -> Trial:
        here = set(axes) - set(without)
        tried.append(here)
        wrong = any(culprit <= here for culprit in culprits)
        return Trial(not wrong, OFF if wrong else ())

    return bisect(axes, WHOLE, attempt), len(tried)


@pytest.mark.parametrize(
    "culprits, axes, right_without",
    [
        ([{"pp"}], ("pp",), True),
        ([{"pp", "zero"}], ("pp", "zero"), True),
        ([{"tp"}, {"pp"}], ("tp",), False),
        ([set()], (), None),
        ([{"tp", "pp", "zero"}], ("tp", "pp", "zero"), None),
    ],
)
def test_the_fewest_axes_are_blamed(culprits, axes, right_without):
    finding, _ = blamed(("tp", "pp", "zero"), *culprits)
    assert (finding.axes, finding.right_without, finding.off) == (axes, right_without, OFF)


def test_a_layout_that_there_is_not_is_not_blamed():
    def attempt(_without):
        raise ConfigError([Problem("tp", "no")])

    assert bisect(("tp", "pp", "cp"), WHOLE, attempt).axes == ("tp", "pp", "cp")


def test_what_is_nothing_without_another_axis_is_not_tried_without():
    tried = []

    def attempt(without):
        tried.append(without)
        return Trial(True, ())

    bisect(("tp", "sequence_parallel", "pp"), WHOLE, attempt)
    tp, sp, pp = "tp", "sequence_parallel", "pp"
    assert tried == [(tp, sp, pp), (sp, pp), (tp, sp), (pp,), (sp,)]


def test_what_takes_axes_away_is_said_once():
    words = overrides(("tp", "sequence_parallel", "zero"))
    assert words == (
        "ds4d.parallel.tp=1", "ds4d.parallel.sequence_parallel=false", "zero_optimization.stage=0"
    )  # fmt: skip


def test_axes_of_a_run():
    run = run_of(tp=2, cp=2, recompute="full", keys={"bf16": {"enabled": True}})
    assert axes_of(run) == ("tp", "sequence_parallel", "cp", "zero", "recompute", "bf16")
    assert axes_of(run_of(dp=2, stage=0)) == ("dp",)


# -- command -------------------------------------------------------------------------------------


def report(*rows: Row, finding: Finding | None = None) -> Report:
    return Report(run_of(tp=2), "llama", "samples", ("a note",), rows, {"block": 1000}, finding)


GOOD = Row("loss, step 1", 1e-7, EXACT, "", 5.0, 5.0)
BAD = Row("gradient", math.nan, EXACT, "model.norm.weight")


def test_a_report_reads_well():
    shown = plain(render(report(GOOD, BAD, finding=Finding(("tp",), OFF, True))))
    assert "note: a note" in shown and "FAIL: 1 of 2" in shown and "block 1,000" in shown
    assert "it goes wrong with tp alone; without, the layout is right" in shown
    assert "first gradient that is off: first (1.0e+00), the only one" in shown
    told = json.loads(json.dumps(as_dict(report(GOOD, BAD)), allow_nan=False))
    assert not told["passed"] and told["rows"][1]["error"] == "nan"
    assert plain(render(report(GOOD))).endswith("PASS")


@pytest.mark.parametrize("rows, code", [((GOOD,), 0), ((GOOD, BAD), 1)])
def test_exit_codes(monkeypatch, capsys, tmp_path, rows, code):
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"optimizer": {"type": "AdamW"}}))
    assert cli.main(["verify", str(file)]) == 2
    monkeypatch.setattr("ds4d.config.load.load", lambda *_args, **_kwargs: None)
    monkeypatch.setattr(verify_run, "verify", lambda *_args, **_kwargs: report(*rows))
    capsys.readouterr()
    assert cli.main(["verify", str(file), "--json"]) == code
    assert json.loads(capsys.readouterr().out)["passed"] == (code == 0)
