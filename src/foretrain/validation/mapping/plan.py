"""The plan of a row: degrees, sharding, schedule, recompute, overlap."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from foretrain.stack import Stack
from foretrain.strategy.choices import even_stages
from foretrain.validation.mapping.stack import is_fsdp
from foretrain.validation.mapping.words import Assumed, Unsupported, first_number, has_word
from foretrain.validation.rows import Row

#: Bytes of model states per parameter: what a group of ranks has to hold at least.
STATE_BYTES = 16.0
#: Chunks per rank of NeMo's recommended configurations by layers, hidden, tp and pp (NVIDIA/NeMo,
#: scripts/performance/recommended_model_configs/model_configs_h100.csv).
NEMO_CHUNKS: Mapping[tuple[int | None, ...], int] = {
    (96, 12288, 4, 8): 6,  # GPT-3 175B
    (80, 8192, 4, 4): 5,  # Llama 3 70B
    (80, 8192, 4, 8): 5,
    (126, 16384, 8, 8): 8,  # Llama 3.1 405B
    (96, 18432, 8, 8): 12,  # Nemotron-4 340B
}

#: Recompute of torchtitan's configurations of Llama 3 (models/llama3/config_registry.py) by hidden
#: size: 8B, 70B, 405B.
TORCHTITAN: Mapping[int | None, str] = {4096: "selective", 8192: "full", 16384: "full"}

#: Frameworks whose model-parallel degrees are 1 unless stated.
_SHARDING_ONLY = ("fsdp", "ddp", "plain")


def map_plan(row: Row, stack: Stack, assumed: Assumed) -> dict[str, Any]:
    """Returns the `plan` section of a run file.

    Raises:
        Unsupported: the degrees are not stated.
    """
    row = _with_chunks(row, stack, assumed)
    plan: dict[str, Any] = {"preset": _preset(row, stack)}
    plan |= _degrees(row, str(plan["preset"]), assumed)
    if (row.cp or 1) > 1:
        plan["cp"] = row.cp
    if (row.vpp or 1) > 1:
        plan["interleave"] = row.vpp
    stages = _uneven_stages(row, int(plan["pp"]), assumed)
    if stages and stack.stage_split == "even":
        plan["stages"] = stages
    if "gpipe" in f"{row.framework} {row.notes}".lower():
        plan["schedule"] = "gpipe"
    if row.family == "mli_3090ti" and stack.name == "hf-deepspeed" and not row.offload:
        # its ds_config is transformers/tests/deepspeed/ds_config_zero2.json: offload_optimizer cpu
        assumed.add("offload = optimizer (the configuration file that the source names)")
        plan["offload"] = "optimizer"
    if has_word(row.notes, "fp32 model offload"):
        plan["offload"] = "optimizer"
    if row.offload:
        plan["offload"] = _offload(row, str(plan["preset"]), assumed)
    plan |= _sharding(row, stack, plan, assumed)
    plan["sequence_parallel"] = _sequence_parallel(row, stack, plan, assumed)
    plan["recompute"] = map_recompute(row, stack, assumed)
    overlap = map_overlap(row, stack)
    if overlap:
        plan["overlap"] = overlap
    if has_word(row.sharding, "no_sync") and int(plan.get("zero") or 0) >= 2:
        # the trainer keeps gradients whole until the last micro-batch and reduces them once
        plan["overrides"] = {"": {"memory": {"grad_accumulator": {}}}}
    return plan


def _with_chunks(row: Row, stack: Stack, assumed: Assumed) -> Row:
    """The row with the chunks per rank of NeMo's own configuration where it states none."""
    chunks = NEMO_CHUNKS.get((row.n_layers, row.hidden, row.tp, row.pp))
    if stack.name != "nemo" or row.vpp is not None or chunks is None:
        return row
    assumed.add(f"vpp = {chunks} (NeMo's configuration of this model, not stated)")
    return replace(row, vpp=chunks)


def _preset(row: Row, stack: Stack) -> str:
    if row.n_gpus == 1 and stack.preset in ("ddp", "fsdp"):
        return "plain"
    if stack.name == "pytorch-compile" and is_fsdp(row):
        return "fsdp"
    return stack.preset


