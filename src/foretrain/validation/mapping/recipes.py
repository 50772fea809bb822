"""What published recipes set for a run whose row names the software but not every option.

NeMo's performance tables from 25.09 on are made with the recipes of NVIDIA-NeMo/Megatron-Bridge:
scripts/performance/configs/llama/*_workload_base_configs.py (activations on the host),
scripts/performance/utils/overrides.py (precision-aware optimizer) and
scripts/performance/perf_plugins.py and src/megatron/bridge/perf_recipes (the allocator).
Those of 2024 are made with the YAML files of NVIDIA/NeMo-Framework-Launcher (conf/peft/llama/
sft.yaml; its performance scripts add fp8_params) and NVIDIA/dgxc-benchmarking
(nemotron/nemotron4-340b-synth.yaml); what dtype and weights mean for the optimizer says NeMo's
megatron_base_model.py (setup_optimization).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from foretrain.graph.precision import LOW, REMAINDER
from foretrain.validation.mapping.words import Assumed, first_number, has_word
from foretrain.validation.rows import Row

#: The first release of the tables that Megatron-Bridge's recipes made.
BRIDGE_RELEASE = 25.09
#: Layers whose activations go to the host in recipes with Megatron-FSDP, by layers, hidden size,
#: device and whether matrix products are narrower than 16 bits.
OFFLOADED: Mapping[tuple[int | None, int | None, str, bool], int] = {
    (80, 8192, "GB200", False): 20,
    (80, 8192, "GB200", True): 40,
    (80, 8192, "GB300", False): 30,
    (80, 8192, "GB300", True): 20,
    (80, 8192, "B200", True): 5,
    (126, 16384, "GB200", True): 92,
    (126, 16384, "GB300", False): 40,
    (126, 16384, "GB300", True): 10,
}

#: Micro-batch and ZeRO stage of Dao-AILab/flash-attention (training/configs/experiment/pile, for
#: devices of 80 GB) by layers and hidden size.
FLASH_RUNS: Mapping[tuple[int | None, int | None], tuple[int, int]] = {
    (12, 768): (32, 0),
    (24, 1024): (16, 0),
    (24, 1536): (16, 1),
    (24, 2048): (8, 1),
    (32, 2560): (4, 1),
}
#: Layers and hidden size of Nemotron-4 340B.
NEMOTRON_340B = (96, 18432)


def recipe_plan(row: Row, plan: Mapping[str, Any], word: str, assumed: Assumed) -> dict[str, Any]:
    """Returns the plan keys that the recipe of a row sets; `word` is its precision."""
    if not _is_bridge(row):
        return {}
    keys: dict[str, Any] = {}
    shape = (row.n_layers, row.hidden)
    layers = OFFLOADED.get((*shape, row.gpu_norm, word in LOW))
    if layers is not None and plan.get("zero") == 3 and plan["pp"] == 1 and not row.offload:
        assumed.add(f"activations of {layers} layers on the host (the recipe of the source)")
        keys["cpu_offloading_num_layers"] = layers
    if shape == (126, 16384) and row.gpu_norm == "GB200" and word in LOW:
        assumed.add("expandable segments of the allocator (the recipe of the source)")
        keys["expandable_segments"] = True
    return keys


def recipe_roles(row: Row, word: str, assumed: Assumed) -> dict[str, str]:
    """Returns the precision roles that the recipe of a row sets.

    16-bit recipes of Megatron-Bridge use the precision-aware optimizer, which keeps what bf16
    weights lack to their fp32 master copy; Megatron-FSDP does not go with it. Where the YAML files
    of 2024 name apex' distributed Adam with dtype bf16, both moments are bf16, and so is the master
    copy that FP8 weights need.
    """
    roles: dict[str, str] = {}
    if _is_bridge(row) and word == "bf16" and not has_word(row.sharding, "fsdp("):
        roles["master"] = REMAINDER
    elif word in LOW and '"fp8-param-gather":true' in row.notes:
        roles["weight"] = word
    elif word in LOW and row.family == "nemo_megatron_bridge" and row.framework == "Megatron-LM":
        # examples/llama/train_llama3_8b_h100_fp8.sh: --fp8-param-gather --grad-reduce-in-bf16
        roles = {"weight": word, "grad_accumulate": "bf16", "grad_reduce": "bf16"}
    elif _is_first_nemo(row) and _is_half_adam(row):
        roles = {"master": "bf16" if word in LOW else "none", "moments": "bf16"}
    if roles:
        text = ", ".join(f"{role} {dtype}" for role, dtype in roles.items())
        assumed.add(f"precision of {text} (the recipe of the source)")
    return roles


def flash_settings(row: Row, assumed: Assumed) -> tuple[dict[str, int], dict[str, int]]:
    """Returns what FlashAttention's training configurations set, for `training` and for `plan`."""
    run = FLASH_RUNS.get((row.n_layers, row.hidden))
    named = has_word(row.framework, "flash-attention training")
    if run is None or not named or row.mbs or row.n_gpus == 1:
        return {}, {}
    microbatch, zero = run
    assumed.add(f"microbatch = {microbatch}, zero = {zero} (the configuration of the source)")
    return {"microbatch": microbatch}, {"zero": zero}


