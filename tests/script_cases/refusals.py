"""What cannot be right."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from ds4d.accelerate import Accelerator
from tests.script_cases.common import (
    Samples,
    case,
    collate,
    inputs_of,
    make_model,
    raises,
    sgd,
    trained,
)


@case
def what_cannot_be_right_is_refused_by_name(dp):
    accelerator = Accelerator()
    with raises(ValueError, "PEFT"):
        accelerator.prepare(torch.nn.Linear(2, 2))
    changed = make_model()
    changed.model.layers[2].register_forward_hook(lambda *_: None)
    with raises(ValueError, "forward hook", "model.layers.2"):
        accelerator.prepare(changed)
    shorter = make_model()
    shorter.model.layers = shorter.model.layers[:2]
    with raises(ValueError, "not that of its config"):
        accelerator.prepare(shorter)
    model = make_model()

    class Matrixwise(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 1.0})

    with raises(ValueError, "Matrixwise", "AdamW"):
        accelerator.prepare(Matrixwise(model.parameters()))
    loader = DataLoader(Samples(8), batch_size=2, collate_fn=collate)
    prepared, optimizer, loader = accelerator.prepare(model, sgd(model), loader)
    with raises(ValueError, "second model"):
        accelerator.prepare(make_model())
    batches = iter(loader)
    batch = next(batches)
    with raises(ValueError, "inputs_embeds"):
        prepared(**inputs_of(batch), inputs_embeds=torch.zeros(2, 3, 32))
    with raises(ValueError, "output_hidden_states"):
        prepared(**inputs_of(batch), output_hidden_states=True)
    with raises(RuntimeError, "not of the last"):
        accelerator.backward(torch.zeros((), requires_grad=True))
    loss = prepared(**inputs_of(batch)).loss
    accelerator.backward(loss)
    loss = prepared(**inputs_of(batch)).loss
    with raises(RuntimeError, "gradient_accumulation_steps"):
        accelerator.backward(loss)
    optimizer.step()
    with raises(ValueError, "accelerator.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(prepared.parameters(), 1.0)
    if accelerator._these.mesh.parallel.pp == 1:
        prepared(**inputs_of(batch)).loss.detach()
        with raises(RuntimeError, "without accelerator.backward"):
            optimizer.step()
    with raises(ValueError, "norm_type"):
        accelerator.clip_grad_norm_(prepared.parameters(), 1.0, norm_type=1)
    accelerator.backward(prepared(**inputs_of(batch)).loss)
    accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
    optimizer.param_groups[0]["lr"] *= 0.5
    with raises(RuntimeError, "between clip_grad_norm_"):
        optimizer.step()


@case
def another_stage_says_so(dp):
    accelerator, prepared, *_ = trained(dp, steps=1, count=8)
    if accelerator._these.mesh.parallel.pp == 1:
        return
    unwrapped = accelerator.unwrap_model(prepared)
    kinds = [type(layer).__name__ for layer in unwrapped.model.layers]
    elsewhere = kinds.index("Passage")
    with raises(AttributeError, "another stage"):
        unwrapped.model.layers[elsewhere].self_attn.q_proj
    with raises(RuntimeError, "stage", "prepare()"):
        unwrapped(input_ids=torch.ones(1, 3, dtype=torch.long))
