"""The software stack of a row, by the words of its framework columns."""

from __future__ import annotations

import re

from foretrain.stack import Stack
from foretrain.validation.mapping.words import Assumed, Unsupported, has_word
from foretrain.validation.rows import Row

#: Framework words -> stack, the first match decides. The last column says what the stack stands
#: in for; empty where it is the framework itself.
STACKS: tuple[tuple[str, str, str], ...] = (
    (r"megatron-deepspeed", "deepspeed", ""),
    (r"hf transformers trainer.*deepspeed", "hf-deepspeed", ""),
    (r"deepspeed", "deepspeed", ""),
    (r"nanotron", "nanotron", ""),
    (r"automodel", "fsdp", "NeMo AutoModel as FSDP"),
    (r"nemo|megatron-bridge", "nemo", ""),
    (r"torchtitan", "torchtitan", ""),
    (r"kempnerforge", "torchtitan", "KempnerForge as torchtitan (FSDP2, torch.compile)"),
    (r"llm-foundry|composer", "llm-foundry", ""),
    (r"maxtext", "jax-xla", ""),
    (r"paxml|t5x|jax", "jax-xla", ""),
    (r"internevo", "internevo", ""),
    (r"fms-fsdp", "torchtitan", "fms-fsdp as torchtitan (FSDP with torch.compile)"),
    (r"paddle", "paddle", ""),
    (r"oneflow|libai", "megatron", "OneFlow as megatron"),
    (r"dedloc", "pytorch-eager", "the GPipe prototype as pytorch-eager without flash attention"),
    (r"flash-attention", "pytorch-eager", "the FlashAttention training script as pytorch-eager"),
    (r"torchtune.*compile|torch\.compile", "pytorch-compile", ""),
    (r"thunder", "pytorch-compile", "Thunder as pytorch-compile"),
    (r"hf transformers trainer", "hf-trainer", ""),
    (r"litgpt|torchtune|nanogpt|hf transformers", "pytorch-eager", ""),
    (r"gpt-?neox", "deepspeed", "GPT-NeoX as DeepSpeed"),
    (r"megatron|flagscale", "megatron", ""),
    (r"colossal|fairscale|metaseq", "fsdp", "a sharding library as FSDP"),
    (r"olmo|levanter", "pytorch-compile", "the trainer as PyTorch with torch.compile"),
    (r"axolotl|accelerate|lightning|trl|factory|hf trainer|transformers", "pytorch-eager", ""),
    (r"pytorch", "pytorch-eager", ""),
)

#: Words that say that Megatron-LM ran with Transformer Engine: its Core releases do by default.
_TE_WORDS = ("transformer_engine", " te ", "(te)", "megatron-core", "core_", "flagscale", "contain")

#: Revisions of JAX-Toolbox whose tables were measured before its Pax containers enabled flash
#: attention (rosetta/projects/pax/README.md, changelog of 4/26/2024).
_PAX_UNFUSED = ("69233e9c", "7dd2621a", "d95cb7dc", "db437900", "62799732")

#: GPUs of Jean Zay from which on jobs of BLOOM always hung without CUDA_LAUNCH_BLOCKING.
HUNG_GPUS = 320


def map_stack(row: Row, assumed: Assumed) -> str:
    """Returns the name of a stack of the catalog.

    Raises:
        Unsupported: the framework is not stated, or none of the stacks is near it.
    """
    if not row.framework:
        raise Unsupported("the framework is not stated")
    found = [rest for pattern, *rest in STACKS if re.search(pattern, row.framework, re.IGNORECASE)]
    if not found:
        raise Unsupported(f"no stack is near the framework {row.framework!r}")
    stack, stands_for = found[0]
    if stack == "deepspeed" and row.family == "flagperf":
        # */deepspeed/model of FlagPerf: LlamaForCausalLM and modules of the models' authors
        stack = "hf-deepspeed"
    if stack == "megatron" and not stands_for:
        stack = _megatron(row, assumed)
    if stack == "torchtitan" and "torch.compile=False" in row.notes:
        stack = "fsdp"
    if stack == "pytorch-eager" and has_word(row.notes, "[+ compile]"):
        stack = "pytorch-compile"
    if stack == "pytorch-eager" and is_fsdp(row):
        stack = "fsdp"
    if stands_for:
        assumed.add(f"stack: {stands_for}")
    return stack


