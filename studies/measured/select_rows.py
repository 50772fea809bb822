"""Selects published figures from ../shared: writes llm_dense.csv and memory.csv here.

    python studies/measured/select_rows.py ../shared/data/runs/measured_runs.csv.gz

The selection is fixed: within a source, configurations are ordered by scale and taken at even
distances, so that every source, device and scale has its part. Only figures and plain facts are
kept; texts are put in our own words, memory printed in GB is converted to GiB, and every row
cites the document and the table or line its figure stands in. The columns are described in
README.md.
"""

from __future__ import annotations

import csv
import gzip
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

Row = dict[str, str]

COLUMNS = (
    *("id", "family", "citation", "licence", "year", "quality"),
    *("model", "model_class", "n_layers", "hidden", "heads", "kv_heads", "head_dim", "ffn"),
    *("vocab", "seq_len", "arch_note", "params_b", "precision"),
    *("gpu", "gpu_norm", "gpu_mem_gb", "n_gpus", "gpus_per_node", "interconnect"),
    *("tp", "pp", "vpp", "dp", "cp", "sp", "zero_stage", "sharding", "mbs", "gbs", "ga_steps"),
    *("recompute", "attention_impl", "offload", "optimizer"),
    *("framework", "framework_version", "task", "iter_time_s", "tokens_per_s", "samples_per_s"),
    *("samples_unit", "mfu_pct", "peak_mem_gib", "notes", "config_group"),
)

#: Rows of llm_dense.csv by source: how many configurations with a measured time.
TIMED: Mapping[str, int] = {
    "ultrascale_playbook": 32,
    "vtrain_groundtruth": 24,
    "llm_foundry_mpt": 24,
    "nvidia_dgxc": 20,
    "nemo_megatron_bridge": 20,
    "megatron_papers": 20,
    "decentralized_fm_v100": 14,
    "bigscience_bloom": 12,
    "flagperf": 16,
    "torchtitan": 14,
    "internevo": 10,
    "jax_toolbox": 8,
    "oneflow_dlperf": 8,
    "simumax_b200": 8,
    "neusight_labels": 6,
    "fms_fsdp": 5,
    "finetune_smallnode": 5,
    "flash_attention_gpt3": 4,
    "mli_3090ti": 4,
}
#: Rows of memory.csv by source: with a measured peak, and failed for want of memory.
WITH_MEMORY: Mapping[str, int] = {
    "torchtitan": 8,
    "simumax_b200": 8,
    "flagperf": 6,
    "bigscience_bloom": 6,
    "ultrascale_playbook": 8,
    "internevo": 4,
}
FAILED: Mapping[str, int] = {
    "ultrascale_playbook": 10,
    "finetune_smallnode": 3,
}
GOOD = ("A", "A-")
#: Ways of training and of cutting a model that a dense decoder does not need.
SKIPPED_TASKS = re.compile(r"lora|adapter", re.IGNORECASE)
#: Below this MFU the rows of this source are a glitch of the cluster (../shared says so).
LEAST_MFU: Mapping[str, float] = {"ultrascale_playbook": 5.0}

