"""The training section of a row: length, batch words, precision, optimizer."""

from __future__ import annotations

import re
from typing import Any

from foretrain.graph.precision import LOW
from foretrain.stack import Stack
from foretrain.validation.mapping.words import Assumed, Unsupported, has_word
from foretrain.validation.rows import Row


def map_training(row: Row, stack: Stack, assumed: Assumed) -> dict[str, Any]:
    """Returns the `training` section.

    Raises:
        Unsupported: no length, no batch, or a way of training that is not modelled.
    """
    _check_task(row)
    if not row.seq_len:
        raise Unsupported("the sequence length is not stated")
    if not row.gbs and not row.mbs:
        raise Unsupported("neither global batch nor micro-batch is stated")
    section: dict[str, Any] = {
        "sequence": row.seq_len,
        "precision": _precision(row, stack, assumed),
        "optimizer": map_optimizer(row),
    }
    if row.gbs:
        section["global_batch"] = row.gbs
    if row.mbs:
        section["microbatch"] = row.mbs
    if row.ga_steps and not (row.gbs and row.mbs):
        section["accumulation"] = row.ga_steps
    if has_word(row.notes, "samples shorter", "padded batches"):
        assumed.add("every sample is as long as the sequence (the source's are shorter)")
    if not row.gbs:
        assumed.add("global_batch = microbatch x dp x accumulation (not stated)")
    elif not row.mbs and not row.ga_steps:
        assumed.add("microbatch (not stated)")
    return section


def _precision(row: Row, stack: Stack, assumed: Assumed) -> str | dict[str, str]:
    """The precision word, or its roles where source or stack say more than a word holds."""
    word = map_precision(row, stack, assumed)
    if word == "pure-bf16" and has_word(row.precision, "fp32 gradient"):
        return dict(_PURE_WITH_FP32_SUMS)
    if word == "fp16" and has_word(row.framework, "dedloc"):
        return dict(_HALF_WITH_MASTER)
    if word in ("bf16", *LOW) and has_word(row.precision, "fsdp mp default"):
        # Composer's MixedPrecision: DEFAULT reduces in fp32, PURE in the dtype of the computation
        return {"compute": word, "grad_reduce": "fp32"}
    return _with_gradients(word, stack, assumed)


def _with_gradients(word: str, stack: Stack, assumed: Assumed) -> str | dict[str, str]:
    """The precision, with the dtype that published recipes of the software keep gradients in."""
    dtype = stack.defaults.get("gradients")
    if dtype is None or word not in ("bf16", *LOW):
        return word
    assumed.add(f"gradients in {dtype} (not stated; stack {stack.name})")
    return {"compute": word, "grad_accumulate": str(dtype), "grad_reduce": str(dtype)}


def _check_task(row: Row) -> None:
    task = f"{row.task} {row.model}"
    if has_word(task, "qlora") or has_word(row.precision, "nf4"):
        raise Unsupported("QLoRA comes with a later version")
    if has_word(task, "lora", "adapter"):
        raise Unsupported("LoRA comes with a later version")
    if has_word(row.notes, "central ps"):
        raise Unsupported("a central parameter server is not modelled")
    technique = re.search(r"technique cumulative: ([^(;]*)", row.notes)
    if technique and not has_word(technique[1], "packed", "compile"):
        raise Unsupported(f"the technique {technique[1].strip(' []+')!r} is not modelled")


#: 16-bit weights and moments whose gradients are summed in fp32 (FSDP2's reduce_dtype).
_PURE_WITH_FP32_SUMS = {
    **dict.fromkeys(("compute", "weight", "grad", "moments"), "bf16"),
    **dict.fromkeys(("grad_reduce", "grad_accumulate"), "fp32"),
    "master": "none",
}

#: The GPipe prototype: `model.half()`, gradients summed and reduced in fp16, an fp32 copy of the
#: weights (pipeline_parallel/dist_gpipe_pipeline_async.py, optimizer/optimizer.py).
_HALF_WITH_MASTER = {
    **dict.fromkeys(("compute", "weight", "grad", "grad_reduce", "grad_accumulate"), "fp16"),
    **dict.fromkeys(("master", "moments"), "fp32"),
}


def map_precision(row: Row, stack: Stack, assumed: Assumed) -> str:
    """Returns the precision word; where the source has none, the stack's default."""
    text = row.precision.lower()
    for pattern, word in (
        (r"nvfp4", "nvfp4"),
        (r"mxfp8|fp8[- ]mx", "mxfp8"),
        (r"fp8|float8", "fp8"),
        (r"bf16-true|pure[- ]bf16", "pure-bf16"),
        (r"bf16/fp16", ""),
        (r"bf16|bfloat16", "bf16"),
        (r"tf32", "tf32"),
        (r"fp16|float16", "fp16"),
        (r"fp32|float32", "fp32"),
        (r"half|mixed", "fp16"),
    ):
        if re.search(pattern, text):
            if word == "fp32" and has_word(row.attention_impl, "flash"):
                assumed.add("precision = tf32 (fp32 in the source, whose attention has no fp32)")
                return "tf32"
            if word == "fp32" and has_word(row.framework, "tensorflow") and _has_bf16(row):
                assumed.add("precision = tf32 (fp32 in the source; TensorFlow uses TF32)")
                return "tf32"
            if word == "bf16" and has_word(row.framework, "torchtune"):
                # recipes/configs: dtype bf16 makes weights and moments of that type as well
                assumed.add(
                    "precision = pure-bf16 (torchtune's dtype holds for weights and moments)"
                )
                return "pure-bf16"
            if word:
                return word
            break
    default = stack.defaults.get("precision", "bf16")
    default = str(default) if _has_bf16(row) else "fp16"
    assumed.add(f"precision = {default} ({row.precision or 'not stated'}; stack {stack.name})")
    return default


def _has_bf16(row: Row) -> bool:
    return not has_word(row.gpu_norm, "v100", "p100", "2080", "rtx8000", "t4")


def map_optimizer(row: Row) -> str:
    """Returns none where the task says that no optimizer runs, else sgd or adam by its words."""
    if has_word(row.task, "no optimizer"):
        return "none"
    plain = has_word(row.framework, "dedloc")  # optim.SGD without momentum (same file)
    return "sgd" if plain or has_word(row.optimizer, "sgd") else "adamw"
