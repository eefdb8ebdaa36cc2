"""Ranks that share sequences, beside training: evaluation between its steps, and dropout of
attention weights.

Letters: B sequences, H heads, K key/value heads, S tokens of a sequence, s of them on a rank, D
head dim.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds4d.attention.context import Context
from ds4d.attention.documents import Documents
from ds4d.attention.kernels import Call
from ds4d.attention.visible import Visible
from ds4d.data.batch import IGNORE, MicroBatch
from ds4d.data.loader import eval_batches
from ds4d.data.store import Sample
from ds4d.resume import seed_everything
from tests.dist.test_cp_data import by, documents_of, loss_sum, micro_batch, ways
from tests.harness import run_distributed
from tests.parity import batches, folder_of, make_engine, make_run, share_of
from tests.reference import relative


def evaluate_between(runs, steps, held_out):
    """Of each run: loss and targets of the set before training, the results of steps, and those of
    steps with evaluations of 0, 1, 3 and 5 samples between them."""
    out = []
    for run in runs:
        alone, mesh = make_engine(run)

        def evaluated(engine, count, mesh=mesh, micro=run.batch.micro):
            where = dict(dp_rank=mesh.dp, dp_size=mesh.size("dp"), cutter=mesh.cutter)
            sums = engine.eval_sums(eval_batches(held_out[:count], micro, **where))
            return [tuple(map(float, pair)) for pair in sums]

        torch.manual_seed(mesh.dropout_rank)
        results = [alone.train_step(share_of(batch, run, mesh)) for batch in steps]
        engine, mesh = make_engine(run)
        sums = evaluated(engine, len(held_out))
        torch.manual_seed(mesh.dropout_rank)
        between = []
        for count, batch in zip((0, 1, 3, 5), steps):
            between.append(engine.train_step(share_of(batch, run, mesh)))
            evaluated(engine, count)
        out.append((sums, results, between))
    return out


def sample(batch: MicroBatch) -> Sample:
    ids = None if batch.documents is None else batch.documents.ids[0]
    return Sample(batch.input_ids[0], batch.targets[0], batch.position_ids[0], ids)


@pytest.mark.parametrize("cp, dp", [(2, 1), (4, 1), (2, 2)])
def test_evaluations_of_any_size_between_steps_change_nothing(cp, dp):
    rows = [(13, 20), (33,), (-5, 28), (1, 31, 1), (20, -13)]
    kept = [micro_batch([row], seed=i) for i, row in enumerate(rows)]
    steps = batches(4)[4][:4]
    cases = [
        (folder_of(name, **changes), way)
        for name, changes in [("llama tied", {}), ("gpt2", dict(attn_pdrop=0.1, resid_pdrop=0.1))]
        for way in ways(cp)
    ]
    runs = [make_run(folder, **by(way, cp, dp=dp, micro=2)) for folder, way in cases]
    given = dict(runs=runs, steps=steps, held_out=[sample(batch) for batch in kept])
    ranks = run_distributed(evaluate_between, cp * dp, **given)
    losses = {}
    for folder in {folder for folder, _ in cases}:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        with torch.no_grad():
            losses[folder] = sum(
                float(loss_sum(model, *document)) for b in kept for document in documents_of(b)
            )
    for case, *of_ranks in zip(cases, *ranks, strict=True):
        found = torch.tensor([pair for sums, _, _ in of_ranks for pair in sums]).sum(0)
        assert found.tolist() == [
            pytest.approx(losses[case[0]], rel=1e-5),
            sum(int((batch.targets != IGNORE).sum()) for batch in kept),
        ], case
        assert all(results == between for _, results, between in of_ranks), case


B, H, K, S, D, DROPPED = 2, 4, 2, 64, 8, 0.5
PACKED = Documents.from_ids(torch.tensor([[0] * 40 + [1] * 24, [0] * 10 + [1] * 54]))


def weights_of(runs, query, key, grad, documents=None, dropout=DROPPED):
    """Of each run: where this rank's tokens stand, its attention weights after dropout, and the
    gradients of its queries, keys and values. Values are unit vectors, so outputs are weights."""
    out = []
    for run in runs:
        engine, mesh = make_engine(run)
        zeros = torch.zeros(B, S, dtype=torch.long)
        positions = torch.arange(S).expand(B, S)
        cut = mesh.cutter(MicroBatch(zeros, zeros, positions, documents)).cut
        value = torch.eye(S).expand(B, K, S, S)
        inputs = [x[:, :, cut.places].clone().requires_grad_() for x in (query, key, value)]
        seed_everything(7, mesh.dropout_rank)
        visible = Visible(causal=True, documents=documents)
        call = Call(*inputs, visible, scale=D**-0.5, dropout=dropout)
        weights = Context(cut, engine.module.ds4d_cp).attend(call)
        weights.backward(grad[:, cut.places])
        out.append((cut.places, weights.detach(), *(x.grad for x in inputs)))
    return out


def whole(ranks, index: int, which: int, dim: int) -> torch.Tensor:
    """A tensor of all ranks' tokens, which lie along ``dim``."""
    order = torch.cat([rank[index][0] for rank in ranks]).argsort()
    return torch.cat([rank[index][which] for rank in ranks], dim).index_select(dim, order)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("documents", [None, PACKED], ids=["whole rows", "packed"])
