"""From text to a dict: comments, duplicates, syntax errors with their place, overrides."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ds4d.config.errors import ConfigError
from ds4d.config.load import load
from ds4d.config.read import key_lines, override, read
from tests.unit.config_files import SMALL, problems


def write(tmp_path, text):
    path = tmp_path / "run.json"
    path.write_text(text)
    return path


def message(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        read(write(tmp_path, text))
    return str(caught.value).removeprefix(str(tmp_path))


def test_comments_and_trailing_commas(tmp_path):
    text = '{\n// one\n"a": [1, 2,], # two\n"b": {"c": 5e8, /* three */ "d": "x // ,]",},\n}'
    assert read(write(tmp_path, text)).content == {
        "a": [1, 2],
        "b": {"c": 5e8, "d": "x // ,]"},
    }


@pytest.mark.parametrize(
    "text, said",
    [
        ('{"a": 1,\n "b": 2 "c": 3\n}\n', "line 2: column 9: not JSON: Expecting ',' delimiter"),
        ('{\n"a": 1,\n', "line 3: column 1: not JSON: Expecting property name"),
        ('{"a": tru}\n', "line 1: column 7: not JSON: Expecting value"),
        ('{"a": "x\n}', "line 1: column 9: not JSON: Invalid control character"),
        ("{}}", "line 1: column 3: not JSON: Extra data"),
        ('{"lr": NaN}', "NaN is not a number in JSON"),
        ("[1]", "must hold one object { ... }, not [1]"),
    ],
)
def test_syntax_errors_name_their_place(tmp_path, text, said):
    assert said in message(tmp_path, text)


def test_missing_file_and_wrong_encoding(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere.json: 1 problem\n  cannot be read: No such"):
        read(tmp_path / "nowhere.json")
    path = tmp_path / "latin.json"
    path.write_bytes(b'{"a": "\xe9"}')
    with pytest.raises(ConfigError, match="not UTF-8 at byte 7"):
        read(path)


def test_duplicate_keys_are_named_with_their_lines(tmp_path):
    text = '{\n"bf16": {"enabled": true},\n"ds4d": {"data": {\n"seq_len": 1,\n"seq_len": 2}},\n'
    text += '"bf16": {"enabled": false}}'
    with pytest.raises(ConfigError) as caught:
        read(write(tmp_path, text))
    assert {p.path: p.message for p in caught.value.problems} == {
        "ds4d.data.seq_len": "stands more than once (lines 4, 5); keep one",
        "bf16": "stands more than once (lines 2, 6); keep one",
    }


def test_key_lines():
    text = '{\n"a": [\n{"b": 1},\n{"b": "}"} // {"no": 1}\n],\n"c": {"d":\n2}, "e": 3}'
    assert key_lines(text) == {
        "a": [2], "a.0.b": [3], "a.1.b": [4], "c": [6], "c.d": [6], "e": [7],
    }  # fmt: skip


def test_problems_come_in_file_order_with_lines(tmp_path):
    content = {"gradient_clipp1ng": 1.0, **SMALL, "zero_optimization": {"stage": 9}}
    text = json.dumps(content, indent=1)
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    first, second = caught.value.problems
    assert (first.path, first.line) == ("gradient_clipp1ng", 2)
    assert second.path == "zero_optimization.stage"
    assert second.line == text.split("\n").index('  "stage": 9') + 1
    assert str(caught.value).startswith(f"{tmp_path}/run.json: 2 problems\n  line 2: gradient_")


def test_overrides():
    content = {"a": {"b": 1}, "c": 2}
    words = ["a.b=3e-4", "a.x.y=[1, 2]", "c=true", "d=True", "e=x=y", 'f={"g": null}']
    assert override(content, words) == []
    assert content == {
        "a": {"b": 3e-4, "x": {"y": [1, 2]}},
        "c": True,
        "d": "True",
        "e": "x=y",
        "f": {"g": None},
    }


def test_wrong_overrides():
    found = problems(
        SMALL,
        overrides=[
            "gradient_clipping",
            "train_micro_batch_size_per_gpu.x=1",
            "ds4d.parallel.tpp=2",
            "optimizer.params.lr=fast",
        ],
    )
    assert found == {
        "gradient_clipping": "an override is written dotted.key=value",
        "train_micro_batch_size_per_gpu.x": (
            "train_micro_batch_size_per_gpu is 2, which has no keys"
        ),
        "ds4d.parallel.tpp": 'unknown key; did you mean "tp"?',
        "optimizer.params.lr": (
            '"fast" is not allowed; allowed: a number, at least 0 or "auto"'
        ),
    }


def test_overridden_keys_have_no_line(tmp_path):
    path = write(tmp_path, json.dumps(SMALL, indent=1))
    with pytest.raises(ConfigError) as caught:
        load(path, overrides=["ds4d.training.steps=0"])
    assert [p.line for p in caught.value.problems] == [None]


def test_a_dict_is_not_changed():
    before = json.dumps(SMALL)
    load(SMALL, overrides=["ds4d.training.steps=3"], world_size=2)
    assert json.dumps(SMALL) == before


def test_importing_the_config_is_light():
    heavy = "{'torch', 'transformers', 'deepspeed', 'datasets'}"
    code = f"import sys, ds4d.config.load, ds4d.config.report; print({heavy} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert output.stdout.strip() == "set()", output
