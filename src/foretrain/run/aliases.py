"""The keys of a run file, and the names that other tools give to the same things.

One concept has many spellings. A spelling is accepted where it means exactly one thing; where it
is ambiguous, or counts in other units, it is refused with the words to use instead.
"""

from __future__ import annotations

from collections.abc import Mapping

SECTIONS = ("model", "training", "plan", "cluster", "stack")

TRAINING_KEYS = (
    "sequence",
    "target_sequence",
    "image",
    "global_batch",
    "microbatch",
    "accumulation",
    "precision",
    "optimizer",
    "table_optimizer",
    "lookups",
)

PLAN_KEYS = (
    "preset",
    "tp",
    "pp",
    "dp",
    "cp",
    "ep",
    "etp",
    "shard",
    "zero",
    "sequence_parallel",
    "interleave",
    "schedule",
    "in_flight",
    "stages",
    "recompute",
    "reshard",
    "no_sync",
    "offload",
    "optimizer_offload_fraction",
    "cpu_offloading_num_layers",
    "expandable_segments",
    "bucket_mib",
    "prefetch",
    "overlap",
    "order",
    "tables",
    "assignment",
    "overrides",
    "tree",
)

KEYS: Mapping[str, tuple[str, ...]] = {"training": TRAINING_KEYS, "plan": PLAN_KEYS}

#: Spellings of Megatron-LM, DeepSpeed, torchtitan, NeMo, Hugging Face, GPT-NeoX, llm-foundry.
TRAINING_ALIASES: Mapping[str, str] = {
    "seq_len": "sequence",
    "seqlen": "sequence",
    "seq_length": "sequence",
    "sequence_length": "sequence",
    "sequence_len": "sequence",
    "cutoff_len": "sequence",
    "encoder_seq_length": "sequence",
    "source_sequence": "sequence",
    "max_source_length": "sequence",
    "inputs_length": "sequence",
    "decoder_seq_length": "target_sequence",
    "decoder_sequence": "target_sequence",
    "seq_length_dec": "target_sequence",
    "max_seq_length_dec": "target_sequence",
    "max_target_length": "target_sequence",
    "target_length": "target_sequence",
    "targets_length": "target_sequence",
    "max_seq_len": "sequence",
    "image_size": "image",
    "img_size": "image",
    "micro_batch": "microbatch",
    "micro_batch_size": "microbatch",
    "microbatch_size": "microbatch",
    "mbs": "microbatch",
    "per_device_train_batch_size": "microbatch",
    "train_micro_batch_size_per_gpu": "microbatch",
    "device_train_microbatch_size": "microbatch",
    "global_batch_size": "global_batch",
    "gbs": "global_batch",
    "train_batch_size": "global_batch",
    "global_train_batch_size": "global_batch",
    "gradient_accumulation_steps": "accumulation",
    "gradient_accumulation": "accumulation",
    "grad_accumulation": "accumulation",
    "grad_accum": "accumulation",
    "accumulate_grad_batches": "accumulation",
    "batch_accumulation_per_replica": "accumulation",
    "dtype": "precision",
    "torch_dtype": "precision",
    "mixed_precision": "precision",
    "optim": "optimizer",
    "grad_reduce_in_bf16": "precision.grad_reduce",  # SEVERAL, below
    "grad_reduce_in_fp32": "precision.grad_reduce",
    "accumulate_allreduce_grads_in_fp32": "precision.grad_reduce",
    "use_precision_aware_optimizer": "precision.master",
    "store_param_remainders": "precision.master",
    "main_grads_dtype": "precision.grad_accumulate",
    "main_params_dtype": "precision.master",
    "exp_avg_dtype": "precision.moments",
    "exp_avg_sq_dtype": "precision.second_moment",
}

