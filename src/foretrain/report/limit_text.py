"""The answer of `foretrain fit RUN --max`: how far, what it costs, and what ends it."""

from __future__ import annotations

from typing import Any

from foretrain.analysis.limits import Limit, changed_run
from foretrain.frontends.spec import ModelSpec
from foretrain.report.words import misfit_words, number, throughput, used_words
from foretrain.run.spec import RunSpec
from foretrain.simulator.result import Result
from foretrain.units import GIB, format_seconds

WORDS = {"sequence": "tokens of sequence", "microbatch": "samples of micro-batch"}


def render_limit(limit: Limit, run: RunSpec) -> str:
    """Returns the text: the limit, its memory and speed, and what the next step would need."""
    word = WORDS.get(limit.quantity, limit.quantity)
    lines: list[str] = []
    if limit.result is None or not limit.value:
        lines.append(f"Not even {limit.step:,} {word} fit.")
    else:
        how = "At least" if limit.open_end else "Up to"
        lines.append(f"{how} {limit.value:,} {word} fit (the run has {limit.now:,}).")
        lines.append("  " + used_words(limit.result))
        rate, unit = throughput(limit.result, run.cluster.world_size)
        step = format_seconds(limit.result.step_time_s.value)
        lines.append(f"  step {step}, {number(rate)} {unit}{_besides(limit, run)}")
    more = limit.value + limit.step
    if limit.open_end:
        lines.append("  Nothing larger was tried: memory is not what limits this run.")
    elif limit.beyond is None:
        lines.append(f"  {more:,} is not a valid run: the model or the plan ends there.")
    else:
        lines.append(f"  {more:,} {misfit_words(limit.beyond)}.")
    return "\n".join(lines) + "\n"


def _besides(limit: Limit, run: RunSpec) -> str:
    """Returns what goes along with the quantity, and what does not although one might think so."""
    changed = changed_run(run, limit.quantity, limit.value)
    if limit.quantity == "microbatch" and changed is not None:
        return f"; the global batch grows with it to {changed.training.global_batch:,}"
    decoder = run.model.decoder_layers if isinstance(run.model, ModelSpec) else 0
    if not decoder:
        return ""
    if limit.quantity == "layers":
        return f"; layers of the encoder, the decoder keeps its {decoder}"
    return f"; of the source, the target keeps its {run.training.target_sequence} tokens"


def limit_json(limit: Limit) -> dict[str, Any]:
    """Returns the JSON form, docs/reference/json.md."""
    return {
        "schema": 1,
        "quantity": limit.quantity,
        "now": limit.now,
        "largest": limit.value,
        "step": limit.step,
        "open_end": limit.open_end,
        "fits": _form(limit.result) if limit.value else None,
        "beyond": _form(limit.beyond),
    }


def _form(result: Result | None) -> dict[str, Any] | None:
    if result is None:
        return None
    memory = result.memory
    return {
        "step_time_s": result.step_time_s.value,
        "device_used_gib": memory.device_used_bytes / GIB,
        "usable_gib": memory.usable_bytes / GIB,
        "moment": memory.moment,
    }