def test_attention_weights_are_dropped_as_on_one_rank(cp, documents):
    """Each with its probability, on its own, and the same ones in the backward pass."""
    generator = torch.Generator().manual_seed(3)
    query, key, grad = (
        torch.randn(*shape, generator=generator)
        for shape in ((B, H, S, D), (B, K, S, D), (B, S, H, S))
    )
    runs = [make_run(folder_of("llama"), **by(way, cp)) for way in ways(cp)]
    given = dict(runs=runs, query=query, key=key, grad=grad, documents=documents)
    ranks = run_distributed(weights_of, cp, **given)
    seen = torch.ones(S, S, dtype=torch.bool).tril().expand(B, S, S)
    if documents is not None:
        seen = seen & (documents.ids[:, :, None] == documents.ids[:, None])
    for index, run in enumerate(runs):
        weights = whole(ranks, index, 1, 1).transpose(1, 2)  # [B, H, S, S]
        kept = weights > 0
        check_kept(kept, seen[:, None].expand_as(kept), run)
        inputs = query, key, torch.eye(S).expand(B, K, S, S)
        inputs = [x.clone().requires_grad_() for x in inputs]
        expected = dropped_attention(*inputs, seen, kept)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
        expected.backward(grad.transpose(1, 2))
        for which, x in enumerate(inputs, start=2):
            found = whole(ranks, index, which, 2)
            torch.testing.assert_close(found, x.grad, rtol=1e-4, atol=1e-5, msg=str(run.context))


def test_scores_whose_exponentials_no_number_holds():
    """Scores of about 106 and -106, in every other stretch of keys."""
    generator = torch.Generator().manual_seed(4)
    query, key, grad = (
        torch.randn(*shape, generator=generator)
        for shape in ((B, H, S, D), (B, K, S, D), (B, S, H, S))
    )
    query[..., 0], key[..., 0] = 30.0, torch.tensor([-10.0] * 8 + [10.0] * 8).repeat(4)
    runs = [make_run(folder_of("llama"), **by(way, 4)) for way in ways(4)]
    given = dict(runs=runs, query=query, key=key, grad=grad, dropout=0.0)
    ranks = run_distributed(weights_of, 4, **given)
    seen = torch.ones(S, S, dtype=torch.bool).tril().expand(B, S, S)
    inputs = query, key, torch.eye(S).expand(B, K, S, S)
    inputs = [x.double().requires_grad_() for x in inputs]
    expected = dropped_attention(*inputs, seen, torch.ones(S, S, dtype=torch.bool))
    expected.backward(grad.transpose(1, 2).double())
    for index, run in enumerate(runs):
        found = [whole(ranks, index, 1, 1).transpose(1, 2)]
        found += [whole(ranks, index, which, 2) for which in (2, 3, 4)]
        for one, other in zip(found, [expected, *(x.grad for x in inputs)], strict=True):
            assert relative(one, other.detach()) < 1e-4, run.context


def dropped_attention(query, key, value, seen, kept) -> torch.Tensor:
    """Its definition: [B, H, S, S].

    Args:
        kept: which weights; all: nothing is dropped.
    """
    key, value = (x.repeat_interleave(H // K, dim=1) for x in (key, value))
    scores = query @ key.mT * D**-0.5
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    return weights * (kept / (1.0 if kept.all() else 1 - DROPPED)) @ value


def check_kept(kept: torch.Tensor, seen: torch.Tensor, case: object) -> None:
    """As many as there should be, and no query's keys as those of another: neither by head, nor by
    row, nor by rank."""
    share, noise = float(kept[seen].float().mean()), 0.5 / int(seen.sum()) ** 0.5
    assert abs(share - (1 - DROPPED)) < 5 * noise, (case, share)
    rows = zip(kept.flatten(0, 2), seen.flatten(0, 2), strict=True)
    lines = [tuple(row[sees].tolist()[-32:]) for row, sees in rows if sees.sum() >= 32]
    assert len(set(lines)) == len(lines), case


def train_with_dropout(runs, steps):
    """The results of each run."""
    out = []
    for run in runs:
        engine, mesh = make_engine(run)
        seed_everything(7, mesh.dropout_rank)
        out.append([engine.train_step(share_of(batch, run, mesh)) for batch in steps])
    return out


def test_dropout_is_repeated_by_recomputation():
    folder = folder_of("gpt2", attn_pdrop=0.2, resid_pdrop=0.1, embd_pdrop=0.1)
    runs = {
        way: [make_run(folder, **by(way, recompute=how)) for how in ("none", "selective", "full")]
        for way in ways(2)
    }
    given = dict(runs=sum(runs.values(), []), steps=batches(4)[4][:2])
    results = iter(run_distributed(train_with_dropout, 2, **given)[0])
    for way in runs:
        kept, *again = (next(results) for _ in range(3))
        for each in again:
            for one, other in zip(kept, each, strict=True):
                assert other.loss == pytest.approx(one.loss, rel=1e-6), way
                assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-6), way
