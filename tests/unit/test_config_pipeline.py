"""Pipelines in the file: what is refused, what is resolved, what ``ds4d check`` shows."""

from __future__ import annotations

import json

import pytest

from ds4d.config.deepspeed_json import to_deepspeed
from ds4d.config.load import load, resolved
from ds4d.config.report import as_dict, as_text
from tests.unit.config_files import changed, problems

BY_COST = "leave it out to cut by cost, which gives"
NAMED = ["model.layers.2", "model.layers.4", "model.layers.6"]


def file(pp: int, *, layers: int = 8, accumulation: int = 8, pipeline=None, **more) -> dict:
    return changed(
        ds4d__parallel={"pp": pp},
        ds4d__model__config__num_hidden_layers=layers,
        gradient_accumulation_steps=accumulation,
        ds4d__pipeline=pipeline or {},
        **more,
    )


def of(schedule: str, chunks: int | None = None) -> dict:
    return {"schedule": schedule} | ({} if chunks is None else {"chunks": chunks})


REFUSED = {
    "fewer layers than ranks": (
        file(4, layers=3),
        {"ds4d.parallel.pp": "4 stages for num_hidden_layers 3 would leave some empty; "
                             "ds4d.parallel.pp can be 3 at most"},
    ),
    "one layer": (
        file(2, layers=1),
        {"ds4d.parallel.pp": "2 stages for num_hidden_layers 1 would leave some empty; "
                             "ds4d.parallel.pp can be 1 at most"},
    ),
    "fewer layers than chunks": (
        file(3, pipeline=of("interleaved", 3)),
        {"ds4d.parallel.pp": "3 x ds4d.pipeline.chunks 3 = 9 stages for num_hidden_layers 8 "
                             "would leave some empty; ds4d.parallel.pp can be 2 at most, or "
                             "ds4d.pipeline.chunks can be 2 at most"},
    ),
    "fewer layers than two chunks each": (
        file(4, layers=7, pipeline=of("dualpipev")),
        {"ds4d.parallel.pp": "4 x ds4d.pipeline.chunks 2 = 8 stages for num_hidden_layers 7 "
                             "would leave some empty; ds4d.parallel.pp can be 3 at most"},
    ),
    "no room for chunks": (
        file(2, layers=3, pipeline=of("dualpipev")),
        {"ds4d.parallel.pp": 'with ds4d.pipeline.schedule "1f1b", ds4d.parallel.pp can be 3'},
    ),
    "interleaved without chunks": (
        file(4, pipeline=of("interleaved")),
        {"ds4d.pipeline.chunks": '1: ds4d.pipeline.schedule "interleaved" needs 2 or more'},
    ),
    "chunks without interleaving": (
        file(4, pipeline={"chunks": 2}),
        {"ds4d.pipeline.chunks": "2: ds4d.pipeline.schedule '1f1b' has always 1 on each rank"},
    ),
    "gpipe with chunks": (
        file(4, pipeline=of("gpipe", 2)),
        {"ds4d.pipeline.chunks": "2: ds4d.pipeline.schedule 'gpipe' has always 1 on each rank"},
    ),
    "zb-h1 with chunks": (
        file(4, pipeline=of("zb-h1", 2)),
        {"ds4d.pipeline.chunks": "2: ds4d.pipeline.schedule 'zb-h1' has always 1 on each rank"},
    ),
    "three chunks of zbv": (
        file(2, pipeline=of("zbv", 3)),
        {"ds4d.pipeline.chunks": "3: ds4d.pipeline.schedule 'zbv' has always 2 on each rank"},
    ),
    "three chunks of dualpipev": (
        file(2, pipeline=of("dualpipev", 3)),
        {"ds4d.pipeline.chunks": "3: ds4d.pipeline.schedule 'dualpipev' has always 2"},
    ),
    "too few micro-batches": (
        file(4, accumulation=7, pipeline=of("dualpipev")),
        {"gradient_accumulation_steps": "7 is too few for ds4d.pipeline.schedule 'dualpipev': it "
                                        "fills the pipeline from both ends"},
    ),
    "offloading": (
        file(2, zero_optimization={"stage": 1, "offload_optimizer": {"device": "cpu"}}),
        {"zero_optimization.offload_optimizer": "cannot go with ds4d.parallel.pp 2"},
    ),
    "ZeRO 2": (
        file(2, zero_optimization={"stage": 2}),
        {"zero_optimization.stage": "(where memory is short, a larger ds4d.parallel.tp shares out "
                                    "gradients too), or ds4d.parallel.pp to 1"},
    ),
    "too few numbers": (
        file(4, pipeline={"split": [4, 4]}),
        {"ds4d.pipeline.split": f"[4, 4]: the 4 stages (ds4d.parallel.pp x ds4d.pipeline.chunks) "
                                f"need 4 numbers of layers, not 2; {BY_COST} [2, 2, 2, 2]"},
    ),
    "no numbers": (
        file(4, pipeline={"split": []}),
        {"ds4d.pipeline.split": "need 4 numbers of layers, not 0"},
    ),
    "numbers for ranks instead of chunks": (
        file(2, pipeline={**of("interleaved", 2), "split": [4, 4]}),
        {"ds4d.pipeline.split": f"need 4 numbers of layers, not 2; {BY_COST} [2, 2, 2, 2]"},
    ),
    "another sum": (
        file(4, pipeline={"split": [2, 2, 2, 3]}),
        {"ds4d.pipeline.split": f"[2, 2, 2, 3] makes 9 layers, and the model has 8; {BY_COST}"},
    ),
    "an empty stage": (
        file(4, pipeline={"split": [3, 0, 3, 2]}),
        {"ds4d.pipeline.split": "[3, 0, 3, 2]: stage 1 would have 0 layers; each needs 1 or more"},
    ),
    "numbers and names": (
        file(4, pipeline={"split": [2, "model.layers.4", 2, 2]}),
        {"ds4d.pipeline.split": "give numbers of layers, or names of layers, not both"},
    ),
    "too few names": (
        file(4, pipeline={"split": ["model.layers.2"]}),
        {"ds4d.pipeline.split": f"the 4 stages (ds4d.parallel.pp x ds4d.pipeline.chunks) need 3 "
                                f"names of layers, where each after the first one begins, not 1; "
                                f"{BY_COST} {json.dumps(NAMED)}"},
    ),
    "an unknown name": (
        file(4, pipeline={"split": ["model.layers.2", "model.layer.4", "model.layers.6"]}),
        {"ds4d.pipeline.split": '"model.layer.4" is no layer of this model, whose layers are '
                                'model.layers.0 to model.layers.7; did you mean "model.layers.4"?'},
    ),
    "a layer too far": (
        file(2, pipeline={"split": ["embedding"]}),
        {"ds4d.pipeline.split": f'"embedding" is no layer of this model, whose layers are '
                                f'model.layers.0 to model.layers.7; {BY_COST} ["model.layers.4"]'},
    ),
    "names that do not ascend": (
        file(4, pipeline={"split": ["model.layers.2", "model.layers.6", "model.layers.4"]}),
        {"ds4d.pipeline.split": '"model.layers.4" does not come after model.layers.6, where the '
                                "stage before it begins"},
    ),
    "the first layer": (
        file(2, pipeline={"split": ["model.layers.0"]}),
        {"ds4d.pipeline.split": '"model.layers.0" does not come after model.layers.0'},
    ),
    "neither text nor number": (
        file(2, pipeline={"split": [4.5, 3.5]}),
        {"ds4d.pipeline.split.0": "4.5 is not allowed", "ds4d.pipeline.split.1": "3.5"},
    ),
    "autocast": (
        file(2) | {"torch_autocast": {"enabled": True}},
        {"torch_autocast.enabled": "stages run without DeepSpeed's autocast"},
    ),
    "DeepSpeed's own pipeline": (
        file(2, **{"pipeline": None}) | {"pipeline": {"stages": 2}},
        {"pipeline": "write ds4d.parallel.pp and ds4d.pipeline"},
    ),
    "words from elsewhere": (
        file(1)
        | {
            "pipeline_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
            "pipeline_parallel_schedule": "1F1B", "partition_method": "uniform",
        },
        {
            "pipeline_parallel_size": "ds4d's key for it is ds4d.parallel.pp",
            "virtual_pipeline_model_parallel_size": "ds4d.pipeline.chunks",
            "pipeline_parallel_schedule": "ds4d.pipeline.schedule",
            "partition_method": "ds4d.pipeline.split",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("content, expected", REFUSED.values(), ids=REFUSED)
def test_refused(content, expected):
    found = problems(content)
    assert set(found) == set(expected), found
    for path, words in expected.items():
        assert words in found[path]


def test_the_largest_that_is_named_works():
    for pp, layers, pipeline in [
        (3, 3, {}),
        (2, 8, of("interleaved", 3)),
        (3, 8, of("interleaved", 2)),
        (3, 7, of("dualpipev")),
    ]:
        assert problems(file(pp, layers=layers, pipeline=pipeline)) == {}


def test_a_model_that_can_not_be_staged(monkeypatch):
    monkeypatch.setattr("ds4d.pipeline.check.why_not_staged", lambda config: "it is a ring")
    assert problems(file(2, pipeline={"split": [4, 4]})) == {"ds4d.parallel.pp": "it is a ring"}
    assert problems(file(1)) == {}


def test_a_wrong_model_is_reported_once():
    content = file(2, pipeline={"split": [4, 4]}, ds4d__model__config__num_key_value_heads=3)
    assert list(problems(content)) == ["ds4d.model.config"]


def test_a_wrong_batch_is_reported_once():
    content = file(2, pipeline={"split": [4, 4]}, train_batch_size=7)
    assert list(problems(content)) == ["train_batch_size"]


# -- resolved ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pp, pipeline, chunks, split",
    [
        (2, {}, 1, (4, 4)),
        (4, of("gpipe"), 1, (2, 2, 2, 2)),
        (4, of("zb-h1"), 1, (2, 2, 2, 2)),
        (2, of("interleaved", 2), 2, (2, 2, 2, 2)),
        (2, of("dualpipev"), 2, (2, 2, 2, 2)),
        (2, of("dualpipev", 2), 2, (2, 2, 2, 2)),
        (2, of("zbv"), 2, (2, 2, 2, 2)),
        (2, {"split": [5, 3]}, 1, (5, 3)),
        (4, {"split": ["model.layers.1", "model.layers.2", "model.layers.7"]}, 1, (1, 1, 5, 1)),
    ],
)
def test_chunks_and_split_are_filled_in(pp, pipeline, chunks, split):
    run = load(file(pp, pipeline=pipeline), world_size=pp)
    assert (run.pipeline.chunks, run.pipeline.split) == (chunks, split)
    text = json.dumps(resolved(run))
    again = load(json.loads(text), world_size=pp)
    assert again == run and resolved(again) == resolved(run) and again.notes == run.notes == ()


def test_without_a_pipeline_nothing_is_filled_in():
    run = load(file(1), world_size=1)
    assert (run.pipeline.chunks, run.pipeline.split) == (1, None)
    run = load(file(1, pipeline={"schedule": "dualpipev", "split": [4, 4]}), world_size=1)
    assert run.notes == (
        "ds4d.pipeline.schedule has no effect: ds4d.parallel.pp is 1",
        "ds4d.pipeline.split has no effect: ds4d.parallel.pp is 1",
    )


@pytest.mark.parametrize("what", ["model", "vocabulary"])
def test_what_is_not_here_yet_is_cut_later(what):
    unknown = {
        "model": {"ds4d__model": {"path": "nobody/never-downloaded"}},
        "vocabulary": {"ds4d__data__tokenizer": {"path": "nobody/never-downloaded"}},
    }[what]
    content = changed(**unknown, ds4d__parallel={"pp": 2}, gradient_accumulation_steps=2)
    run = load(content)
    assert run.pipeline.split is None and load(resolved(run)) == run
    assert as_dict(run)["pipeline"]["stages"] is None
    assert "costs are known when the model and its vocabulary are here" in as_text(run)


def test_an_explicit_split_needs_no_vocabulary():
    tokenizer = {"path": "nobody/never-downloaded"}
    run = load(file(2, pipeline={"split": ["model.layers.3"]}, ds4d__data__tokenizer=tokenizer))
    assert run.pipeline.split == (3, 5)
    told = as_dict(run)["pipeline"]
    assert [stage["layers"] for stage in told["stages"]] == [[0, 3], [3, 8]]
    assert told["stages"][0]["share"] is None and told["imbalance"] is None
    wrong = file(2, pipeline={"split": [3, 4]}, ds4d__data__tokenizer=tokenizer)
    assert "makes 7 layers, and the model has 8" in problems(wrong)["ds4d.pipeline.split"]


# -- notes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pp, micro_batches, schedule, idle",
    [(4, 2, "1f1b", "60%"), (2, 1, "gpipe", "50%"), (4, 4, "1f1b", None), (4, 8, "1f1b", None)],
)
def test_too_few_micro_batches_are_a_note(pp, micro_batches, schedule, idle):
    """(p - 1) / (m + p - 1) of the time."""
    run = load(file(pp, accumulation=micro_batches, pipeline=of(schedule)), world_size=pp)
    expected = (
        f"gradient_accumulation_steps {micro_batches} is less than ds4d.parallel.pp {pp}: too few "
        f"micro-batches to keep the pipeline busy, its ranks would be idle for {idle} of a step"
    )
    assert list(run.notes) == ([] if idle is None else [expected])


@pytest.mark.parametrize(
    "pp, step, why",
    [(2, 5, None), (2, 6, "ds4d.training.steps is 5"), (1, 1, "ds4d.parallel.pp is 1")],
)
def test_a_timeline_of_no_step_is_a_note(pp, step, why):
    training = {"steps": 5}
    given = file(pp, ds4d__monitor={"timeline_step": step}, ds4d__training=training)
    run = load(given, world_size=pp)
    assert run.monitor.timeline_step == step
    told = [note for note in run.notes if "timeline_step" in note]
    number = f" {step}" if pp > 1 else ""
    assert told == ([f"ds4d.monitor.timeline_step{number} has no effect: {why}"] if why else [])


def test_communication_is_not_overlapped_with_a_pipeline():
    zero = {"stage": 1, "overlap_comm": True}
    run = load(file(2, zero_optimization=zero), world_size=2)
    assert run.notes == (
        "zero_optimization.overlap_comm has no effect: a pipeline reduces its gradients once, "
        "after the last backward pass",
    )
    assert to_deepspeed(run, on_cpu=True)["zero_optimization"]["overlap_comm"] is False
    alone = load(file(1, zero_optimization=zero), world_size=1)
    assert to_deepspeed(alone, on_cpu=True)["zero_optimization"]["overlap_comm"] is True


def test_fp16_is_allowed():
    assert problems(file(2, fp16={"enabled": True}, zero_optimization={"stage": 1})) == {}


# -- check ------------------------------------------------------------------------------------


def test_the_report_for_people():
    split = {**of("interleaved", 2), "split": [1, 2, 2, 3]}
    text = as_text(load(file(2, pipeline=split), world_size=2))
    assert "pipeline   interleaved, 2 ranks x 2 chunks; the busiest rank has " in text
    rows = [line.split() for line in text.splitlines() if "%" in line]
    assert rows[0][-1] == "mean"
    *_, first, second, third, last = rows
    assert first[:5] == ["0", "0", "0", "0", "1"] and first[-1] == "embedding"
    assert second[:5] == ["1", "1", "0", "1-2", "2"]
    assert third[:5] == ["2", "0", "1", "3-4", "2"] and third[5] == second[5]
    assert last[:5] == ["3", "1", "1", "5-7", "3"] and last[-1] == "head"
    alone = as_text(load(file(1), world_size=1))
    assert "pipeline   " not in alone and "cost" not in alone


def test_the_report_for_programs():
    told = as_dict(load(file(2, pipeline=of("dualpipev")), world_size=2))["pipeline"]
    json.dumps(told)
    assert (told["schedule"], told["chunks"]) == ("dualpipev", 2)
    places = [(stage["rank"], stage["chunk"], stage["layers"]) for stage in told["stages"]]
    assert places == [(0, 0, [0, 2]), (1, 0, [2, 4]), (1, 1, [4, 6]), (0, 1, [6, 8])]
    shares = [stage["share"] for stage in told["stages"]]
    assert sum(shares) == pytest.approx(1)
    ranks = [shares[0] + shares[3], shares[1] + shares[2]]
    assert told["imbalance"] == pytest.approx(2 * max(ranks) - 1) and told["imbalance"] > 0
    assert as_dict(load(file(1), world_size=1))["pipeline"] is None
