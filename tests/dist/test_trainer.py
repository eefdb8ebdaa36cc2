"""The main job, all rooms together: a JSON file in, metrics and checkpoints out. The ranks are the
harness's; what launchers add is tested in test_launch.py."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ds4d.run_lock import locked
from tests.harness import RankFailure, run_distributed
from tests.reference import TINY_LLAMA

TINY_GPT2 = {
    "model_type": "gpt2", "vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 64, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
}  # fmt: skip
NUM_SAMPLES, SEQ_LEN = 20, 24


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Token lines whose numbers of labels differ wildly: train.jsonl and eval.jsonl."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = torch.Generator().manual_seed(3)
    for name, count in (("train", NUM_SAMPLES), ("eval", 9)):
        with open(folder / f"{name}.jsonl", "w") as file:
            for index in range(count):
                length = int(torch.randint(4, SEQ_LEN + 1, (), generator=generator))
                ids = torch.randint(101, (length,), generator=generator).tolist()
                labels = [-100 if i < (index * 7) % length else t for i, t in enumerate(ids)]
                file.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")
    return folder


def config(corpus: Path, *, model=TINY_LLAMA, stage=1, batch=4, micro=1, **ds4d):
    data = {
        "seq_len": SEQ_LEN,
        "train": {"type": "tokens", "path": str(corpus / "train.jsonl")},
        "eval": {"type": "tokens", "path": str(corpus / "eval.jsonl")},
        "cache_dir": str(corpus / "cache"),
        **ds4d.pop("data", {}),
    }
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5}},
        "scheduler": {"type": "cosine", "params": {"warmup_steps": 1}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "ds4d": {
            "model": {"config": model},
            "data": data,
            "training": {"steps": 8, "eval_every": 4, **ds4d.pop("training", {})},
            "checkpoint": {"every": 4, **ds4d.pop("checkpoint", {})},
            "monitor": {"plot": False},
            **ds4d,
        },
    }


def job(
    config: dict, output: Path, resume=None, sigterm_in_step=None, poison=None, around=nullcontext
) -> None:
    """One rank of ``trainer.main`` inside a worker that has its process group already."""
    import torch.distributed as dist

    from ds4d import trainer
    from ds4d.launch.runtime import Rank
    from ds4d.launch.variables import Launch
    from ds4d.monitor import screen

    class WorkerRank(Rank):
        def init_distributed(self, timeout_seconds: float) -> None:
            pass

    rank, world = dist.get_rank(), dist.get_world_size()
    output.mkdir(parents=True, exist_ok=True)
    file = output / f"config-{rank}.json"
    file.write_text(json.dumps(config))
    shown = open(output / f"screen-{rank}.txt", "w")
    screen.use(shown, shown)
    step = trainer.Engine.train_step
    calls = 0

    def train_step(engine, micro_batches, **how):
        nonlocal calls
        calls += 1
        if calls == sigterm_in_step and rank == world - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if poison and calls >= poison:
            with torch.no_grad():
                engine.module.get_output_embeddings().weight.fill_(float("nan"))
        return step(engine, micro_batches, **how)

    assert threading.current_thread() is threading.main_thread()
    trainer.Engine.train_step = train_step
    try:
        launch = Launch(rank, world, rank, world, "127.0.0.1", 29400)
        with around():
            trainer.main(WorkerRank(launch, torch.device("cpu"), output), file, resume=resume)
    finally:
        trainer.Engine.train_step = step
        screen.use(sys.stderr, sys.stderr)
        shown.close()


def run(world_size: int, config: dict, output: Path, **how) -> list[dict]:
    run_distributed(job, world_size, config=config, output=output, **how)
    return metrics(output)


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


CURVE = ("step", "loss", "grad_norm", "lr", "tokens", "samples", "consumed_samples", "eval_loss",
         "router_loss")  # fmt: skip


def curve(rows: list[dict]) -> list[dict]:
    """What does not depend on the machine."""
    return [{key: row[key] for key in CURVE if key in row} for row in rows]


def test_every_step_tells_what_design_promises(corpus, tmp_path):
    rows = run(2, config(corpus), tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 9))
    always = {*CURVE, "step_seconds", "tokens_per_second", "peak_memory_bytes"}
    always -= {"eval_loss", "router_loss"}
    assert all(always <= set(row) for row in rows)
    assert [row["step"] for row in rows if "eval_loss" in row] == [4, 8]
    assert [row["consumed_samples"] for row in rows] == list(range(4, 33, 4))
    resolved = json.loads((tmp_path / "run" / "config.resolved.json").read_text())
    assert resolved["ds4d"]["parallel"]["dp"] == 2
    assert {"versions", "layout"} <= set(resolved["ds4d"]["resolved"])

    from ds4d.config.load import load

    assert load(tmp_path / "run" / "config.resolved.json", world_size=2).batch.train == 4


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    return curve(run(1, config(corpus), tmp_path_factory.mktemp("alone")))


@pytest.mark.parametrize("dp, micro, stage", [(1, 4, 3), (2, 1, 3), (2, 2, 0), (4, 1, 2)])
def test_the_curve_is_the_same_in_every_layout(corpus, tmp_path, alone, dp, micro, stage):
    rows = curve(run(dp, config(corpus, micro=micro, stage=stage), tmp_path / "run"))
    for row, expected in zip(rows, alone, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("tp, dp, stage", [(2, 1, 0), (2, 2, 3)])
def test_the_curve_is_the_same_on_tensor_parallel_ranks(corpus, tmp_path, alone, tp, dp, stage):
    file = config(corpus, stage=stage, parallel={"tp": tp, "dp": dp})
    for row, expected in zip(curve(run(tp * dp, file, tmp_path)), alone, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("tp", [1, 2])
def test_resumed_in_another_layout_ranks_drop_what_they_should(corpus, tmp_path, tp):
    """From dp 2 to tp 2 and back, as many ranks: those of a tp group must draw the same random
    numbers from here on, dp ranks others."""
    def layout(tp: int, steps: int) -> dict:
        parallel = {"tp": tp, "dp": 2 // tp, "sequence_parallel": False}
        file = config(corpus, model=TINY_GPT2, training={"steps": steps}, parallel=parallel)
        file["scheduler"]["params"]["total_steps"] = 8
        return file

    run(2, layout(3 - tp, steps=4), tmp_path)
    run(2, layout(tp, steps=8), tmp_path, resume="latest")
    one, other = (
        torch.load(tmp_path / f"checkpoints/step-00000008/rank-{rank:05d}.pt", weights_only=True)
        for rank in range(2)
    )
    assert torch.equal(one["torch"], other["torch"]) == (tp == 2)


def test_unshuffled_steps_are_consecutive_samples_on_a_plain_model(corpus, tmp_path):
    """The global batch of step i is samples [i * G, (i + 1) * G), and the initial weights are what
    ``build_model`` makes: both by an independent loop over the file."""
    from transformers import AutoConfig

    from ds4d.config.types import ModelConfig
    from ds4d.model.build import build_model

    lr = 0.5
    file = config(corpus, data={"shuffle": False}, training={"eval_every": None}, micro=2)
    file |= {"optimizer": {"type": "SGD", "params": {"lr": lr}}, "gradient_clipping": 0.0}
    del file["scheduler"]
    rows = run(2, file, tmp_path / "run")
    model = build_model(
        ModelConfig(config=TINY_LLAMA), config=AutoConfig.for_model(**TINY_LLAMA),
        dtype=torch.float32, device="cpu", seed=42, attn_implementation="eager",
    )  # fmt: skip
    lines = [json.loads(line) for line in (corpus / "train.jsonl").read_text().splitlines()]
    for step, row in enumerate(rows):
        batch = [lines[(step * 4 + i) % NUM_SAMPLES] for i in range(4)]
        targets = [torch.tensor(line["labels"][1:]) for line in batch]
        count = sum(int((t != -100).sum()) for t in targets)
        loss = torch.zeros(())
        for line, target in zip(batch, targets):
            logits = model(input_ids=torch.tensor([line["input_ids"]])).logits[0, :-1]
            loss = loss + F.cross_entropy(logits, target, reduction="sum", ignore_index=-100)
        loss = loss / count
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= lr * p.grad
        assert row["tokens"] == count
        assert row["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_resumed_is_uninterrupted_to_the_bit_with_dropout(corpus, tmp_path, stage):
    """Case D05: weights, moments, lr, data position and random state."""
    file = config(corpus, model=TINY_GPT2, stage=stage, checkpoint={"keep": 1})
    whole = run(2, file, tmp_path / "whole")
    assert len({row["loss"] for row in whole}) == 8
    half = json.loads(json.dumps(file))
    half["ds4d"]["training"]["steps"] = 4
    half["scheduler"]["params"]["total_steps"] = file["ds4d"]["training"]["steps"]
    run(2, half, tmp_path / "parts")
    parts = run(2, file, tmp_path / "parts", resume="auto")
    assert curve(parts) == curve(whole)
    assert len(list((tmp_path / "parts" / "checkpoints").glob("step-*"))) == 1


def test_resumed_on_more_ranks_with_the_same_curve_across_epochs(corpus, tmp_path, alone):
    """Cases D06: 8 steps of 4 are more than one epoch of 20 samples; the position is exact."""
    half = config(corpus, stage=2, training={"steps": 4})
    half["scheduler"]["params"]["total_steps"] = 8
    run(2, half, tmp_path / "run")
    rows = curve(run(4, config(corpus, stage=3), tmp_path / "run", resume="latest"))
    for row, expected in zip(rows, alone, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda c: c["ds4d"]["training"].update(seed=7), "ds4d.training.seed: was 42, is 7"),
        (lambda c: c.update(optimizer={"type": "Lion"}), 'optimizer.type: was "AdamW", is "Lion"'),
        (lambda c: c["ds4d"]["data"].update(train=c["ds4d"]["data"]["eval"]), "not those that"),
        (lambda c: c["ds4d"]["model"]["config"].update(rope_theta=99.0), "rope_parameters was"),
    ],
)
def test_another_run_is_not_continued(corpus, tmp_path, change, text):
    file = config(corpus, training={"steps": 1, "eval_every": None})
    run(1, file, tmp_path / "run")
    file = json.loads(json.dumps(file))
    change(file)
    with pytest.raises(RankFailure, match=text):
        run(1, file, tmp_path / "run", resume="auto")


def test_a_new_learning_rate_holds_from_the_next_step(corpus, tmp_path):
    file = config(corpus, training={"steps": 2, "eval_every": None})
    run(1, file, tmp_path / "run")
    file["ds4d"]["training"]["steps"] = 4
    file["optimizer"]["params"]["lr"] = 0.5
    file["scheduler"] = {"type": "linear", "params": {"total_steps": 4}}
    rows = run(1, file, tmp_path / "run", resume="auto")
    assert [row["lr"] for row in rows[2:]] == pytest.approx([0.25, 0.125])


def test_eval_finds_what_training_found(corpus, tmp_path):
    """On a run folder, and on its export with the source given."""
    from ds4d.checkpoint.export import export
    from ds4d.evaluate import evaluate

    file = config(corpus, training={"steps": 2, "eval_every": 2})
    rows = run(2, file, tmp_path / "run")
    save_tokenizer(tmp_path / "run" / "tokenizer")
    found = evaluate(tmp_path / "run", progress=False)
    assert found["loss"] == pytest.approx(rows[-1]["eval_loss"], rel=1e-6)
    assert found["samples"] == 9
    export(tmp_path / "run", tmp_path / "exported")
    source = {"type": "tokens", "path": str(corpus / "eval.jsonl")}
    again = evaluate(
        tmp_path / "exported",
        source=source,
        overrides=[f"ds4d.data.seq_len={SEQ_LEN}", f"ds4d.data.cache_dir={corpus / 'cache'}"],
        progress=False,
    )
    assert again == found


def test_training_starts_from_a_checkpoint_as_from_its_export(corpus, tmp_path):
    from ds4d.checkpoint.export import export
    from ds4d.model.config import tokenizer_source

    short = {"steps": 2, "eval_every": None}
    run(2, config(corpus, training=short, parallel={"tp": 2}), tmp_path / "run")
    export(tmp_path / "run", tmp_path / "exported", dtype="fp32", max_shard_size="20KB")
    save_tokenizer(tmp_path / "run" / "tokenizer")
    curves = []
    for index, path in enumerate(("run", "run/checkpoints/step-00000002", "exported")):
        file = config(corpus, training=short, stage=3)
        file["ds4d"]["model"] = {"path": str(tmp_path / path)}
        curves.append(curve(run(2, file, tmp_path / f"from-{index}")))
        with_tokenizer = Path(tokenizer_source(str(tmp_path / path)), "tokenizer.json").is_file()
        assert with_tokenizer == (path != "exported")
    assert curves[0] == curves[1] == curves[2]
    assert curves[0][0]["loss"] < metrics(tmp_path / "run")[0]["loss"] - 0.01
    file["ds4d"]["model"] = {"path": str(tmp_path / "run")}
    with locked(tmp_path / "run"), pytest.raises(RankFailure, match="ds4d.model.path: .* in use"):
        run(2, file, tmp_path / "another")


def save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def test_sigterm_on_one_rank_saves_on_all_and_ends(corpus, tmp_path, alone):
    """Also the one that is being written beside the training."""
    file = config(corpus, checkpoint={"every": 2, "async": True})
    rows = run(2, file, tmp_path / "run", sigterm_in_step=3, around=partial(slow_disk, last=3))
    assert len(rows) == 3 and len(written(tmp_path / "run")) == 2
    rows = curve(run(2, file, tmp_path / "run", resume="auto"))
    for row, expected in zip(rows, alone, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


def test_too_many_bad_steps_end_the_run_and_name_the_tensor(corpus, tmp_path):
    file = config(corpus, training={"max_skipped_steps": 2})
    with pytest.raises(RankFailure) as caught:
        run(2, file, tmp_path / "run", poison=3)
    message = str(caught.value)
    assert "step 4: the loss (nan)" in message and "in 2 steps in a row" in message
    assert "First bad tensor: rank 0: the output of lm_head" in message
    skipped = [row for row in metrics(tmp_path / "run") if row.get("skipped")]
    assert [row["step"] for row in skipped] == [3]
    assert skipped[0]["lr"] > 0


def test_a_global_batch_without_a_target_is_refused(tmp_path):
    """A single sample without one counts as zero."""
    lines = [{"input_ids": [1, 2, 3], "labels": [-100] * 3}] * 5
    lines += [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 3
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = config(tmp_path, data={"shuffle": False, "eval": None}, training={"eval_every": None})
    with pytest.raises(RankFailure, match="step 1: none of the 4 samples"):
        run(2, file, tmp_path / "run")
    lines[0] = lines[-1]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = run(2, file | {"ds4d": {**file["ds4d"], "training": {"steps": 2}}}, tmp_path / "again")
    assert [row["tokens"] for row in rows] == [2, 6]


SIZES = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
OTHERS = {
    "tied": TINY_LLAMA | {"tie_word_embeddings": True},
    "mixtral": {
        "model_type": "mixtral", "num_local_experts": 4, "output_router_logits": True,
        "router_aux_loss_coef": 0.1, **SIZES, **HEADS,
    },
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "sliding_window": 16} | SIZES | HEADS,
    "mamba": {"model_type": "mamba", "state_size": 8} | SIZES,
}  # fmt: skip


@pytest.mark.parametrize("family", OTHERS)
def test_other_families_have_one_curve_too(corpus, tmp_path, family):
    """Tied weights, experts that see uneven tokens on each rank, windows, no attention at all."""
    how = {"model": OTHERS[family], "training": {"steps": 3, "eval_every": 3}}
    alone = curve(run(1, config(corpus, micro=4, stage=0, **how), tmp_path / "1"))
    file = config(corpus, stage=3, recompute="none" if family == "mamba" else "full", **how)
    file["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    for row, expected in zip(curve(run(2, file, tmp_path / "2")), alone, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)
        assert ("router_loss" in row) == (family == "mixtral")


TINY_BLOOM = {"model_type": "bloom", "vocab_size": 101, "hidden_size": 32, "n_layer": 2, "n_head": 4}


def test_a_model_with_attention_of_its_own_trains_on_padded_samples(corpus, tmp_path):
    """bloom takes neither documents nor positions; padding on the right harms no causal model."""
    alone = curve(run(1, config(corpus, model=TINY_BLOOM, batch=2), tmp_path / "1"))
    rows = curve(run(2, config(corpus, model=TINY_BLOOM, batch=2, stage=3), tmp_path / "2"))
    for row, expected in zip(rows, alone, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


def test_packed_token_lines_are_refused_where_documents_would_mix(tmp_path):
    line = {"input_ids": [1, 2, 3, 4], "document_ids": [0, 0, 1, 1]}
    (tmp_path / "train.jsonl").write_text((json.dumps(line) + "\n") * 8)
    file = config(tmp_path, model=TINY_BLOOM, data={"eval": None}, training={"eval_every": None})
    with pytest.raises(RankFailure, match="several documents in a sample, but BloomForCausalLM"):
        run(1, file, tmp_path / "run")


def test_deepspeeds_own_monitors_get_every_step(corpus, tmp_path):
    file = config(corpus, training={"steps": 2, "eval_every": 2})
    file["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path), "job_name": "csv"}
    rows = run(2, file, tmp_path / "run")
    lines = (tmp_path / "csv" / "ds4d_loss.csv").read_text().splitlines()
    assert [float(line.split(",")[1]) for line in lines[1:]] == [row["loss"] for row in rows]
    assert len((tmp_path / "csv" / "ds4d_eval_loss.csv").read_text().splitlines()) == 2


def test_one_step_of_a_pipeline_is_drawn_as_measured(corpus, tmp_path):
    from xml.etree import ElementTree

    monitor = {"plot": False, "timeline_step": 2}
    training = {"steps": 3, "eval_every": None}
    file = config(corpus, parallel={"pp": 2}, monitor=monitor, training=training)
    run(2, file, tmp_path / "run")
    trace = json.loads((tmp_path / "run" / "timeline.json").read_text())["traceEvents"]
    assert trace[0]["args"]["name"] == "1f1b, 2 ranks, 4 micro-batches: step 2 as measured"
    for rank, order in enumerate(["F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]):
        passes = [event for event in trace if event["ph"] == "X" and event["tid"] == rank]
        assert [event["name"].replace("0.", "") for event in passes] == order.split()
        assert all(0 < event["dur"] and 0 <= event["ts"] < 60e6 for event in passes)
    drawing = ElementTree.fromstring((tmp_path / "run" / "timeline.svg").read_text())
    assert len(drawing.findall("{http://www.w3.org/2000/svg}g[@class='lane']")) == 2


@contextmanager
def patched_write(change):
    """``change(write, step, rank)`` stands for each rank's writing of a checkpoint."""
    import torch.distributed as dist

    from ds4d.checkpoint.storage import SafetensorsWriter

    write = SafetensorsWriter.write

    def patched(writer):
        step = int(writer.folder.name.split("-")[2])
        return change(lambda: write(writer), step, dist.get_rank())

    SafetensorsWriter.write = patched
    try:
        yield
    finally:
        SafetensorsWriter.write = write


