from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ds4d import __version__, cli

COMMANDS = ["train", "check", "plan", "verify", "schema", "checkpoint", "export", "generate", "eval"]
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "ds4d": {
        "model": {
            "config": {
                "model_type": "llama", "vocab_size": 300, "hidden_size": 32,
                "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            }
        },
        "data": {
            "seq_len": 8, "train": {"type": "python_stdlib"}, "tokenizer": {"vocab_size": 300},
        },
        "training": {"steps": 1},
    },
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "run.json"
    file.write_text(json.dumps(CONFIG))
    return file


def call(capsys, *argv) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys, *argv) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(argv))
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_help_names_every_command_and_imports_nothing_heavy():
    script = (
        "import sys\nfrom ds4d.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'deepspeed', 'transformers', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert all(f"    {command} " in done.stdout for command in COMMANDS)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_and_exit_codes(capsys, command):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and f"ds4d {command}" in text and cli.EXIT_CODES in text


def test_version_also_as_a_module():
    command = [sys.executable, "-m", "ds4d", "--version"]
    assert subprocess.check_output(command, text=True) == f"ds4d {__version__}\n"


@pytest.mark.parametrize(
    "argv",
    [
        [], ["trian", "x.json"], ["train"], ["train", "x.json", "--nproc", "0"],
        ["train", "x.json", "--nproc", "2", "--hostfile", "h"],
        ["train", "x.json", "--num_gpus", "2"],
        ["train", "x.json", "--master-port", "0"], ["check", "x.json", "--world-size", "two"],
        ["plan", "x.json", "--timeline", "x.png"], ["plan", "x.json", "--timeline", "no/x.svg"],
    ],
)  # fmt: skip
def test_wrong_arguments_exit_2(capsys, argv):
    assert "usage: ds4d" in refused(capsys, *argv)


def test_schema_is_json(capsys):
    code, out, _ = call(capsys, "schema")
    assert code == 0 and "ds4d" in json.loads(out)["properties"]


def test_check_for_people_and_for_programs(capsys, config):
    code, text, _ = call(capsys, "check", config, "--world-size", "2")
    assert code == 0 and "dp 2" in text
    code, out, _ = call(capsys, "check", config, "--json", "--set", "ds4d.training.seed=7")
    told = json.loads(out)
    assert code == 0 and told["world_size"] == 1 and told["config"]["ds4d"]["training"]["seed"] == 7


def test_check_reports_all_problems_without_traceback(capsys, config):
    wrong = ["--set", "ds4d.training.sede=1", "--set", "gradient_clipp1ng=1"]
    code, out, err = call(capsys, "check", config, *wrong)
    assert (code, out) == (2, "")
    assert "sede" in err and "gradient_clipp1ng" in err and "Traceback" not in err


@pytest.mark.parametrize("stage", [2, 3])
def test_check_refuses_a_pipeline_with_zero_2_and_3_and_says_what_goes(capsys, config, stage):
    """C01"""

    def check(*keys: str):
        return call(capsys, "check", config, "--world-size=2", *(f"--set={key}" for key in keys))

    keys = [f"zero_optimization.stage={stage}", "ds4d.parallel.pp=2"]
    code, _, err = check(*keys)
    assert code == 2 and "Traceback" not in err
    reason = "a pipeline keeps the gradients of all its micro-batches, which ZeRO 2 and 3 split"
    for words in (*keys[0].split("="), "ds4d.parallel.pp 2", reason, "to 0 or 1", "parallel.tp"):
        assert words in " ".join(err.split()), words
    for allowed in (["zero_optimization.stage=1", keys[1]], [keys[0], "ds4d.parallel.pp=1"]):
        assert check(*allowed)[0] == 0, allowed


@pytest.mark.parametrize("command", ["check", "plan", "train"])
def test_a_missing_file_is_wrong_input(capsys, tmp_path, command):
    output = ["--output", tmp_path / "run"] if command == "train" else []
    code, _, err = call(capsys, command, tmp_path / "none.json", *output)
    assert code == 2 and "none.json" in err and "Traceback" not in err


def test_export_of_nothing_is_wrong_input_in_words(capsys, tmp_path):
    code, _, err = call(capsys, "export", tmp_path / "nothing", tmp_path / "out")
    assert code == 2 and "nothing" in err and "Traceback" not in err


def test_our_own_fault_shows_the_traceback(capsys, monkeypatch):
    def broken(_args):
        raise ZeroDivisionError

    monkeypatch.setattr(cli.files, "_schema", broken)
    code, _, err = call(capsys, "schema")
    assert code == 1 and "Traceback" in err and "ZeroDivisionError" in err