PLAN_ALIASES: Mapping[str, str] = {
    "tensor_parallel": "tp",
    "tensor_parallel_size": "tp",
    "tensor_parallel_degree": "tp",
    "tensor_model_parallel_size": "tp",
    "tp_size": "tp",
    "pipeline_parallel": "pp",
    "pipeline_parallel_size": "pp",
    "pipeline_parallel_degree": "pp",
    "pipeline_model_parallel_size": "pp",
    "pipe_parallel_size": "pp",
    "pp_size": "pp",
    "data_parallel": "dp",
    "data_parallel_size": "dp",
    "dp_size": "dp",
    "context_parallel": "cp",
    "context_parallel_size": "cp",
    "context_parallel_degree": "cp",
    "cp_size": "cp",
    "expert_parallel": "ep",
    "expert_parallel_size": "ep",
    "expert_parallel_degree": "ep",
    "expert_model_parallel_size": "ep",
    "ep_size": "ep",
    "expert_tensor_parallel_size": "etp",
    "dp_shard_size": "shard",
    "data_parallel_shard_degree": "shard",
    "zero_stage": "zero",
    "interleaved": "interleave",
    "virtual_pipeline_model_parallel_size": "interleave",
    "num_virtual_stages_per_pipeline_rank": "interleave",
    "vpp": "interleave",
    "pipeline_schedule": "schedule",
    "pipeline_parallel_schedule": "schedule",
    "activation_checkpointing": "recompute",
    "activation_checkpoint": "recompute",
    "activations_checkpoint_granularity": "recompute",
    "checkpoint_activations": "recompute",
    "gradient_checkpointing": "recompute",
    "fsdp_activation_checkpointing": "recompute",
    "recompute_granularity": "recompute",
    "recompute_modules": "recompute.modules",
    "recompute_num_layers": "recompute.layers",
    "reshard_after_forward": "reshard",
    "activation_offload_layers": "cpu_offloading_num_layers",
    "optimizer_cpu_offload": "offload",
    "sync_each_batch": "no_sync",
    "bucket_cap_mb": "bucket_mib",
    "ddp_bucket_cap_mb": "bucket_mib",
    "overlap_grad_reduce": "overlap.grad",
    "overlap_grad_sync": "overlap.grad",
    "overlap_comm": "overlap.grad",
    "overlap_param_gather": "overlap.param",
    "overlap_param_sync": "overlap.param",
    "tp_comm_overlap": "overlap.tp",
    "ub_tp_comm_overlap": "overlap.tp",
    "overlap_p2p_comm": "overlap.p2p",
    "overlap_p2p_communication": "overlap.p2p",
}

#: Words whose alias above is not all that they say: run/foreign_words.py reads them.
SEVERAL = (
    "grad_reduce_in_bf16",
    "grad_reduce_in_fp32",
    "accumulate_allreduce_grads_in_fp32",
    "use_precision_aware_optimizer",
    "store_param_remainders",
    "main_grads_dtype",
    "main_params_dtype",
    "optimizer_cpu_offload",
    "sync_each_batch",
)

ALIASES: Mapping[str, Mapping[str, str]] = {"training": TRAINING_ALIASES, "plan": PLAN_ALIASES}

#: Words that mean different things in different tools: the reader is told what to write.
HINTS: Mapping[str, Mapping[str, str]] = {
    "": {
        "gpus": "write cluster, e.g. 'cluster: 1x8 h100-sxm'",
        "devices": "write cluster, e.g. 'cluster: 1x8 h100-sxm'",
        "hardware": "write cluster, e.g. 'cluster: 1x8 h100-sxm'",
        "parallelism": "write plan, e.g. 'plan: {tp: 8, pp: 2}'",
        "strategy": "write plan, e.g. 'plan: {tp: 8, pp: 2}'",
    },
    "training": {
        "batch": "say global_batch (samples per optimizer step over all ranks) or microbatch "
        "(samples per data-parallel rank and micro-step)",
        "batch_size": "say global_batch (samples per optimizer step over all ranks) or "
        "microbatch (samples per data-parallel rank and micro-step)",
        "bs": "say global_batch (samples per optimizer step over all ranks) or microbatch "
        "(samples per data-parallel rank and micro-step)",
        "local_batch_size": "say microbatch (samples per data-parallel rank and micro-step) and "
        "global_batch",
        "max_position_embeddings": "that is a limit of the model; say sequence for the length",
    },
    "plan": {
        "mp": "say tp (tensor parallel) or pp (pipeline parallel)",
        "model_parallel_size": "say tp (tensor parallel) or pp (pipeline parallel)",
        "sequence_parallel_size": "Ulysses is not modelled yet; sequence_parallel: true is the "
        "split of norms and dropout over the tensor-parallel ranks",
        "reduce_bucket_size": "that counts elements; say bucket_mib",
        "allgather_bucket_size": "that counts elements; say bucket_mib",
        "layout": "write the short form as the plan itself: 'plan: 2M4P1D'",
        "dp_replicate": "say shard, the size of the group that shards (dp / dp_replicate)",
        "dp_shard": "say shard, the size of the group that shards",
        "data_parallel_replicate_degree": "say shard, the size of the group that shards",
        "num_layers_per_virtual_pipeline_stage": "say interleave, the chunks per rank: "
        "layers / (pp x layers per virtual stage)",
    },
}