def is_fsdp(row: Row) -> bool:
    """Returns whether PyTorch shards the model: as stated; torchtune does on several GPUs."""
    several = (row.n_gpus or 1) > 1
    return has_word(row.sharding, "fsdp", "hsdp") or (
        several and has_word(row.framework, "torchtune")
    )


def _megatron(row: Row, assumed: Assumed) -> str:
    """Megatron-LM with or without Transformer Engine: by option, by version, else by year."""
    if '"transformer-impl":"local"' in row.notes:
        return "megatron"
    text = f"{row.framework} {row.framework_version} {row.attention_impl} {row.notes}"
    if row.framework.lower() == "flagscale":  # aquila2_7b/flagscale/flagscale_main.sh: 2023
        return "megatron"
    if has_word(text, *_TE_WORDS):
        return "megatron-te"
    years = [int(year) for year in re.findall(r"20[12]\d", row.framework_version)]
    year = max(years, default=0)
    if re.search(r"megatron-lm-24", row.framework_version, re.IGNORECASE):
        year = 2024
    if not year and not row.framework_version:
        assumed.add("stack = megatron (version not stated)")
    return "megatron-te" if year >= 2024 else "megatron"


def map_checks(row: Row, assumed: Assumed) -> bool:
    """Returns whether every collective of a row was checked by all its ranks first.

    The Ultra-Scale Playbook ran its pipelines again once they had hung (nanotron,
    scripts/scaling_benchmarks.py: rows without a pipeline and above a job number are left out), and
    the run script of that time exports TORCH_DISTRIBUTED_DEBUG=DETAIL (nanotron,
    examples/moe/run_multinode.sh). The source does not say which rows: docs/explain/costs.md.
    """
    over_nodes = (row.n_gpus or 1) > (row.gpus_per_node or 8)
    checked = row.family == "ultrascale_playbook" and (row.pp or 1) > 1 and over_nodes
    if checked:
        assumed.add("collectives checked by all ranks (TORCH_DISTRIBUTED_DEBUG, not stated)")
    return checked


def map_blocking(row: Row, assumed: Assumed) -> bool:
    """Returns whether the host of a row waited for the device after every launch.

    BLOOM's runs of 200B parameters on Jean Zay hung from 320 GPUs on unless CUDA_LAUNCH_BLOCKING
    was set (bigscience, train/tr11-176B-ml/chronicles-prequel.md, "dealing with JZ hanging on the
    large model"; the script of the training sets it too).
    """
    large = row.gpu_norm == "A100-SXM" and (row.n_gpus or 1) >= HUNG_GPUS
    blocking = row.family == "bigscience_bloom" and large
    if blocking:
        assumed.add("every launch blocks (CUDA_LAUNCH_BLOCKING; without it such jobs hung)")
    return blocking


def map_scatter(row: Row, assumed: Assumed) -> bool | None:
    """Returns False where every tp rank sends the whole boundary of a stage, else None: the stack.

    OneFlow has no option to send parts of it.
    """
    oneflow = has_word(row.framework, "oneflow", "libai")
    if not oneflow or (row.pp or 1) == 1 or (row.tp or 1) == 1:
        return None
    assumed.add("every tp rank sends the whole boundary of a stage (not stated)")
    return False


def map_kernel(row: Row, stack: Stack) -> str | None:
    """Returns the attention kernel that a row names, None where it is the stack's or not named."""
    named = has_word(row.attention_impl, "flashattention-2", "flash v2")
    return "flash2" if named and stack.attention_kernel != "flash2" else None


def map_attention(row: Row) -> str | None:
    """Returns fused or unfused where the source says so, None where the stack decides."""
    text = row.attention_impl
    if has_word(row.framework, "paxml") and has_word(row.framework_version, *_PAX_UNFUSED):
        return "unfused"
    if row.family == "flagperf" and has_word(row.model, "baichuan2_13b"):
        return "unfused"  # its page: the model has no FlashAttention-2
    if row.family == "flagperf" and has_word(row.model, "chatglm3_6b"):
        return "fused"  # modeling_chatglm.py: scaled_dot_product_attention
    if not text:  # the prototype, and GPT models of HF transformers before 2024
        return "unfused" if has_word(row.framework, "dedloc", "hf transformers") else None
    if has_word(text, "unfused", "no flashattention", "eager", "local", "math"):
        return "unfused"
    return "fused" if has_word(text, "flash", "fused", "sdpa", "cudnn") else None
