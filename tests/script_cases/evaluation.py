"""Evaluation, generation, and what scripts do over all processes."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState, utils
from accelerate.tracking import GeneralTracker, on_main_process
from torch.utils.data import DataLoader

from ds4d.accelerate import Accelerator
from tests.script_cases.common import (
    IGNORE,
    Samples,
    case,
    close,
    collate,
    groups_of,
    inputs_of,
    make_model,
    plain_steps,
    raises,
    same_weights,
    sgd,
    token_losses,
    train,
)


@case
def logits_in_evaluation(dp):
    samples, model = Samples(6), make_model()
    plain = copy.deepcopy(model).eval()
    accelerator = Accelerator()
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)
    prepared, loader = accelerator.prepare(model, loader)  # no optimizer: only looked at
    prepared.eval()
    for batch in loader:
        with torch.no_grad():
            output = prepared(**inputs_of(batch))
            expected = plain(**inputs_of(batch))
        real = batch["attention_mask"].bool()
        close(output.logits[real], expected.logits[real])
        assert output.logits.shape == expected.logits.shape
        loss, logits = output.to_tuple()
        assert loss is output.loss and logits is output["logits"]


@case
def evaluation_between_steps(dp):
    """Case G07: other numbers and sizes of batches, and nothing of it changes training."""
    samples, model = Samples(16 * dp), make_model()
    held_out = Samples(11)
    plain = copy.deepcopy(model)
    opt = sgd(plain)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)
    prepared, mine, loader = accelerator.prepare(model, sgd(model), loader)
    held = [
        accelerator.prepare(DataLoader(held_out, batch_size=size, collate_fn=collate))
        for size in (3, 4, 5)
    ]
    steps = groups_of(16 * dp, 4 * dp)
    for number, batch in enumerate(loader):
        with accelerator.accumulate(prepared):
            loss = prepared(**inputs_of(batch)).loss
            accelerator.backward(loss)
            mine.step()
        if not accelerator.sync_gradients:
            continue
        plain_steps(plain, opt, samples, [steps[number // 2]])
        prepared.eval()
        with torch.no_grad():
            total, count = token_losses(plain, held_out.tokens)
            for each in held:
                pairs = []
                for rows in each:
                    tokens = (rows["labels"][:, 1:] != IGNORE).sum(1)
                    sums = torch.stack([prepared(**inputs_of(_row(rows, i))).loss * tokens[i]
                                        for i in range(len(tokens))]) if dp == 1 else None
                    loss = prepared(**inputs_of(rows)).loss
                    pairs.append((loss, accelerator.gather_for_metrics(tokens).sum()))
                    if sums is not None:
                        close(sums.sum() / tokens.sum(), loss)
                mean = sum(loss * n for loss, n in pairs) / sum(n for _, n in pairs)
                close(mean, total / count)
                assert int(sum(n for _, n in pairs)) == count
        prepared.train()
    same_weights(accelerator, prepared, plain)


def _row(batch, index):
    return {key: value[index : index + 1] for key, value in batch.items()}


@case
def metrics_count_every_sample_once(dp):
    accelerator = Accelerator()
    for count in (1, 5, 9, 13):
        loader = accelerator.prepare(
            DataLoader(Samples(count), batch_size=2, collate_fn=collate)
        )
        found = [accelerator.gather_for_metrics(batch["id"]) for batch in loader]
        assert torch.cat(found).tolist() == list(range(count))
        names = [
            accelerator.gather_for_metrics([str(int(i)) for i in batch["id"]]) for batch in loader
        ]
        assert [name for part in names for name in part] == [str(i) for i in range(count)]


@case
def generated_text_is_that_of_one_process(dp):
    model = make_model()
    plain = copy.deepcopy(model).eval()
    accelerator = Accelerator()
    loader = DataLoader(Samples(4), batch_size=2, collate_fn=collate)
    prepared, opt, loader = accelerator.prepare(model, sgd(model), loader)
    prompt = torch.tensor([[5, 9, 23, 4], [8, 1, 1, 40]])
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = plain.generate(prompt, **options)
    prepared.eval()
    assert prepared.generate(prompt, **options).tolist() == expected.tolist()
    assert model.generate(prompt, **options).tolist() == expected.tolist(), "the unwrapped one"
    if json.loads(Path("ds4d.json").read_text())["ds4d"].get("pipeline"):
        with raises(ValueError, "num_beams 2", "1f1b"):
            prepared.generate(prompt, num_beams=2, **options)
    prepared.train()
    train(accelerator, prepared, opt, loader)


@case
def operations_are_over_the_ranks_of_dp(dp):
    accelerator = Accelerator()
    mine = accelerator._these.mesh.coordinate.dp
    mean = accelerator.reduce(torch.tensor([float(mine)]), reduction="mean")
    close(mean + 1, torch.tensor([(dp - 1) / 2 + 1]))
    assert accelerator.gather(torch.tensor([mine])).tolist() == list(range(dp))
    assert utils.gather_object([mine]) == list(range(dp))
    padded = accelerator.pad_across_processes(torch.ones(1, mine + 1), dim=1, pad_index=7)
    assert padded.tolist() == [[1.0] * (mine + 1) + [7.0] * (dp - 1 - mine)]
    with accelerator.split_between_processes(list(range(2 * dp))) as part:
        assert part == [2 * mine, 2 * mine + 1]
    with PartialState().split_between_processes(list(range(dp))) as part:
        assert part == [mine]
    last = dist.get_world_size() - 1
    if dist.get_rank() == last:
        accelerator.set_trigger()
    assert accelerator.check_trigger() and not accelerator.check_trigger()
    assert accelerator.is_main_process == (dist.get_rank() == 0)
    assert accelerator.is_last_process == (dist.get_rank() == last)


class FileTracker(GeneralTracker):
    """Of the user's own: writes lines."""

    name, requires_logging_directory = "file", False

    @on_main_process
    def __init__(self):
        self.file = Path("tracked.jsonl").open("w")

    @property
    def tracker(self):
        return self.file

    @on_main_process
    def store_init_configuration(self, values):
        self.log(values)

    @on_main_process
    def log(self, values, step=None, **_):
        print(json.dumps({"step": step, **values}), file=self.file, flush=True)


@case
def trackers_and_screen_are_of_the_main_process(dp):
    accelerator = Accelerator(log_with=FileTracker())
    accelerator.init_trackers("project", config={"lr": 0.1})
    accelerator.log({"loss": 1.5}, step=3)
    with contextlib.redirect_stdout(io.StringIO()) as screen:
        accelerator.print("once")
    assert (screen.getvalue() == "once\n") == accelerator.is_main_process
    accelerator.wait_for_everyone()
    with accelerator.main_process_first():
        lines = Path("tracked.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": None, "lr": 0.1}, {"step": 3, "loss": 1.5}
    ]  # fmt: skip
