"""Export is one process's work: the other ranks need not take part."""

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from ds4d.checkpoint.export import export
from tests.harness import run_distributed
from tests.unit.test_checkpoint_export import IDS, checkpoint_of, llama


def save_together_export_alone(root):
    model = llama()
    checkpoint = checkpoint_of(model, root)
    if dist.get_rank() == 0:
        loaded = AutoModelForCausalLM.from_pretrained(export(checkpoint, root / "out"))
        return torch.equal(loaded(IDS).logits, model(IDS).logits)
    return None


def test_rank_0_exports_while_others_go_on(tmp_path):
    assert run_distributed(save_together_export_alone, 2, root=tmp_path) == [True, None]