def loss_chunks(row: Row, assumed: Assumed) -> int | None:
    """Returns in how many chunks the loss of torchtitan runs since 2026 (components/loss.py)."""
    minor = first_number(r"pytorch 2\.(\d+)", row.framework_version)
    if not has_word(row.framework, "torchtitan") or minor is None or minor < 12:
        return None
    assumed.add("the loss in 8 chunks (torchtitan's default, ChunkedCELoss)")
    return 8


def row_scales(row: Row, assumed: Assumed) -> dict[str, Any]:
    """Returns what differs in the stack of torchtitan with a scale per row (recipe rowwise).

    Its products are CUTLASS kernels, as vLLM's with a scale per token, and its styles of tensor
    parallelism gather before the cast (torchtitan's page on float8, torchao's README).
    """
    if not has_word(row.precision, "rowwise"):
        return {}
    assumed.add("FP8 with a scale per row: CUTLASS kernels, gathers in bf16")
    return {"low_kernels": {"fp8": "CutlassFP8ScaledMMLinearKernel"}, "low_gather": False}


def container_context(row: Row, assumed: Assumed) -> float | None:
    """Returns the GiB of the CUDA context in the container of lambdal/deeplearning-benchmark.

    All its batches of SQuAD are those of config_v1, which is for pytorch:22.09-py3 and later. That
    PyTorch loads all its kernels at start: 667 MB after one tensor, 287 MB where it loads lazily
    (pytorch pull request 85692), which is 0.5 GiB with the libraries of a training run.
    """
    if row.family != "lambda_gpu_benchmark" or not has_word(row.model, "squad"):
        return None
    assumed.add("the container pytorch:22.09-py3 (the batch is that of its configuration)")
    return 0.5 + 0.35


def _is_bridge(row: Row) -> bool:
    """Whether a recipe of Megatron-Bridge made the row."""
    release = first_number(r"NeMo ?(\d\d\.\d\d)", row.framework_version)
    bridge = has_word(row.framework, "megatron-bridge")
    return bridge and release is not None and release >= BRIDGE_RELEASE


def _is_half_adam(row: Row) -> bool:
    """Whether the YAML file of a row keeps the optimizer's states in bf16."""
    return has_word(row.task, "sft") or (row.n_layers, row.hidden) == NEMOTRON_340B


def _is_first_nemo(row: Row) -> bool:
    """Whether the row was made with the YAML files of NeMo 1: releases of 2024."""
    release = first_number(r"(?:NeMo ?|benchmarking v)(2\d\.\d\d)", row.framework_version)
    return has_word(row.framework, "nemo") and release is not None and release < 25