#: Networks in our own words, by a pattern of the text of the source; the first match decides.
NETWORKS: Sequence[tuple[str, str]] = (
    (r"hopper-prod", "32x100Gb EFA (AWS p5)"),
    (r"1600 Gbps", "RoCE, 1600 Gb/s per node"),
    (r"Omni-Path", "4x100Gb Omni-Path"),
    (r"inter-node 800", "800 Gb/s per node"),
    (r"InfiniBand[,，] ?200", "InfiniBand, 200Gb/s"),
    (r"4x100Gb RoCE", "4x100Gb RoCE"),
    (r"p3\.16xlarge", "AWS p3.16xlarge, 25 Gb/s"),
    (r"InfiniBand 100", "InfiniBand 100 Gb/s"),
    (r"Grand Teton", "Grand Teton, RoCE 400 Gb/s per GPU"),
    (r"400Gb/s CX-7", "RDMA 400 Gb/s per GPU"),
    (r"delay (\d+)ms +bandwidth (\d+)Gbps", r"delay \1ms, bandwidth \2Gbps"),
    (r"p3\.2xlarge ~0\.1 ms", "AWS p3.2xlarge ~0.1 ms, up to 10 Gb/s"),
    (r"p3\.2xlarge", "AWS p3.2xlarge, up to 10 Gb/s"),
    (r"Selene", "8x HDR200 IB"),
    (r"^(\d+) ?Gbps$", r"\1 Gb/s per node"),
    (r"DGX-H100", "DGX-H100"),
    (r"NVLink bridge", "NVLink bridge"),
    (r"NVLink", "NVLink"),
    (r"PCIe", "PCIe"),
)
#: Remarks that decide how a row is read, by a pattern of the remarks of the source.
REMARKS: Sequence[tuple[str, str]] = (
    (r"torch\.compile=False", "torch.compile=False"),
    (r"nvidia-smi", "memory from nvidia-smi"),
    (r"gpipe", "GPipe schedule"),
    (r"comm overlap off", "comm overlap off"),
    (r"async ?tp|tp async linear", "async TP"),
    (r"vanilla tp", "vanilla TP"),
    (r"gradient bucketing off", "gradient bucketing off"),
    (r"transformer_engine| te |\(te\)", "with transformer_engine"),
)
#: Leading words of a text that mean the same to a reader and to the mapping.
_PLAIN: Sequence[tuple[str, str]] = (
    (r"full.*", "full"),
    (r"none.*", "none"),
    (r"selective \(core attention\)", "selective, core attention"),
    (r"activation recompute.*", "selective, activations"),
    (r"selective (op|\(per-op).*", "selective, by operator"),
    (r"selective layer", "selective layer"),
    (r"selective.*", "selective"),
)
_ATTENTION: Sequence[tuple[str, str]] = (
    (r"unfused.*", "unfused"),
    (r"FlashAttention-2|SDPA flash v2", "flash 2"),
    (r".*flash.*", "flash"),
)
_PRECISIONS: Sequence[tuple[str, str]] = (
    (r"bf16 \(FSDP MP PURE\)", "bf16, FSDP MP PURE"),
    (r"amp_bf16.*", "bf16, FSDP MP DEFAULT"),
    (r"bf16 \(fp32 grad.*", "bf16, fp32 gradient accumulation"),
    (r"bf16 amp|bf16/fp16.*", "bf16/fp16, not stated which"),
    (r"bf16-true", "bf16-true"),
    (r"(?:TE )?bf16(?: \(per project default\))?", "bf16"),
    (r"fp16.*", "fp16"),
    (r"fp32.*", "fp32"),
    (r"mxfp8.*|fp8[- ]mx.*", "mxfp8"),
    (r"nvfp4.*", "nvfp4"),
    (r"bf16\+fp8|.*(?:fp8|float8).*", "fp8"),
)
#: Remarks of sources that print memory in GB.
_GB_WORDS = r"memory in gb|memory printed in gb|ram in gb|\(gb as printed\)"
_GB_IN_GIB = 1e9 / 2**30


def main(source: Path) -> None:
    """Writes both files."""
    with gzip.open(source, "rt", encoding="utf-8", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["model_class"] == "llm_dense"]
    timed = _select([row for row in rows if _has_time(row)], TIMED)
    taken = {row["id"] for row in timed}
    peaks = [row for row in rows if row["id"] not in taken and _has_memory(row)]
    failed = [row for row in rows if _ran_out(row)]
    memory = [*_select(peaks, WITH_MEMORY), *_select(failed, FAILED)]
    here = Path(__file__).resolve().parent
    for name, selected in (("llm_dense.csv", timed), ("memory.csv", memory)):
        _write(here / name, [_own(row) for row in selected])
        sys.stdout.write(f"{name}: {len(selected)} rows\n")


def _skipped(row: Row) -> bool:
    """Whether a row is no plain dense decoder with a stated shape and all states on the device."""
    shape = [row[name] for name in ("n_layers", "hidden", "heads", "seq_len")]
    if not all(shape) or (not row["head_dim"] and float(row["hidden"]) % float(row["heads"])):
        return True
    other = SKIPPED_TASKS.search(row["task"]) or "central ps" in row["notes"].lower()
    return bool(other or row["offload"] or "nf4" in row["precision"])


def _has_time(row: Row) -> bool:
    good = row["quality"] in GOOD and not _skipped(row) and "FAILED" not in row["task"]
    stated = row["iter_time_s"] or row["tokens_per_s"] or row["samples_per_s"]
    micro = re.search("micro-iteration|iteration = one micro", row["notes"], re.IGNORECASE)
    mfu = float(row["mfu_pct"] or 100.0)
    return bool(good and stated and not micro and mfu >= LEAST_MFU.get(row["family"], 0.0))


def _has_memory(row: Row) -> bool:
    modelled = row["notes"].startswith("MODELLED")
    return bool(_has_time(row) and row["peak_mem_gib"] and not modelled)


def _ran_out(row: Row) -> bool:
    """Whether a run failed for want of memory; a crash only where states alone are too much.

    States: bf16 weights, fp32 gradients, and 12 bytes of optimizer per parameter (over the replicas
    with ZeRO), on each of tp x pp ranks.
    """
    if _skipped(row) or "FAILED(oom" not in row["task"]:
        return False
    if "crash" not in row["task"]:
        return True
    degrees = {name: float(row[name] or 1) for name in ("tp", "pp", "dp")}
    if degrees["pp"] > float(row["n_layers"]):
        return False
    replicas = degrees["dp"] if row["zero_stage"] == "1" else 1.0
    per_parameter = (6.0 + 12.0 / replicas) / (degrees["tp"] * degrees["pp"])
    return float(row["params_b"]) * per_parameter > float(row["gpu_mem_gb"])


