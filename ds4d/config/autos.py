"""What "auto" stands for: what Hugging Face's Trainer would write there.

Source: transformers 5.24, integrations/deepspeed.py, with the defaults of ``TrainingArguments``.
"""

from __future__ import annotations

MAX_GRAD_NORM = 1.0
AUTO_OPTIMIZER = {"lr": 5e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
WARMUP_STEPS = 1  # none, but DeepSpeed refuses 0
# zero_optimization key -> its size, from the model's hidden size
AUTO_BUCKETS = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}
