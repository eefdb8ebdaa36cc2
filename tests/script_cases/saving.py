"""Models and states, saved and loaded again."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
)

from ds4d.accelerate import Accelerator, lazily
from tests.script_cases.common import (
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
    train,
    trained,
)


@case
def saved_models_are_plain_folders(dp):
    accelerator, prepared, plain, *_ = trained(dp, steps=1, count=8)
    unwrapped = accelerator.unwrap_model(prepared)
    folders = [Path("saved") / name for name in ("given", "by-itself")]
    state = accelerator.get_state_dict(prepared)
    main = accelerator.is_main_process
    save = {"is_main_process": main, "save_function": accelerator.save}
    unwrapped.save_pretrained(folders[0], state_dict=state, **save)
    unwrapped.save_pretrained(folders[1], **save)
    accelerator.wait_for_everyone()
    for folder in folders:
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        for name, tensor in plain.state_dict().items():
            close(loaded.state_dict()[name], tensor)
    if not accelerator._run.is_whole_here:
        with raises(RuntimeError, "get_state_dict"):
            unwrapped.state_dict()


@case
def weights_are_read_when_the_run_begins(dp):
    samples, model, folder = Samples(8), make_model(), Path("lazy")
    plain = copy.deepcopy(model)
    reference = plain_steps(plain, sgd(plain), samples, groups_of(8, 2 * dp))
    accelerator = Accelerator()
    if accelerator.is_main_process:
        model.save_pretrained(folder)
    accelerator.wait_for_everyone()
    with lazily():
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is LlamaForCausalLM and all(p.is_meta for p in model.parameters())
    assert not any(p.is_meta for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    loader = DataLoader(samples, batch_size=2, collate_fn=collate)
    prepared, opt, loader = accelerator.prepare(model, sgd(model), loader)
    prepared.train()
    close(torch.stack(train(accelerator, prepared, opt, loader)), torch.tensor(reference))
    same_weights(accelerator, prepared, plain)


@case
def a_run_goes_on_in_the_middle_of_an_epoch(dp):
    """Shuffled anew in each pass, without a seedable sampler."""
    torch.manual_seed(3 + dist.get_rank())

    def parts():
        model = make_model()
        accelerator = Accelerator(gradient_accumulation_steps=2)
        data = DataLoader(Samples(8 * dp), batch_size=2, shuffle=True, collate_fn=collate)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = LambdaLR(optimizer, lambda step: 0.9**step)
        return accelerator, *accelerator.prepare(model, optimizer, data, schedule)

    def run(accelerator, prepared, optimizer, loader, schedule, passes, skip=0, save_at=None):
        losses = []
        for number in range(passes):
            first = skip if number == 0 else 0
            batches = accelerator.skip_first_batches(loader, first) if first else loader
            for index, batch in enumerate(batches, start=first):
                with accelerator.accumulate(prepared):
                    loss = prepared(**inputs_of(batch)).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                losses.append(float(loss.detach()))
                if save_at == (number, index):
                    accelerator.save_state("state")
        return losses

    whole = run(*parts(), passes=3, save_at=(1, 1))
    accelerator, *others = parts()
    accelerator.load_state("state")
    rest = run(accelerator, *others, passes=2, skip=2)
    close(rest, whole[-len(rest) :])
    assert len(rest) == 6
