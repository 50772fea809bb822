"""Writes the device files and the prices of the catalog from a table of data sheet figures.

    python studies/devices/make_devices.py [TABLE [CATALOG]]

TABLE is ../shared/data/specs/gpus.csv and CATALOG src/foretrain/catalog unless given.

One row of the table becomes one TOML file with a source per value; extra.py holds what the table
leaves out (names, capacities, usual servers, devices of our own). Running it again changes nothing
unless the table or extra.py did.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from extra import EXTRA, FILLED, NAMES, NODES

ROOT = Path(__file__).resolve().parents[2]
CATALOG = ROOT / "src" / "foretrain" / "catalog"
TABLE = ROOT.parent / "shared" / "data" / "specs" / "gpus.csv"

PEAKS = {
    "fp32": "fp32_tflops",
    "tf32": "tf32_tflops_dense",
    "fp16": "fp16_tflops_dense",
    "bf16": "bf16_tflops_dense",
    "fp8": "fp8_tflops_dense",
    "nvfp4": "fp4_tflops_dense",
}
GENERATIONS = {"Blackwell Ultra": "blackwell", "Trn": "trainium", "DaVinci": "ascend"}
LINKS = {
    "NVLink": "nvlink",
    "xGMI": "xgmi",
    "ICI": "ici",
    "NeuronLink": "neuronlink",
    "24x": "roce",
    "HCCS": "hccs",
    "none": "none",
}
#: Columns that describe a whole package where the catalog counts its two halves.
PACKAGE = ("sm_count", *PEAKS.values(), "mem_gb", "mem_bw_GBs", "l2_mb", "tdp_W")
PACKAGE += ("scaleup_GBs_per_dir",)

Row = dict[str, str]


def halved(row: Row) -> Row:
    """Returns the row of one half of a package of two devices."""
    half = {key: str(float(row[key]) / 2) for key in PACKAGE if row[key]}
    return row | half | {"source": f"{row['source']}; half of the package"}


def quoted(text: str) -> str:
    """Returns a TOML string."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def number(value: float) -> str:
    """Returns a TOML number: whole ones without a point."""
    return str(int(value)) if value == int(value) else repr(round(value, 6))


def link(text: str) -> str:
    """Returns the kind of scale-up link of a table cell like 'NVLink3 bridge'."""
    return next(kind for start, kind in LINKS.items() if text.startswith(start))


def source_kind(row: Row) -> str:
    """Returns the kind and text of the source of a row; single-source rows say so."""
    doubt = "; one source only, +-10 %" if row["cross_checks"].startswith("0 ") else ""
    return f"spec: {row['source']}{doubt}"


def device_toml(
    name: str,
    row: Row,
    form: str,
    gib: float,
    gib_source: str,
    aliases: tuple[str, ...],
    changed: dict[str, str],
) -> str:
    """Returns the content of one device file."""
    filled = FILLED.get(name, {})
    spec = source_kind(row)
    sources = {
        "sm_count": spec, "memory_gb": spec, "memory_type": spec, "capacity_gib": gib_source,
        "memory_bandwidth_gb_s": spec, "l2_mib": spec, "tdp_w": spec, "scaleup_link": spec,
        "scaleup_gb_s": spec, "pcie_gen": spec, "host_gb_s": spec, "peak_tflops": spec,
    }  # fmt: skip
    values = {
        "sm_count": row["sm_count"], "memory_gb": row["mem_gb"], "capacity_gib": str(gib),
        "memory_bandwidth_gb_s": row["mem_bw_GBs"], "l2_mib": row["l2_mb"],
        "tdp_w": row["tdp_W"], "scaleup_gb_s": row["scaleup_GBs_per_dir"],
        "pcie_gen": row["pcie_gen"], "host_gb_s": "",
    }  # fmt: skip
    for key, (value, source) in filled.items():
        if key in values:
            values[key], sources[key] = str(value), source
    if not values["host_gb_s"]:  # over PCIe, as nearly everywhere
        del values["host_gb_s"], sources["host_gb_s"]
    if link(row["scaleup_link"]) == "none":
        del values["scaleup_gb_s"], sources["scaleup_gb_s"]
    generation = GENERATIONS.get(row["arch"], row["arch"].lower())
    lines = [
        f"name = {quoted(name)}",
        f"vendor = {quoted(row['vendor'].lower())}",
        f"generation = {quoted(generation)}",
        f"form = {quoted(form)}",
        f"aliases = [{', '.join(map(quoted, aliases))}]",
        f"memory_type = {quoted(row['mem_type'].lower())}",
        f"scaleup_link = {quoted(link(row['scaleup_link']))}",
        *(f"{key} = {number(float(value))}" for key, value in values.items()),
    ]
    lines += peak_lines(name, row, sources)
    lines += node_lines(name, sources)
    lines += ["", "[sources]"]
    lines += [f"{quote_key(key)} = {quoted(text)}" for key, text in (sources | changed).items()]
    return "\n".join(lines) + "\n"