@contextmanager
def slow_disk(last):
    """Every other checkpoint is not written before the next step has ended, up to the ``last``; and
    one rank is later than the other."""
    from ds4d import trainer

    train_step, ended = trainer.Engine.train_step, 0

    def counted(*args, **how):
        nonlocal ended
        result = train_step(*args, **how)
        ended += 1
        return result

    def change(write, step, rank):
        deadline = time.monotonic() + 60
        while step % 2 and step < last and ended <= step:
            assert time.monotonic() < deadline, "training waits for the disk"
            time.sleep(0.005)
        time.sleep(0.05 * rank)
        return write()

    trainer.Engine.train_step = counted
    with patched_write(change):
        yield


def full_disk():
    def change(write, step, rank):
        if (step, rank) == (8, 1):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/disk/data")
        return write()

    return patched_write(change)


def written(output: Path) -> dict[str, dict[str, str]]:
    """By checkpoint, the checksums of what each rank wrote."""
    folders = (output / "checkpoints").glob("step-*")
    manifests = {f.name: json.loads((f / "manifest.json").read_text()) for f in folders}
    return {
        name: {each["name"]: each["xxh3"] for each in manifest["files"]}
        for name, manifest in manifests.items()
    }


def test_a_checkpoint_written_beside_the_training_is_the_same(corpus, tmp_path):
    """With dropout, and a disk that is slower than the steps."""
    parallel, training = {"pp": 2, "tp": 2}, {"steps": 5, "eval_every": None}
    how = dict(model=TINY_GPT2, parallel=parallel, training=training)
    plain = run(4, config(corpus, checkpoint={"every": 1}, **how), tmp_path / "plain")
    file = config(corpus, checkpoint={"every": 1, "async": True}, **how)
    rows = run(4, file, tmp_path / "async", around=partial(slow_disk, last=5))
    assert curve(rows) == curve(plain)
    files = written(tmp_path / "async")
    assert len(files) == 5 and files == written(tmp_path / "plain")
    assert all({"save_seconds", "save_bytes"} <= set(row) for row in plain)
    assert [key in row for row in rows for key in ("save_seconds", "background_save_seconds")] == [
        True, False, *[True] * 8
    ]  # fmt: skip