OFFLOAD_SYNONYMS = {
    "optim": "optimizer",
    "optimizer-states": "optimizer",
    "cpu-optimizer": "optimizer",
    "params": "parameters",
    "param": "parameters",
    "parameter": "parameters",
    "all": "parameters",
}
RECOMPUTE_SYNONYMS: Mapping[str, str] = {
    "false": "none",
    "off": "none",
    "no": "none",
    "true": "full",
    "on": "full",
    "yes": "full",
    "core_attn": "selective",
    "core-attention": "selective",
}

SCHEDULE_SYNONYMS: Mapping[str, str] = {
    "afab": "gpipe",
    "fill-drain": "gpipe",
    "dapple": "1f1b",
    "pipedream-flush": "1f1b",
    "interleaved-1f1b": "interleaved",
    "interleaved1f1b": "interleaved",
    "1f1b-interleaved": "interleaved",
}

#: Known schedules that the compiler cannot lower yet.
LATER_SCHEDULES = (
    "zero-bubble",
    "zb",
    "zb-h1",
    "zb-h2",
    "zbv",
    "zbvzerobubble",
    "interleavedzerobubble",
    "dualpipe",
    "dualpipev",
    "chimera",
    "loopedbfs",
)

#: Words of training.optimizer; compiler/optimizer.py says what each reads, writes and keeps.
OPTIMIZERS = (
    "none",
    "sgd",
    "sgd-momentum",
    "adam",
    "adamw",
    "lamb",
    "adafactor",
    "adam-8bit",
    "adagrad",
)

OPTIMIZER_SYNONYMS: Mapping[str, str] = {
    "momentum": "sgd-momentum",
    "false": "none",
    "off": "none",
    "no": "none",
    "adam-w": "adamw",
    "adamw-torch": "adamw",
    "adamw-torch-fused": "adamw",
    "fused-adam": "adam",
    "fusedadam": "adam",
    "sgdm": "sgd-momentum",
    "fused-lamb": "lamb",
    "fusedlamb": "lamb",
    "adam8bit": "adam-8bit",
    "adamw8bit": "adam-8bit",
    "adamw-8bit": "adam-8bit",
    "adamw-bnb-8bit": "adam-8bit",
}

#: Optimizers of embedding tables whose rows backward updates (compiler/tables.py).
TABLE_OPTIMIZERS = ("sgd", "rowwise-adagrad", "adagrad", "adam")

TABLE_OPTIMIZER_SYNONYMS: Mapping[str, str] = {
    "row-wise-adagrad": "rowwise-adagrad",
    "exact-row-wise-adagrad": "rowwise-adagrad",
    "exact-rowwise-adagrad": "rowwise-adagrad",
    "exact-sgd": "sgd",
    "exact-adagrad": "adagrad",
}

#: Spellings of the ways of plan.tables.
TABLE_WAY_SYNONYMS: Mapping[str, str] = {
    "table": "table-wise",
    "tablewise": "table-wise",
    "row": "row-wise",
    "rowwise": "row-wise",
    "column": "column-wise",
    "columnwise": "column-wise",
    "replicated": "data-parallel",
    "dp": "data-parallel",
}

PRECISION_SYNONYMS: Mapping[str, str] = {
    "bfloat16": "bf16",
    "bf16-mixed": "bf16",
    "amp-bf16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "fp16-mixed": "fp16",
    "16-mixed": "fp16",
    "16": "fp16",
    "amp-fp16": "fp16",
    "float32": "fp32",
    "single": "fp32",
    "32": "fp32",
    "float8": "fp8",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.half": "fp16",
    "torch.float32": "fp32",
    "torch.float": "fp32",
    "float": "fp32",
    "uint8": "fp8",  # Megatron's name for moments in 8 bits
    "torch.uint8": "fp8",
}


def canonical(section: str, key: str) -> str | None:
    """Returns our name of a key of `section` (a dotted one for `overlap`), None if unknown."""
    word = plain(key)
    if word in KEYS[section]:
        return word
    return ALIASES[section].get(word)


def plain(key: str) -> str:
    """Returns a key in our spelling: lower case, underscores, no leading dashes."""
    return key.strip().lstrip("-").replace("-", "_").lower()


def home(key: str) -> str | None:
    """Returns the dotted path of a bare field name ("tp" -> "plan.tp"), None if unknown.

    A word that says several things keeps its name below its section.
    """
    word = plain(key)
    if word in SECTIONS:
        return word
    for section in KEYS:
        name = canonical(section, word)
        if name is not None:
            return f"{section}.{word if word in SEVERAL else name}"
    return None
