"""Run the training scripts of ``tests/scripts`` as their users do: plainly, and through ds4d.

The scripts are kept in their plain form; for ds4d a copy gets the one line that a user changes.
What a run is compared with: on dp ranks with B samples each a step sees what one plain process sees
with dp * B samples (equal as long as every batch is full and its samples have equally many
targets), or, whatever the samples are, with B samples and dp times the gradient accumulation.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ds4d.launch.variables import LOCALHOST, free_port
from tests.reference import relative

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "tests" / "scripts"
TIMEOUT_SECONDS = 300.0
TAIL_LINES = 60

BLOCK_SIZE = 32
TRAIN_BLOCKS = 96  # full batches of 1, 2, 3, 4, 6, 8, 12, 16 ... blocks
VALIDATION_BLOCKS = 16

_ACCELERATE = "from accelerate import Accelerator\n"
_TRANSFORMERS = "from transformers import (\n"
_CHANGES = {
    "clm_accelerate.py": (_ACCELERATE, "from ds4d.accelerate import Accelerator\n"),
    "loop.py": (_ACCELERATE, "from ds4d.accelerate import Accelerator\n"),
    "clm_trainer.py": (
        _TRANSFORMERS,
        "import ds4d.accelerate  # noqa: F401\n" + _TRANSFORMERS,
    ),
}
# What a launcher around the tests, or a user's settings, would tell the scripts.
_FOREIGN = ("ACCELERATE_", "DS4D_", "HF_", "TORCHELASTIC_")
_LAUNCHERS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True)
class Inputs:
    """A tiny model with its tokenizer, and the texts."""

    model: Path
    train: Path
    validation: Path
    cache: Path

    def arguments(self, script: str) -> list[str]:
        """Those that say what to read, in the script's words."""
        words = [
            f"--model_name_or_path={self.model}",
            f"--train_file={self.train}",
            f"--validation_file={self.validation}",
        ]
        return words if script == "loop.py" else [*words, f"--cache_dir={self.cache}"]