def _select(rows: Sequence[Row], quotas: Mapping[str, int]) -> list[Row]:
    """Takes of every source one row of as many configurations as its quota, evenly spaced."""
    selected: list[Row] = []
    for family, quota in quotas.items():
        groups: dict[str, list[Row]] = {}
        for row in sorted((r for r in rows if r["family"] == family), key=lambda r: r["id"]):
            groups.setdefault(row["config_group"], []).append(row)
        ordered = sorted(groups.values(), key=lambda g: (*_scale(g[0]), g[0]["config_group"]))
        wanted = _evenly(len(ordered), quota)
        # the i-th group gives its i-th plan, so that not all rows are the first of a sweep
        first = [ordered[g][(7 * i) % len(ordered[g])] for i, g in enumerate(wanted)]
        ids = {row["id"] for row in first}
        rest = [row for group in ordered for row in group if row["id"] not in ids]
        more = [rest[i] for i in _evenly(len(rest), quota - len(first))]
        selected += sorted([*first, *more], key=lambda r: (*_scale(r), r["id"]))
    return selected


def _scale(row: Row) -> tuple[str, float, float]:
    return row["gpu_norm"], float(row["n_gpus"] or 0), float(row["params_b"] or 0)


def _evenly(count: int, wanted: int) -> list[int]:
    """Returns up to `wanted` indices below `count`, at even distances, the ends included."""
    if wanted <= 0 or count == 0:
        return []
    if wanted >= count:
        return list(range(count))
    return sorted({round(i * (count - 1) / max(wanted - 1, 1)) for i in range(wanted)})


def _own(row: Row) -> Row:
    """Returns the columns of a row in our own words."""
    own = {name: row.get(name, "") or "" for name in COLUMNS}
    for name in COLUMNS:
        own[name] = re.sub(r"^(\d+)\.0$", r"\1", own[name])
    own["citation"] = _citation(row)
    own["licence"] = re.sub(r" ?\(.*|/see repo|/unspecified.*", "", row["licence"])
    own["interconnect"] = _words(row["interconnect"], NETWORKS)
    own["recompute"] = _words(row["recompute"], _PLAIN, whole=True)
    own["attention_impl"] = _words(row["attention_impl"], _ATTENTION, whole=True)
    own["precision"] = _words(row["precision"], _PRECISIONS, whole=True)
    own["sharding"] = re.sub(r"^DDP .*", "", row["sharding"])  # the default of its stack
    own["arch_note"] = _architecture(row["arch_note"])
    own["iter_time_s"], own["tokens_per_s"], own["samples_per_s"] = _time(row)
    own["samples_unit"] = row["samples_unit"] if own["samples_per_s"] else ""
    notes = row["notes"]
    found = [word for pattern, word in REMARKS if re.search(pattern, notes, re.IGNORECASE)]
    own["notes"] = "; ".join(found)
    own["peak_mem_gib"] = "" if notes.startswith("MODELLED") else _memory(row)
    return own


def _citation(row: Row) -> str:
    parts = (row["source"], row["source_path"], row["source_locator"])
    where = ", ".join(part for part in parts if part)
    return f"{where} (at {row['source_rev'][:12]})" if row["source_rev"] else where


def _words(text: str, table: Sequence[tuple[str, str]], *, whole: bool = False) -> str:
    """Returns our words for a text, the text itself where the table has none."""
    for pattern, own in table:
        find = re.fullmatch if whole else re.search
        match = find(pattern, text, re.IGNORECASE)
        if match:
            return match.expand(own)
    return text


def _architecture(text: str) -> str:
    if "untied" in text:
        return "untied embeddings"
    return "tied embeddings" if "tied" in text else ""


def _time(row: Row) -> tuple[str, str, str]:
    """Returns the one figure that decides the step: its time, else tokens/s, else samples/s."""
    if row["iter_time_s"]:
        return row["iter_time_s"], "", ""
    if row["tokens_per_s"]:
        return "", row["tokens_per_s"], ""
    return "", "", row["samples_per_s"]


def _memory(row: Row) -> str:
    if not row["peak_mem_gib"]:
        return ""
    notes = row["notes"].lower()
    in_gb = "nvidia-smi" not in notes and re.search(_GB_WORDS, notes)
    return f"{float(row['peak_mem_gib']) * (_GB_IN_GIB if in_gb else 1.0):.4g}"


def _write(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
