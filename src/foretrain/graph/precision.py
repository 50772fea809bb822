"""Precision of a run: one dtype for each role a number plays in a training step."""

from __future__ import annotations

from dataclasses import dataclass, fields

from foretrain.units import dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtype of every role; `master` is None when no separate master copy is kept."""

    compute: str = "bf16"
    weight: str = "bf16"  # what the forward pass reads
    grad: str = "bf16"  # what a backward operator writes
    grad_reduce: str = "bf16"  # what travels in the gradient reduction
    grad_accumulate: str = "bf16"  # what is kept between micro-steps
    master: str | None = "fp32"
    moments: str = "fp32"

    def dtype(self, role: str) -> str:
        """Returns the dtype of a tensor dtype word: a role named here, or a dtype itself."""
        if role == "master":
            return self.master or self.weight
        if role in _ROLES:
            return str(getattr(self, role))
        return role

    def bytes(self, role: str) -> float:
        """Returns the bytes of one element of `role` (see `dtype`)."""
        return dtype_bytes(self.dtype(role))


_ROLES = frozenset(field.name for field in fields(Precision))