def _offload(row: Row, preset: str, assumed: Assumed) -> str:
    """What lives on the host. FSDP's own option moves all shards there, whatever runs the step."""
    if preset == "fsdp" and has_word(row.offload, "cpu offload"):
        assumed.add(f"offload = parameters ({row.offload!r} of FSDP moves every shard)")
        return "parameters"
    return row.offload


def _degrees(row: Row, preset: str, assumed: Assumed) -> dict[str, int]:
    """tp and pp; one that is missing follows from the others where they are stated."""
    tp, pp, devices = row.tp, row.pp, row.n_gpus or 1
    known = (row.cp or 1) * (row.dp or 0)
    if (tp is None) != (pp is None) and known:
        other, rest = divmod(devices, known * (tp or pp or 1))
        if not rest and other >= 1:
            assumed.add(f"{'tp' if tp is None else 'pp'} = {other} (from the other degrees)")
            return {"tp": tp or other, "pp": pp or other}
    if tp is None and pp is None and not (preset in _SHARDING_ONLY or devices == 1):
        raise Unsupported("tensor and pipeline degrees are not stated")
    if tp is None or pp is None:
        assumed.add("tp = 1, pp = 1 where not stated")
    return {"tp": tp or 1, "pp": pp or 1}


def _uneven_stages(row: Row, pp: int, assumed: Assumed) -> list[int]:
    """Layers per virtual stage where they do not come out even; empty where they do.

    NeMo and torchtitan count embedding and loss as a layer each, which may be all that a stage has;
    where that does not come out even either, the first stages get one layer more.
    """
    layers, chunks = row.n_layers or 0, pp * (row.vpp or 1 if pp > 1 else 1)
    if layers % chunks == 0 or layers + 2 < chunks:
        return []
    size, rest = divmod(layers + 2, chunks)
    if rest == 0 and chunks > 2:
        assumed.add("embedding and loss count as a layer each in the split over stages")
        return [size - 1, *[size] * (chunks - 2), size - 1]
    if layers < chunks:
        return []
    assumed.add("layers spread over the stages as evenly as they come")
    return even_stages(layers, chunks)


def _sharding(row: Row, stack: Stack, plan: Mapping[str, Any], assumed: Assumed) -> dict[str, Any]:
    """zero and shard from `zero_stage` and `sharding`."""
    result: dict[str, Any] = {}
    zero = _stage(row)
    if zero is None and has_word(row.framework, "flagscale"):
        # the same script: --use-distributed-optimizer
        assumed.add("zero = 1 (not stated; the script of the source)")
        zero = 1
    if zero is None and plan["preset"] != "plain":
        default = stack.defaults.get("zero")
        if default is not None:
            zero = int(default)
        assumed.add(f"zero = {'default of the preset' if zero is None else zero} (not stated)")
    if zero is not None:
        result["zero"] = 0 if plan["preset"] == "plain" else zero
    size = _shard_size(row, assumed)
    if size is not None and (zero or 0) > 0:
        if size == 1:
            result["zero"] = 0
        else:
            result["shard"] = size
    return result


def _stage(row: Row) -> int | None:
    stage = first_number(r"^(\d)", row.zero_stage)
    if stage is not None:
        return int(stage)
    text = row.sharding.lower()
    stage = first_number(r"(?:zero-?|stage ?)(\d)", text)
    if stage is not None:
        return int(stage)
    if has_word(text, "shard_grad_op"):
        return 2
    if text == "dp" or has_word(text, "ddp", "single"):
        return None if "table fsdp=0" in text else 0
    if has_word(text, "fsdp", "hsdp"):
        return 3
    return 1 if has_word(text, "distributed optimizer") else None


def _shard_size(row: Row, assumed: Assumed) -> int | None:
    """The ranks that share one copy, where they are fewer than all replicas."""
    text = f"{row.zero_stage} {row.sharding}"
    inner = re.search(r"dcn_FSDP=(\d+) ici_FSDP=(\d+)", text)
    if inner:
        return int(inner[1]) * int(inner[2])
    size = first_number(r"(?:shard group |fsdp=|fsdp2 )(\d+)", text)
    if size is not None and "table fsdp=0" not in text.lower():
        return int(size)
    if has_word(text, "hsdp", "fsdp+dp"):
        node = min(row.gpus_per_node or 8, row.n_gpus or 8)
        if STATE_BYTES * (row.params_b or 0.0) / node > (row.gpu_mem_gb or inf):
            assumed.add("shard = all ranks (not stated; the states do not fit one node)")
            return None
        assumed.add(f"shard = {node}, one node (the group is not stated)")
        return node
    return None


