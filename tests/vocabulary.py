"""What the tests of embedding, head and loss share: the plain way, and a batch.

Letters: B sequences, S tokens of each.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ds4d.data.batch import IGNORE
from ds4d.model.build import fill
from ds4d.tensor_parallel.shard import part_of
from tests.reference import relative

B, S = 2, 12


def give_values(module, plain):
    tensors = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}

    def value(name, shard=None):
        return part_of(tensors[name].detach(), shard).clone()

    fill(module, value, device="cpu")


def plain_loss(logits, targets, objective):
    z, flat = logits.float().flatten(0, 1), targets.flatten()
    loss = F.cross_entropy(
        z, flat, reduction="sum", label_smoothing=objective.label_smoothing, ignore_index=IGNORE
    )
    squares = z.logsumexp(-1).square() * (flat != IGNORE)
    return loss + objective.z_loss * squares.sum()


def batch_of(vocab, ignored="some"):
    """The last two tokens of the vocabulary are among the inputs and the targets."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(vocab, (B, S), generator=generator)
    targets = torch.randint(vocab, (B, S), generator=generator)
    ids[0, :2] = targets[1, 3:5] = torch.tensor([vocab - 2, vocab - 1])
    if ignored != "none":
        targets[0, -3:] = targets[1, 0] = IGNORE
    return ids, targets.fill_(IGNORE) if ignored == "all" else targets


def shard_of(param):
    return getattr(param, "tp_shard", None)


def check_gradients(model, plain):
    """Of this rank's part of each parameter; padding has none."""
    for name, param in model.named_parameters():
        shard = shard_of(param)
        if shard is not None:
            assert not param.grad[len(param) - shard.padding :].any(), name
        expected = part_of(plain.get_parameter(name).grad, shard)
        torch.testing.assert_close(param.grad, expected, rtol=1e-5, atol=1e-6)
        if expected.norm() > 1e-5:  # biases of keys have none but rounding
            assert relative(param.grad, expected) < 1e-5, name
