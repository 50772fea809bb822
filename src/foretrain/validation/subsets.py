"""The rows that accuracy is judged by, and those that are shown apart."""

from __future__ import annotations

from foretrain.validation.compare import Comparison
from foretrain.validation.mapping.words import has_word
from foretrain.validation.rows import Row

DENSE = "dense decoders, grade A or A-"
DENSE_FP8 = "dense decoders in FP8 or less, grade A or A-"
LOW_MFU = "shown apart: MFU under 5 %"
FAILED = "runs that failed"
OTHER = "all others"
SUBSETS = (DENSE, DENSE_FP8, LOW_MFU, FAILED, OTHER)
GOOD_GRADES = ("A", "A-")


def subset_of(item: Comparison) -> str:
    """Returns the name of the subset of a row: dense decoders of good grade, or what else it is.

    Dense decoders without context parallelism, mixture of experts and LoRA; FP8 stands apart.
    """
    row = item.row
    if not item.counted:
        return LOW_MFU
    if has_word(row.task, "failed("):
        return FAILED
    if not is_plain_dense(row) or row.quality not in GOOD_GRADES:
        return OTHER
    return DENSE_FP8 if has_word(row.precision, "fp8", "float8", "fp4") else DENSE


def is_plain_dense(row: Row) -> bool:
    """Returns whether a row is a dense decoder without context parallelism and LoRA."""
    parts = (row.n_experts or 0, (row.ep or 1) - 1, (row.cp or 1) - 1)
    lora = has_word(f"{row.task} {row.model} {row.precision}", "lora", "adapter", "nf4")
    return row.model_class == "llm_dense" and not any(part > 0 for part in parts) and not lora