def quote_key(key: str) -> str:
    """Returns a TOML key; one with a dot is quoted, so that it stays one key."""
    return quoted(key) if "." in key else key


def peak_lines(name: str, row: Row, sources: dict[str, str]) -> list[str]:
    """Returns the table of dense peaks in TFLOP/s."""
    lines = ["", "[peak_tflops]  # dense"]
    for dtype, column in PEAKS.items():
        if dtype == "nvfp4" and row["vendor"] != "NVIDIA":
            continue  # fp4 of another kind
        if dtype in FILLED.get(name, {}):
            value, sources[f"peak_tflops.{dtype}"] = FILLED[name][dtype]
            lines.append(f"{dtype} = {number(value)}")
        elif row[column]:
            lines.append(f"{dtype} = {number(float(row[column]))}")
    return lines


def node_lines(name: str, sources: dict[str, str]) -> list[str]:
    """Returns the table of the usual server."""
    devices, nics, rate, fabric, scaleup, domain, p2p, source = NODES[name]
    sources["node"] = source
    lines = [
        "",
        "[node]  # the usual server",
        f"devices = {devices}",
        f"nics = {nics}",
        f"nic_gbit_s = {number(rate)}",
        f"fabric = {quoted(fabric)}",
        f"scaleup = {quoted(scaleup)}",
    ]
    lines += [f"domain = {domain}"] if domain else []
    return lines if p2p else [*lines, "p2p = false"]


def prices_toml(rows: dict[str, Row]) -> str:
    """Returns the prices per device-hour that the table holds."""
    lines = [
        "# USD per device-hour, all devices. Prices move: `as_of` tells when the source",
        "# was read, `verified` whether it can be checked. Written by studies/devices.",
    ]
    for name, row in sorted(rows.items()):
        if not row["usd_per_gpu_h"]:
            continue
        source = row["price_source"]
        verified = "unverified" not in source
        years = [word for word in source.replace("(", " ").split() if word[:3] == "202"]
        lines += [
            "",
            f"[{quoted(name)}]",
            f"usd_per_hour = {number(float(row['usd_per_gpu_h']))}",
            f"as_of = {quoted(years[0] if years else 'not stated')}",
            f"verified = {'true' if verified else 'false'}",
            f"source = {quoted(source)}",
        ]
    return "\n".join(lines) + "\n"


def main(table: Path, catalog: Path) -> None:
    """Writes devices/*.toml and prices.toml below `catalog`."""
    (catalog / "devices").mkdir(parents=True, exist_ok=True)
    with table.open(newline="", encoding="utf-8") as stream:
        rows = {row["name"]: row for row in csv.DictReader(stream)}
    missing = sorted(set(rows) - set(NAMES))
    if missing:
        sys.exit(f"rows without a name in extra.py: {', '.join(missing)}")
    priced: dict[str, Row] = {}
    for table_name, (name, form, gib, gib_source, aliases) in NAMES.items():
        row = rows[table_name]
        row = halved(row) if "per package" in table_name else row
        priced[name] = row
        text = device_toml(name, row, form, gib, gib_source, aliases, {})
        (catalog / "devices" / f"{name}.toml").write_text(text, encoding="utf-8")
    for name, (base, changes, form, gib, gib_source, aliases, changed) in EXTRA.items():
        row = rows[base] | changes | {"cross_checks": ""}
        text = device_toml(name, row, form, gib, gib_source, aliases, changed)
        (catalog / "devices" / f"{name}.toml").write_text(text, encoding="utf-8")
    (catalog / "prices.toml").write_text(prices_toml(priced), encoding="utf-8")


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:3]]
    main(*given, *(TABLE, CATALOG)[len(given) :])
