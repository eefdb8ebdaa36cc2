"""DeepSeek-V3.2 and its like: an indexer chooses which keys each query sees, from the whole mask."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("deepseek_v32", "glm_moe_dsa", "dots3_note_text"),
    why_not_scattered="its indexer needs the mask of the whole sequence",
)
