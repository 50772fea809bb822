"""docs/accuracy.md: the result of `validate runs` as a page, misses included.

Deterministic: no dates, paths or machine; the same rows and the same code give the same page.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from foretrain.validation.compare import Comparison
from foretrain.validation.memory_report import memory_page
from foretrain.validation.models import model_of, on_one_device
from foretrain.validation.report import Report, percent, reasons, signed
from foretrain.validation.statistics import Stats, grouped, statistics_of
from foretrain.validation.subsets import DENSE, subset_of

#: Families below this are named as the worst ones, worst first; and the rows of the last table.
WORST_FAMILIES = 8
WORST_ROWS = 20
#: A family needs this many timed rows to be called one of the worst.
MIN_TIMED = 3

_INTRO = """# Accuracy

*How far are the predictions from what people measured, and where not to trust them.*

This page is written by `make validate` (`foretrain validate runs FILE --report docs/accuracy.md`),
nobody edits it. It compares predictions with {rows:,} published training runs: benchmark tables,
logs and papers, of {families} families (a family is one source). Every row ends as predicted, as
unsupported with its reason, or as a fault of ours; nothing is dropped. What was measured never
reaches a prediction, and no constant belongs to a row, a model or a family.

Some constants and settings were chosen with rows of this page in view, so these rows are no
independent check:

- the factor 1.05 of kernels within a step: eight Megatron-LM runs on A100; stragglers: nvidia_dgxc;
  the factor of the interval ("in band"): all families;
- overlap on Hopper: a published mean, adopted because H100 runs of fms_fsdp, llm_foundry_mpt and
  nemo_megatron_bridge came out fast;
- vtrain_groundtruth: host costs of the Megatron-DeepSpeed stacks; its steps of one node are read as
  sums of blocks timed one by one, without the recompute that their source states;
- bigscience_bloom: that large jobs ran with CUDA_LAUNCH_BLOCKING was looked up where predictions
  were too fast; that head dim 108 leaves the tensor units was read off its four runs;
- ultrascale_playbook: the host scale of nanotron, the rate of its kernels, its gather of weights,
  checked collectives and rings over EFA were fitted on its models of 1B and 3B; that its pipelines
  over nodes ran with checks was read off all sizes;
- flagperf: stacks by its scripts, devices by its pages, looked up where predictions were too fast;
  llm-foundry: the attention kernel (two runs); the default stack of preset megatron on Ampere;
- internevo: rings over RoCE on A100 nodes were fitted on its rows with tp 1; how it reduces
  gradients and hands out weights was looked up in its code where predictions were too fast;
  jax_toolbox: which containers of Pax had flash attention, likewise;
- megatron_ci_golden: the host time per operator of Megatron-LM, on its rows without a pipeline;
- BERT: kernels of eager unfused softmax, element-wise work of the stacks of 2020 (one GPU of
  DLPerf); ResNet-50: convolutions on RTX 3090 and V100;
- mli_3090ti, neusight_labels, decentralized_fm_v100: the stacks of Hugging Face's trainer, tiles of
  GeForce cards, what slow Ethernet carries;
- memory: allocator slack and copies of logits (all families that state a peak).

## How to read it

- **error** is |predicted / measured - 1| of the step time. **bias** is the median of
  predicted / measured - 1: negative means that we promise too much speed.
- **median** counts every row. **by configuration** takes the median of each configuration
  (architecture, device, device count) first: large grids must not decide alone. This is the figure
  to look at; in brackets the number of configurations.
- **p90**: one row in ten is worse. **in band**: share of the measured times inside the 90 %
  interval of the prediction.
- **memory** is the median error of peak memory. **OOM** counts runs that are said not to fit:
  *rightly / wrongly / missed / rightly said to fit*.
- Sources rarely state everything. What had to be assumed is counted below, and listed row by row
  in the JSON form.
- Rows of `ultrascale_playbook` with an MFU under 5 % are predicted and shown apart, and enter no
  other figure: many ran with collectives that all ranks check first, some with a fault.
