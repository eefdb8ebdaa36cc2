"""What is wrong with sharing a sequence (``ds4d.parallel.cp`` > 1): its method, its heads, its
model."""

from __future__ import annotations

from ds4d.config.draft import Draft
from ds4d.config.errors import Problem, show
from ds4d.config.rules import Problems, rule

CP, TP = "ds4d.parallel.cp", "ds4d.parallel.tp"
METHOD, ULYSSES = "ds4d.context.method", "ds4d.context.ulysses_size"


@rule("ds4d.model", CP)
def model_can_be_shared(draft: Draft) -> Problems:
    if draft.degree("cp") > 1 and (reason := draft.why_not_cp):
        yield Problem(CP, f"{draft.degree('cp')}: {reason}; set it to 1")


@rule(CP, METHOD, ULYSSES)
def hybrid_is_both(draft: Draft) -> Problems:
    """Ranks that exchange heads, and a ring across them."""
    cp, asked = draft.degree("cp"), draft.given(ULYSSES)
    if cp == 1:
        return
    if draft.get(METHOD) != "hybrid":
        if asked is not None:
            yield Problem(
                ULYSSES,
                f'{asked} is for {METHOD} "hybrid", not {show(draft.get(METHOD))}; leave it out, '
                "or change the method",
            )
        return
    sizes = [size for size in range(2, cp) if cp % size == 0]
    if not sizes:
        yield Problem(
            METHOD, f'"hybrid": {CP} {cp} is no product of two; use "ring" or "ulysses"'
        )
    elif asked is not None and asked not in sizes:
        known = " or ".join(map(str, sizes))
        alone = {1: "ring", cp: "ulysses"}.get(asked)
        why = f'of {CP} {cp} is {METHOD} "{alone}"' if alone else f"does not go into {CP} {cp}"
        yield Problem(ULYSSES, f"{asked} {why}: it can be {known}")


@rule("ds4d.model", "ds4d.parallel", METHOD, ULYSSES)
def heads_can_be_exchanged(draft: Draft) -> Problems:
    cp, tp, method = draft.degree("cp"), draft.degree("tp"), draft.get(METHOD)
    heads = draft.model.get("num_attention_heads")
    if cp == 1 or method == "ring" or not isinstance(heads, int) or heads % tp:
        return  # no heads are exchanged; or why tp is refused is said elsewhere
    size = draft.ulysses_size
    if size is not None and (cp % size or (method == "hybrid" and size == cp)):
        return  # said by hybrid_is_both
    if size is None and any(cp % n == 0 for n in range(2, cp)):
        yield Problem(
            METHOD,
            f'"hybrid": no part of {CP} {cp} shares the {heads // tp} attention heads of a rank '
            f'evenly; use "ring"',
        )
    elif size is not None and heads // tp % size:
        of_a_rank = f"{heads}" if tp == 1 else f"{heads} / {TP} {tp} = {heads // tp}"
        fits = max(n for n in range(1, size) if cp % n == 0 and heads // tp % n == 0)
        fix = f'{METHOD} "hybrid" with {ULYSSES} {fits}' if fits > 1 else f'{METHOD} "ring"'
        yield Problem(
            ULYSSES if method == "hybrid" else METHOD,
            f"{size} ranks can't share {of_a_rank} attention heads evenly; set {fix}",
        )
