"""CodeGen: the fused projection has four blocks of [q | v | k], a quarter of the heads in each."""

from ds4d.models.blueprint import Blueprint

BLOCKS = 4

BLUEPRINT = Blueprint(
    model_types=("codegen",),
    why_not=lambda config, tp: (
        f"its fused qkv_proj is made of {BLOCKS} blocks, which do not divide by "
        f"ds4d.parallel.tp {tp}; tp can be 1, 2 or 4"
        if BLOCKS % tp
        else None
    ),
)
