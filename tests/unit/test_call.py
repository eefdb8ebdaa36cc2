"""Commands on several ranks: what is refused before any starts, and what would be started."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from ds4d import cli
from ds4d.launch import call
from tests.unit.test_cli import call as command
from tests.unit.test_cli import refused


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
    sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=8, vocab_size=96)
    AutoConfig.for_model("llama", **sizes).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("argv", [("generate", "model", "text"), ("eval", "model")])
@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5"])
def test_a_wrong_number_of_ranks(capsys, argv, count):
    assert "--tp" in refused(capsys, *argv, f"--tp={count}")


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
        ("0123", ["--tp=8"], "8 ranks, but 4 GPUs are visible here: lower --tp"),
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


def test_a_model_that_cannot_be_cut_is_refused_before_any_rank_starts(capsys, gpus, model, jobs):
    gpus()
    assert cli.main(["generate", str(model), "text", "--tp=3"]) == 2
    message = capsys.readouterr().err
    assert "--tp: 3: this llama has 8 heads" in message and "tp can be 1, 2, 4, 8" in message
    assert not jobs
