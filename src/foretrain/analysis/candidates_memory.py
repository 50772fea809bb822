"""Single changes of a run that only free memory."""

from __future__ import annotations

from dataclasses import replace

from foretrain.analysis.candidate import Candidate, changed_plan, share
from foretrain.frontends.spec import ModelSpec
from foretrain.run.spec import RunSpec
from foretrain.simulator.result import Result
from foretrain.units import dtype_bytes


def offload(run: RunSpec, result: Result) -> list[Candidate]:
    """Returns optimizer states to the host, and with ZeRO-3 the parameters too."""
    plan = run.plan
    wanted = "parameters" if plan.offload == "optimizer" else "optimizer"
    if plan.offload == "parameters" or (wanted == "parameters" and (plan.zero or 0) < 3):
        return []
    words = ("optimizer", "grad") if wanted == "optimizer" else ("weights",)
    return [
        Candidate(
            kind="offload",
            title=f"offload {wanted} to the host",
            run=changed_plan(run, offload=wanted),
            changes={"plan.offload": wanted},
            saves_s=-result.step_time_s.value,
            frees=share(result, *words),
        )
    ]


def activations_away(run: RunSpec, result: Result) -> list[Candidate]:
    """Returns activations of half the layers, or of all but one, to the host (Megatron)."""
    plan, spec = run.plan, run.model
    free = plan.pp == 1 and plan.recompute.mode == "none" and not plan.cpu_offloading_num_layers
    if plan.preset != "megatron" or not free or not isinstance(spec, ModelSpec):
        return []
    counts = sorted({spec.depth // 2, spec.depth - 1} - {0})
    return [
        Candidate(
            kind="activations",
            title=f"activations of {count} of {spec.depth} layers to the host",
            run=changed_plan(run, cpu_offloading_num_layers=count),
            changes={"plan.cpu_offloading_num_layers": count},
            saves_s=-result.step_time_s.value,
            frees=share(result, "activation") * count / spec.depth,
        )
        for count in counts
    ]


def fused_loss(run: RunSpec, result: Result) -> list[Candidate]:
    """Returns a loss whose kernel keeps logits and their gradient in the compute dtype."""
    if run.stack.logits_copies * dtype_bytes(run.stack.logits_dtype) <= 2.0:
        return []
    stack = replace(run.stack, logits_copies=1.0, logits_dtype="bf16")
    return [
        Candidate(
            kind="loss",
            title="fused cross-entropy (logits stay in bf16)",
            run=replace(run, stack=stack),
            saves_s=0.0,
            frees=share(result, "logit") / 2,
        )
    ]
