"""Commands on several ranks: what is refused before any starts, and what would be started."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from ds4d import cli
from ds4d.launch import call
from tests.unit.test_cli import call as command
from tests.unit.test_cli import refused

LLAMA = dict(
    model_type="llama", hidden_size=32, num_hidden_layers=2, num_attention_heads=8, vocab_size=96
)
RWKV = dict(
    model_type="rwkv", hidden_size=32, attention_hidden_size=32, num_hidden_layers=4, vocab_size=96
)
XLNET = dict(model_type="xlnet", d_model=32, n_layer=2, n_head=2, d_inner=32, vocab_size=96)


@pytest.fixture
def jobs(monkeypatch):
    """Jobs that would be run; each fails with code 1."""
    started = []
    monkeypatch.setattr(call, "run_job", lambda job: started.append(job) or 1)
    return started


@pytest.fixture
def gpus(monkeypatch):
    def pretend(*names):
        monkeypatch.setattr(call, "visible_gpus", lambda: names)

    return pretend


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    AutoConfig.for_model(**LLAMA).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("argv", [("generate", "model", "text"), ("eval", "model")])
@pytest.mark.parametrize("axis", ["--tp", "--pp"])
@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5"])
def test_a_wrong_number_of_ranks(capsys, argv, axis, count):
    assert axis in refused(capsys, *argv, f"{axis}={count}")


@pytest.mark.parametrize("argv", [("generate", "text"), ("eval",)])
@pytest.mark.parametrize("count", ["1", "2"])
def test_no_model_there(capsys, tmp_path, jobs, argv, count):
    name, *more = argv
    code, out, err = command(capsys, name, tmp_path / "none", *more, "--tp", count)
    assert (code, out, jobs) == (2, "", [])
    assert "neither a Hugging Face folder" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "visible, options, message",
    [
        ("0123", ["--tp=8"], "8 ranks, but 4 GPUs are visible here: start fewer"),
        ("", ["--tp=2", "--device=cuda"], "no GPU is visible"),
        ("01", ["--tp=2", "--device=cuda:1"], "--device cuda:1: "),
    ],
)
def test_no_place_for_the_ranks(capsys, gpus, model, jobs, visible, options, message):
    gpus(*visible)
    code, out, err = command(capsys, "generate", model, "text", *options)
    assert (code, out, jobs) == (2, "", [])
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "visible, options, devices",
    [("567", [], ("5", "6")), ("567", ["--device=cuda"], ("5", "6")), ("567", ["--device=cpu"], ())]
    + [("", [], ())],
)
def test_each_rank_takes_its_device(gpus, model, jobs, visible, options, devices):
    gpus(*visible)
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", str(model), "text", "--tp=2", *options])
    (job,) = jobs
    assert ended.value.code == 1
    assert job.num_ranks == 2 and job.gpus[:2] == devices
    assert ("DS_ACCELERATOR", "cpu") in job.environment().items() or devices


@pytest.mark.parametrize(
    "config, options, messages",
    [
        (LLAMA, ["--tp=3"], ["--tp: 3: this llama has 8 heads", "tp can be 1, 2, 4, 8"]),
        (LLAMA, ["--pp=4"], ["--pp: 4 stages for 2 layers would leave some empty; pp can be 2 at"]),
        (LLAMA, ["--pp=3", "--tp=3"], ["--pp: 3 stages", "--tp: 3: this llama"]),
        (XLNET, ["--pp=2"], ["--pp: model_type xlnet can't be cut into stages"]),
        (RWKV, ["--pp=2"], ["--pp: model_type rwkv can't generate in stages", "state, is no"]),
    ],
)
def test_what_cannot_be_cut_is_refused_before_any_rank_starts(
    capsys, gpus, tmp_path, jobs, config, options, messages
):
    gpus()
    AutoConfig.for_model(**config).save_pretrained(tmp_path)
    code, out, err = command(capsys, "generate", tmp_path, "text", *options)
    assert (code, out, jobs) == (2, "", [])
    assert all(message in err for message in messages)


def test_stages_evaluate_what_they_cannot_generate_with(gpus, tmp_path, jobs):
    gpus()
    AutoConfig.for_model(**RWKV).save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(["eval", str(tmp_path), "--pp=2"])
    assert jobs[0].num_ranks == 2


def test_stages_of_ranks(gpus, model, jobs):
    gpus()
    with pytest.raises(SystemExit):
        cli.main(["eval", str(model), "--pp=2", "--tp=4"])
    assert jobs[0].num_ranks == 8
