"""What one would write without ds4d: the quickstart's model and batch on DeepSpeed, one step.

Started by ``benchmarks/startup.py``: ``deepspeed --num_gpus 2 bare_deepspeed.py CONFIG``.
"""

import argparse
import json
import os

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed  # noqa: E402
import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("config")
parser.add_argument("--local_rank")
with open(parser.parse_args().config) as file:
    run = json.load(file)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
deepspeed.init_distributed()
torch.set_num_threads(1)
config = AutoConfig.for_model(**{**run["ds4d"]["model"]["config"], "vocab_size": 4096})
model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
    config={
        "train_batch_size": run["train_batch_size"],
        "train_micro_batch_size_per_gpu": run["train_micro_batch_size_per_gpu"],
        "zero_optimization": {"stage": 1},
    },
)
micro, length = run["train_micro_batch_size_per_gpu"], run["ds4d"]["data"]["seq_len"]
for _ in range(engine.gradient_accumulation_steps()):
    ids = torch.randint(4096, (micro, length))
    engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
    engine.step()
print("first step finished", flush=True)