def test_a_save_that_fails_beside_the_training_is_one_error_on_all_ranks(corpus, tmp_path):
    """And in one of the next steps, not when the next save is due."""
    file = config(corpus, checkpoint={"async": True, "keep": 1}, training={"steps": 12})
    with pytest.raises(RankFailure) as error:
        run(2, file, tmp_path, around=full_disk)
    text = str(error.value)
    line = "the checkpoint of step 8 was not saved: No space left on device: /disk/data (rank 1)"
    assert text.count(f"CheckpointError: {line}") == 2
    assert 8 <= len(metrics(tmp_path)) < 12
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-00000004"]
    assert len(run(2, file, tmp_path, resume="auto")) == 12


def test_what_is_passed_over_is_said_once_and_two_runs_are_refused(corpus, tmp_path):
    file = config(corpus, training={"steps": 2, "eval_every": None}, checkpoint={"every": 1})
    run(2, file, tmp_path)
    checkpoints = tmp_path / "checkpoints"
    os.truncate(checkpoints / "step-00000002" / "data-00001.safetensors", 100)
    file["ds4d"]["training"]["steps"] = 3
    file["scheduler"]["params"]["total_steps"] = 3
    with locked(tmp_path), pytest.raises(RankFailure) as error:
        run(2, file, tmp_path, resume="auto")
    assert str(error.value).count(f"FolderInUse: {tmp_path} is in use by process") == 2
    rows = run(2, file, tmp_path, resume="auto")
    assert [row["step"] for row in rows] == [1, 2, 3]
    said = [(tmp_path / f"screen-{rank}.txt").read_text() for rank in range(2)]
    assert said[0].count("checkpoint passed over: ") == 1 and "passed over" not in said[1]
    assert re.search(r"passed over: .*step-00000002/data-00001.safetensors: 100 bytes", said[0])
    assert f"resumed from {checkpoints / 'step-00000001'}" in said[0]
    with pytest.raises(RankFailure, match="continue with --resume auto"):
        run(2, file, tmp_path)


@pytest.mark.parametrize("resume, text", [("latest", "no complete checkpoint"), ("/x", "/x")])
def test_a_checkpoint_that_is_not_there_is_named_on_every_rank(corpus, tmp_path, resume, text):
    with pytest.raises(RankFailure, match=text):
        run(2, config(corpus), tmp_path / "run", resume=resume)
