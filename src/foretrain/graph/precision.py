"""Precision of a run: one dtype for each role a number plays in a training step."""

from __future__ import annotations

from dataclasses import dataclass, fields

from foretrain.units import dtype_bytes

#: Formats narrower than 16 bits: only what matrix products read is kept in them.
LOW = ("fp8", "mxfp8", "nvfp4")
#: The 16 bits that a bf16 weight lacks to its fp32 master copy (store_param_remainders).
REMAINDER = "remainder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtype of every role; `master` is None when no separate master copy is kept.

    A master copy kept as `REMAINDER` is the lower half of an fp32 number whose upper half is the
    bf16 weight. `second_moment` is None where both moments have one dtype.
    """

    compute: str = "bf16"
    weight: str = "bf16"  # what the forward pass reads
    grad: str = "bf16"  # what a backward operator writes
    grad_reduce: str = "bf16"  # what travels in the gradient reduction
    grad_accumulate: str = "bf16"  # what is kept between micro-steps
    master: str | None = "fp32"
    moments: str = "fp32"
    second_moment: str | None = None

    def dtype(self, role: str) -> str:
        """Returns the dtype of a tensor dtype word: a role named here, or a dtype itself."""
        if role == "master":
            return "fp32" if self.master == REMAINDER else self.master or self.weight
        if role == "second_moment":
            return self.second_moment or self.moments
        if role in _ROLES:
            return str(getattr(self, role))
        return role

    def bytes(self, role: str) -> float:
        """Returns the bytes of one element of `role` (see `dtype`)."""
        if role == "master" and self.master == REMAINDER:
            return dtype_bytes("bf16")
        return dtype_bytes(self.dtype(role))


_ROLES = frozenset(field.name for field in fields(Precision))