def _sequence_parallel(row: Row, stack: Stack, plan: Mapping[str, Any], assumed: Assumed) -> bool:
    if plan["tp"] == 1:
        return False
    if row.sp:
        return has_word(row.sp, "yes", "true", "1", "on")
    if has_word(row.recompute, "+ sp"):
        return True
    value = bool(stack.defaults.get("sequence_parallel", False))
    assumed.add(f"sequence_parallel = {str(value).lower()} (not stated; stack {stack.name})")
    return value


def map_recompute(row: Row, stack: Stack, assumed: Assumed) -> Any:
    """Returns the recompute setting: none, full, selective, or full for some layers."""
    text = row.recompute.lower()
    if not text:
        return _usual_recompute(row, stack, assumed)
    if text.startswith("none"):
        return "none"
    if text.startswith("full"):
        return "full"
    if has_word(text, "selective layer") or has_word(row.framework, "fms-fsdp"):
        layers = max((row.n_layers or 2) // max(row.pp or 1, 1) // 2, 1)
        assumed.add("recompute: every second block in full")
        return {"mode": "full", "layers": layers}
    if has_word(text, "selective"):
        if not has_word(text, "core attention", "+ sp", "activations"):
            assumed.add(f"recompute = selective as the stack defines it ({row.recompute!r})")
        return "selective"
    raise Unsupported(f"recompute {row.recompute!r} is not modelled")


def _usual_recompute(row: Row, stack: Stack, assumed: Assumed) -> str:
    """What the scripts or pages of a source say where its row says nothing, else the stack."""
    if has_word(row.notes, "recompute not enabled"):
        return "none"
    mode, why = str(stack.defaults.get("recompute", "none")), f"stack {stack.name}"
    if has_word(row.framework, "flagscale"):
        # flagscale_main.sh of FlagPerf's aquila2_7b names no recomputation
        mode, why = "none", "the script of the source"
    elif row.family == "flagperf" and has_word(row.model, "baichuan2_13b"):
        mode, why = "full", "the page of the source: gradient checkpointing"
    elif has_word(row.framework, "dedloc"):
        # modules/gpt_modules.py of the source: both halves of a block are checkpoints
        mode, why = "full", "the prototype's blocks are checkpoints"
    elif has_word(row.framework, "torchtitan") and row.hidden in TORCHTITAN:
        mode, why = TORCHTITAN[row.hidden], "torchtitan's configuration of this model"
    elif has_word(row.framework, "torchtune") and "technique" not in row.notes:
        # recipes/configs/llama3_1: enable_activation_checkpointing; ablations add what they name
        mode, why = "full", "torchtune's recipes for full fine-tuning"
    assumed.add(f"recompute = {mode} (not stated; {why})")
    return mode


def map_overlap(row: Row, stack: Stack) -> dict[str, bool]:
    """Returns what runs beside computation: as the source says, else as the stack's defaults do."""
    notes = row.notes.lower()
    overlap = {
        key.removeprefix("overlap_"): bool(value)
        for key, value in stack.defaults.items()
        if key.startswith("overlap_")
    }
    if row.family == "flagperf" and stack.preset == "megatron":  # its scripts set no overlap
        overlap = {"grad": False, "param": False}
    if "opts={" in notes:  # all options are listed: what is not there is off
        overlap = {"grad": False, "param": False}
    if "comm overlap off" in notes:
        overlap = {"grad": False, "param": False, "tp": False, "p2p": False}
    if '"overlap-grad-reduce":true' in notes:
        overlap["grad"] = True
    if '"overlap-param-gather":true' in notes:
        overlap["param"] = True
    if has_word(notes, "asynctp", "async tp", "tp async linear comm on"):
        overlap["tp"] = True
    elif "vanilla tp" in notes:
        overlap["tp"] = False
    if "gradient bucketing off" in notes:
        overlap["grad"] = False
    if has_word(row.framework, "dedloc"):
        # sends and receives run on streams of their own, gradients wait for the whole backward
        overlap |= {"p2p": True, "grad": False}
    return overlap