"""


def accuracy_page(report: Report) -> str:
    """Returns the page in Markdown."""
    families = len(report.groups["family"])
    parts = [
        _INTRO.format(rows=report.overall.rows, families=families),
        _overall(report),
        _dense_families(report),
        memory_page(report.items),
        _worst(report),
        _groups(report),
        _small_models(report),
        _ranking(report),
        _unsupported(report),
        _assumptions(report),
        _all_families(report),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _overall(report: Report) -> str:
    rows = {
        "all rows": report.overall,
        "rows without any assumption": report.stated,
        **report.groups["subset"],
    }
    text = "FP8 stands apart; so do runs that failed (they have a memory verdict, no time)."
    return f"## Overall\n\n{_table('rows', rows)}\n\n{text}\n"


def _dense_families(report: Report) -> str:
    dense = [item for item in report.items if subset_of(item) == DENSE]
    stats = {name: statistics_of(rows) for name, rows in grouped(dense, _family).items()}
    intro = (
        "Grade A and A-, without context parallelism, mixture of experts, FP8 and LoRA: the rows\n"
        "that this version is made for."
    )
    return f"## Dense decoders\n\n{intro}\n\n{_table('family', stats)}\n"


def _worst(report: Report) -> str:
    stats = {
        name: group
        for name, group in report.groups["family"].items()
        if group.time.n >= MIN_TIMED and group.time.group_median is not None
    }
    worst = sorted(stats, key=lambda name: -(stats[name].time.group_median or 0.0))
    table = _table("family", {name: stats[name] for name in worst[:WORST_FAMILIES]})
    rows = sorted(
        (i for i in report.items if i.counted and i.time_ratio is not None),
        key=lambda item: (-_distance(item), item.row.id),
    )
    lines = [
        "| row | model | devices | measured | predicted | ratio |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_worst_row(item) for item in _one_per_configuration(rows)[:WORST_ROWS]]
    return (
        f"## Where it is wrong\n\nThe families with the largest errors, all grades:\n\n{table}\n\n"
        "The rows that are furthest off, one per configuration:\n\n" + "\n".join(lines) + "\n"
    )


def _distance(item: Comparison) -> float:
    ratio = item.time_ratio or 1.0
    return max(ratio, 1 / ratio)


def _one_per_configuration(items: Iterable[Comparison]) -> list[Comparison]:
    seen: dict[str, Comparison] = {}
    for item in items:
        seen.setdefault(item.row.config_group or item.row.id, item)
    return list(seen.values())


def _worst_row(item: Comparison) -> str:
    row, prediction = item.row, item.outcome.prediction
    predicted = prediction.step_s if prediction else 0.0
    devices = f"{row.n_gpus} x {row.gpu_norm}"
    times = f"{item.measured_s or 0.0:.3g} s | {predicted:.3g} s | {item.time_ratio or 0.0:.2f}"
    return f"| {row.id} | {_cell(row.model)} | {devices} | {times} |"


def _groups(report: Report) -> str:
    scale = _table("devices", _timed(report.groups["scale"]))
    device = _table("device", _timed(report.groups["gpu"]))
    return f"## By number of devices\n\n{scale}\n\n## By device\n\n{device}\n"


def _small_models(report: Report) -> str:
    chosen = [item for item in report.items if on_one_device(item)]
    stats = {name: statistics_of(rows) for name, rows in grouped(chosen, model_of).items()}
    table = _table("model", _timed(stats))
    text = (
        "BERT, convolutional networks and vision transformers on one device, all sources together."
    )
    return f"## One device, model by model\n\n{text}\n\n{table}\n"


def _timed(groups: Mapping[str, Stats]) -> dict[str, Stats]:
    return {name: stats for name, stats in groups.items() if stats.time.n}


def _ranking(report: Report) -> str:
    lines = [
        "| rows | groups | rank correlation | regret | best within 5 % |",
        "|---|---:|---:|---:|---:|",
    ]
    named = {"all, median over families": report.overall, **report.groups["family"]}
    for name, stats in named.items():
        rank = stats.rank
        if rank.groups:
            spearman = "-" if rank.spearman is None else f"{rank.spearman:.2f}"
            cells = (name, rank.groups, spearman, percent(rank.median_regret))
            within = percent(rank.top1_within_5)
            lines.append("| " + " | ".join(str(cell) for cell in cells) + f" | {within} |")
    text = (
        "Does the plan that is predicted best win? A group holds runs that differ in their plan\n"
        "only (three or more plans). *Rank correlation* is Spearman's, in groups of five or more;\n"
        "*regret* is how much slower than the best measured plan the plan is that we would have\n"
        "chosen; *best within 5 %* is the share of groups where it is within 5 % of the best."
    )
    return f"## Choosing a plan\n\n{text}\n\n" + "\n".join(lines) + "\n"


def _unsupported(report: Report) -> str:
    lines = ["| rows | reason |", "|---:|---|"]
    lines += [f"| {count:,} | {_cell(reason)} |" for reason, count in reasons(report.items)]
    errors = sum(item.outcome.status == "error" for item in report.items)
    return (
        "## Not predicted, and why\n\nNumbers are left out here; the JSON form has them.\n\n"
        + "\n".join(lines)
        + f"\n\nFaults of ours: {errors}.\n"
    )


def _assumptions(report: Report) -> str:
    predicted = [item for item in report.items if item.outcome.status == "ok"]
    with_any = [item for item in predicted if item.outcome.assumed]
    counts = Counter(
        kind for item in predicted for kind in {_kind(line) for line in item.outcome.assumed}
    )
    lines = ["| rows | assumed |", "|---:|---|"]
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    lines += [f"| {count:,} | {_cell(kind)} |" for kind, count in ordered]
    text = (
        f"{len(with_any):,} of {len(predicted):,} predicted rows rest on one assumption or more:\n"
        "a default of the software, the usual node of a device, a stack that stands in for another."
    )
    return f"## Assumptions\n\n{text}\n\n" + "\n".join(lines) + "\n"


def _kind(line: str) -> str:
    """An assumption without its values, so that equal kinds count together."""
    if line.startswith("stack: "):
        return line
    text = re.sub(r" \(.*\)$", "", line)
    text = re.sub(r" = [^,]*$", "", text)
    text = re.sub(r"the usual node of [\w.-]+", "the usual node of the device", text)
    return re.sub(r"\b\d+(\.\d+)?\b", "N", text)


def _all_families(report: Report) -> str:
    return f"## All families\n\n{_table('family', report.groups['family'])}\n"


def _family(item: Comparison) -> str:
    return item.row.family


_COLUMNS = (
    "rows",
    "predicted",
    "timed",
    "median",
    "by configuration",
    "bias",
    "p90",
    "in band",
    "memory",
    "OOM",
)


def _table(title: str, groups: Mapping[str, Stats]) -> str:
    lines = [
        f"| {title} | " + " | ".join(_COLUMNS) + " |",
        "|---|" + "---:|" * len(_COLUMNS),
    ]
    lines += [_line(name, stats) for name, stats in groups.items()]
    return "\n".join(lines)


def _line(name: str, stats: Stats) -> str:
    time, oom = stats.time, stats.oom
    by_group = "-" if time.group_median is None else f"{percent(time.group_median)} ({time.groups})"
    verdicts = (oom.tp, oom.fp, oom.fn, oom.tn)
    cells: Sequence[str] = (
        f"{stats.rows:,}",
        f"{stats.predicted:,}",
        f"{time.n:,}",
        percent(time.median),
        by_group,
        signed(time.bias),
        percent(time.p90),
        percent(time.in_band),
        percent(stats.memory.median),
        " / ".join(map(str, verdicts)) if any(verdicts) else "-",
    )
    return f"| {_cell(name)} | " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