def make_inputs(folder: Path, *, num_layers: int = 4) -> Inputs:
    """Of Python's standard library, so nothing is downloaded. The texts make ``TRAIN_BLOCKS`` and
    ``VALIDATION_BLOCKS`` samples of ``BLOCK_SIZE`` tokens whatever Python's version is."""
    inputs = Inputs(
        folder / "model", folder / "train.txt", folder / "validation.txt", folder / "cache"
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _make_tokenizer()
    _write_text(inputs.train, Path(argparse.__file__), tokenizer, TRAIN_BLOCKS)
    _write_text(inputs.validation, Path(textwrap.__file__), tokenizer, VALIDATION_BLOCKS)
    tokenizer.save_pretrained(inputs.model)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64,
        num_hidden_layers=num_layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(inputs.model)
    return inputs


def _make_tokenizer() -> PreTrainedTokenizerFast:
    """304 tokens: 2 special ones, every byte, 46 merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=304,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([argparse.__file__], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", model_max_length=128
    )


def _write_text(
    file: Path, source: Path, tokenizer: PreTrainedTokenizerFast, num_blocks: int
) -> None:
    """Lines of the source that are shorter than a block, until the blocks are full."""
    lines, missing_tokens = [], num_blocks * BLOCK_SIZE
    for line in source.read_text().splitlines(keepends=True):
        num_tokens = len(tokenizer(line)["input_ids"])
        if missing_tokens > 0 and line.strip() and num_tokens < BLOCK_SIZE:
            lines.append(line)
            missing_tokens -= num_tokens
    assert missing_tokens <= 0, f"{source} is too short"
    file.write_text("".join(lines))


def run_plain(
    script: str, folder: Path, args: Sequence[str], *, timeout: float = TIMEOUT_SECONDS
) -> Path:
    """One process, without ds4d and DeepSpeed.

    Args:
        script: name of a file in ``tests/scripts``.
        folder: of this run alone; what the script says goes to ``output.txt`` there.
        args: without ``--output_dir``.

    Returns:
        The folder that the script wrote to.

    Raises:
        RuntimeError: it failed, or outlived its time limit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / "out"
    command = [sys.executable, str(SCRIPTS / script), f"--output_dir={output}", *args]
    _run(command, folder, _environment(folder) | {"ACCELERATE_USE_CPU": "true"}, timeout)
    return output


def run_ds4d(
    script: str,
    folder: Path,
    args: Sequence[str],
    config: dict[str, Any],
    world_size: int,
    launcher: str = "torchrun",
    *,
    timeout: float = TIMEOUT_SECONDS,
) -> Path:
    """The changed copy of the script, on ``world_size`` ranks; else as ``run_plain``.

    Args:
        config: written to ``ds4d.json``. The script finds it by ``--deepspeed_config_file`` of
            ``accelerate launch``, else by ``--deepspeed`` (Trainer) or ``DS4D_CONFIG``.
        launcher: "torchrun", "deepspeed" or "accelerate".
    """
    folder.mkdir(parents=True, exist_ok=True)
    output, file, copy = folder / "out", folder / "ds4d.json", folder / script
    file.write_text(json.dumps(config, indent=2))
    copy.write_text(changed(script))

    environment = _environment(folder) | {"DS_ACCELERATOR": "cpu"}
    words = [str(copy), f"--output_dir={output}", *args]
    if launcher != "accelerate":
        if script == "clm_trainer.py":
            words.append(f"--deepspeed={file}")
        else:
            environment["DS4D_CONFIG"] = str(file)
    _run([*_launch(launcher, world_size, file), *words], folder, environment, timeout)
    return output


def changed(script: str) -> str:
    """The text of a script with the line that a user changes or adds."""
    text = (SCRIPTS / script).read_text()
    line, replacement = _CHANGES[script]
    if text.count(line) != 1:
        raise ValueError(f"{script} must have the line {line.strip()!r} once")
    return text.replace(line, replacement)


def _launch(launcher: str, world_size: int, config: Path) -> list[str]:
    """The command up to the script. The deepspeed one is as in ``ds4d.launch.launcher``."""
    python = [sys.executable, "-m"]
    port = str(free_port())
    if launcher == "torchrun":
        ranks = ["--nproc-per-node", str(world_size), "--master-port", port]
        return [*python, "torch.distributed.run", *ranks]
    if launcher == "deepspeed":
        hosts = json.dumps({"localhost": list(range(world_size))}).encode()
        where = [
            f"--world_info={base64.urlsafe_b64encode(hosts).decode()}",
            f"--master_addr={LOCALHOST}",
            f"--master_port={port}",
        ]
        quiet = ["--no_local_rank", "--log_level=critical"]
        return [*python, "deepspeed.launcher.launch", *where, *quiet]
    if launcher == "accelerate":
        ranks = ["--num_machines", "1", "--num_processes", str(world_size)]
        where = ["--main_process_port", port]
        use = ["--use_deepspeed", "--deepspeed_config_file", str(config)]
        return [*python, "accelerate.commands.launch", *use, *ranks, *where]
    raise ValueError(f"launcher {launcher!r}: torchrun, deepspeed or accelerate")


def _environment(folder: Path) -> dict[str, str]:
    """On the CPU, offline, and with nothing of the user's settings."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _LAUNCHERS and not name.startswith(_FOREIGN)
    }
    return kept | {
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "TOKENIZERS_PARALLELISM": "false",
    }


def _run(command: list[str], folder: Path, environment: dict[str, str], timeout: float) -> None:
    screen = folder / "output.txt"
    with screen.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            failure = process.wait(timeout) and f"exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            failure = f"not done after {timeout:.0f} s"
        finally:
            _kill_all(process)
    if failure:
        tail = screen.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        raise RuntimeError("\n".join([f"{failure}: {' '.join(command)}", *tail]))


def _kill_all(process: subprocess.Popen) -> None:
    """The launcher too. Its ranks are found as its descendants: torchrun gives each of them a
    session of its own. A launcher that has ended has ended them."""
    if process.poll() is not None:
        return
    launcher = psutil.Process(process.pid)
    for one in [launcher, *launcher.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """What a script logged: ``log.jsonl``, or the Trainer's ``log.json``."""
    lines = folder / "log.jsonl"
    if lines.exists():
        return [json.loads(line) for line in lines.read_text().splitlines()]
    return json.loads((folder / "log.json").read_text())


def compare_models(a: Path, b: Path) -> float:
    """The largest relative L2 difference of a tensor of ``b`` from that of ``a``: models that
    ``save_pretrained`` wrote.

    Raises:
        ValueError: they don't have the same tensors.
    """
    expected, actual = _tensors(a), _tensors(b)
    shapes = [{name: tensor.shape for name, tensor in one.items()} for one in (expected, actual)]
    if shapes[0] != shapes[1]:
        differing = sorted(dict(shapes[0].items() ^ shapes[1].items()))
        raise ValueError(f"{a} and {b} differ in the tensors {', '.join(differing)}")
    return max(relative(actual[name], expected[name]) for name in expected)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Of one file or of several shards."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no *.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}
