"""Words that users bring along from elsewhere, and what ds4d says to them."""

from __future__ import annotations

from collections.abc import Mapping

# DeepSpeed keys that would contradict ds4d; in the schema they are refused with this text.
NOT_IN_DS4D: Mapping[str, str] = {
    "bfloat16": 'DeepSpeed\'s old name; write "bf16".',
    "tensor_parallel": (
        "DeepSpeed's AutoTP would contradict ds4d's layout; write ds4d.parallel.tp."
    ),
    "sequence_parallel_size": (
        "DeepSpeed's Ulysses would contradict ds4d's layout; write ds4d.parallel.cp, with "
        'ds4d.context.method "ulysses".'
    ),
    "expert_parallel": "ds4d has no expert parallelism yet; remove the block.",
    "use_data_before_expert_parallelism": "ds4d has no expert parallelism yet; remove the key.",
    "pipeline": "ds4d runs pipelines itself; write ds4d.parallel.pp and ds4d.pipeline.",
    "checkpoint": "ds4d writes its own checkpoints; write ds4d.checkpoint.",
    "datastates_ckpt": "ds4d writes its own checkpoints; write ds4d.checkpoint.",
    "data_efficiency": "ds4d feeds the data itself, in one order for every layout; see ds4d.data.",
    "autotuning": "ds4d does not run DeepSpeed's autotuner; see `ds4d plan`.",
    "hybrid_engine": "DeepSpeed's engine for RLHF is not part of ds4d; remove the block.",
    "weight_quantization": "Of DeepSpeed's inference, not of training; remove the block.",
}

# A word from Megatron, Accelerate, torchtitan, nanotron, the HF Trainer ... -> ds4d's key.
FOREIGN_WORDS: Mapping[str, str] = {
    "tensor_parallel_size": "ds4d.parallel.tp",
    "tensor_model_parallel_size": "ds4d.parallel.tp",
    "tensor_parallel_degree": "ds4d.parallel.tp",
    "tp_size": "ds4d.parallel.tp",
    "autotp_size": "ds4d.parallel.tp",
    "pipeline_parallel_size": "ds4d.parallel.pp",
    "pipeline_model_parallel_size": "ds4d.parallel.pp",
    "pipeline_parallel_degree": "ds4d.parallel.pp",
    "pp_size": "ds4d.parallel.pp",
    "pipe_parallel_size": "ds4d.parallel.pp",
    "num_stages": "ds4d.parallel.pp",
    "context_parallel_size": "ds4d.parallel.cp",
    "context_parallel_degree": "ds4d.parallel.cp",
    "cp_size": "ds4d.parallel.cp",
    "sp_size": "ds4d.parallel.cp",
    "data_parallel_size": "ds4d.parallel.dp",
    "dp_size": "ds4d.parallel.dp",
    "dp_replicate_size": "ds4d.parallel.dp",
    "data_parallel_replicate_degree": "ds4d.parallel.dp",
    "data_parallel_shard_degree": "zero_optimization.stage",
    "dp_shard_size": "zero_optimization.stage",
    "zero_stage": "zero_optimization.stage",
    "pipeline_parallel_schedule": "ds4d.pipeline.schedule",
    "pp_engine": "ds4d.pipeline.schedule",
    "virtual_pipeline_model_parallel_size": "ds4d.pipeline.chunks",
    "virtual_pipeline_parallel_size": "ds4d.pipeline.chunks",
    "num_layers_per_virtual_pipeline_stage": "ds4d.pipeline.chunks",
    "num_virtual_stages": "ds4d.pipeline.chunks",
    "pipeline_model_parallel_layout": "ds4d.pipeline.split",
    "pipeline_parallel_split_points": "ds4d.pipeline.split",
    "module_fqns_per_model_part": "ds4d.pipeline.split",
    "pipe_partition_method": "ds4d.pipeline.split",
    "partition_method": "ds4d.pipeline.split",
    "cp_comm_type": "ds4d.context.method",
    "global_batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "batch_size": "train_batch_size",
    "num_micro_batches": "gradient_accumulation_steps",
    "batch_accumulation_per_replica": "gradient_accumulation_steps",
    "seq_length": "ds4d.data.seq_len",
    "sequence_length": "ds4d.data.seq_len",
    "max_seq_length": "ds4d.data.seq_len",
    "max_length": "ds4d.data.seq_len",
    "train_iters": "ds4d.training.steps",
    "train_steps": "ds4d.training.steps",
    "max_steps": "ds4d.training.steps",
    "num_train_epochs": "ds4d.training.epochs",
    "eval_interval": "ds4d.training.eval_every",
    "eval_steps": "ds4d.training.eval_every",
    "save_interval": "ds4d.checkpoint.every",
    "save_steps": "ds4d.checkpoint.every",
    "save_total_limit": "ds4d.checkpoint.keep",
    "recompute_granularity": "ds4d.recompute",
    "gradient_checkpointing": "ds4d.recompute",
    "model_name_or_path": "ds4d.model.path",
    "hf_model_name_or_path": "ds4d.model.path",
    "tokenizer_name_or_path": "ds4d.data.tokenizer.path",
    "learning_rate": "optimizer.params.lr",
    "adam_beta1": "optimizer.params.betas",
    "adam_beta2": "optimizer.params.betas",
    "adam_epsilon": "optimizer.params.eps",
    "clip_grad": "gradient_clipping",
    "max_grad_norm": "gradient_clipping",
    "warmup_ratio": "scheduler.params.warmup_ratio",
    "lr_scheduler_type": "scheduler.type",
}

# DeepSpeed's or torch's optimizers that ds4d refuses: under ZeRO each rank updates a flat slice,
# and a rule that looks at whole matrices would change the training curve with the layout.
_WHOLE_MATRICES = "looks at whole matrices, which ZeRO cuts: the result would depend on the layout"
_APPROXIMATE = "compresses gradients, so that the result would depend on the layout"
REFUSED_OPTIMIZERS: Mapping[str, str] = {
    "Lamb": _WHOLE_MATRICES,
    "FusedLamb": _WHOLE_MATRICES,
    "Muon": _WHOLE_MATRICES,
    "Adafactor": _WHOLE_MATRICES,
    "LBFGS": _WHOLE_MATRICES,
    "OneBitAdam": _APPROXIMATE,
    "ZeroOneAdam": _APPROXIMATE,
    "OneBitLamb": _APPROXIMATE,
    "MuAdam": "needs a model that was built with mup",
    "MuAdamW": "needs a model that was built with mup",
    "MuSGD": "needs a model that was built with mup",
}
