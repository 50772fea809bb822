"""Fits the constants of the network model, and shows how they do on systems left out.

Usage: python studies/costs/fit_network.py FOLDER [--leave-out | --leave-generations | --write]

FOLDER holds network/ and ops/ with the tables of measured collectives. Prints the constants of
[fabric.*] and the rows of [[node]] of catalog/calibration/network.toml: every fabric is fitted on
all its systems, every row on all systems of its devices. --write puts them into the file. With
--leave-out every system is predicted by constants that were fitted on the others, and the errors
are printed per system and fabric, the worst first (as `foretrain validate network` does: the median
over sizes of each size's error, then over systems). --leave-generations does so with all systems of
a generation of devices at once.

The loss is the mean of |log(predicted / measured)| over sizes (its Huber form for fabrics), every
band of sizes of every group (system, nodes, ranks, collective) with the same weight, plus a weak
pull to the present constants, which decides where a constant has no data. Messages below 1 KB count
as one of 1 KB.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
from least_squares import fit
from network_constants import write_constants
from network_data import Group, load_groups
from network_limits import entry_of, fit_limits, link_gbs
from network_report import Item, print_bands, print_generations, print_worst_first

from foretrain.analysis.simplex import minimise
from foretrain.cost import calibration
from foretrain.cost.network import collectives, curve, fabric, node
from foretrain.validation.network.compare import CLASSES, band_of

#: What is fitted per fabric; efficiencies stay below 1. Values that no system of a fabric shows
#: (growth per doubling with two nodes only, ...) stay where the pull holds them.
FITTED = {
    "all_reduce": (
        "alpha_us",
        "alpha_doubling_us",
        "tau_us",
        "growth",
        "e_tree",
        "e_two",
        "p",
        "low_mib",
        "r",
    ),
    "all_gather": ("alpha_us", "tau_ring_us", "e_ring", "p_ring", "low_mib"),
    "reduce_scatter": ("alpha_us", "tau_ring_us", "e_ring", "p_ring", "low_mib"),
    "all_to_all": ("e_all_to_all", "tau_all_to_all_us", "p_all_to_all", "alpha_peer_us"),
    "send_recv": ("e_pair", "e_send_ring", "alpha_pair_us"),
}
#: Shown by small messages only.
SMALL = ("alpha_us", "low_mib", "r")
#: Shown by groups over more than two nodes only.
BEYOND_TWO = ("alpha_doubling_us", "growth", "e_tree")
#: NCCL's own estimate of trees and rings over nodes is .85 to .95 of the wire.
BOUNDS = {
    **dict.fromkeys(("e_two", "e_all_to_all", "e_pair", "e_send_ring"), (0.05, 1.0)),
    "e_tree": (0.05, 0.9),
    "e_ring": (0.05, 0.95),
    "e_single": (0.05, 0.98),
    **dict.fromkeys(("p", "p_ring"), (0.6, 0.95)),
    "p_all_to_all": (0.6, 1.0),
    "r": (1.0, 4.0),
    "low_mib": (0.001, 1.0),
}
#: How much a constant is held at its present value: it decides where no system shows it.
PULL, PULL_FABRIC = 0.003, 0.0005


NODE_FABRICS = ("nvlink", "xgmi", "pcie", "pairs")
#: Fabrics that count as one class where one of them has no system left.
POOLED = ("efa", "roce", "tcpx")
#: Where the constants of a fabric start when a system of it is left out: at those of its kin.
KIN = {**{name: tuple(f for f in POOLED if f != name) for name in POOLED}, "slingshot": ("ib",)}


def main(folder: Path, *, leave_out: str, write: bool) -> None:
    """Prints fitted constants, or the errors on systems left out."""
    groups = load_groups(folder)
    present = deepcopy(dict(calibration.load("network")))
    if "system" in leave_out:
        items = left_out(groups, present, [g.system for g in groups])
        print_bands("left out", items)
        print_worst_first(items)
        return
    if "generation" in leave_out:
        names = [g.cluster.device.generation for g in groups]
        print_generations(left_out(groups, present, names))
        return
    table = fitted_table(groups, present)
    _print_constants(table, groups)
    if write:
        write_constants(table)
    print_bands("in sample", [(g, _ratios(g, table)) for g in groups])


def left_out(
    groups: Sequence[Group], present: Mapping[str, Any], names: Sequence[str]
) -> list[Item]:
    """Returns the errors of all groups, those of one name predicted by the groups of the others."""
    items: list[Item] = []
    for name in sorted(set(names)):
        own = [g for g, n in zip(groups, names, strict=True) if n == name]
        rest = [g for g, n in zip(groups, names, strict=True) if n != name]
        table = left_out_table(own, rest, present)
        items += [(g, _ratios(g, table)) for g in own]
        print(f"done: {name}", file=sys.stderr)
    return items


def left_out_table(
    own: Sequence[Group], rest: Sequence[Group], present: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns constants that have not seen the systems `own`.

    Their rows in [[node]] and their fabrics are fitted on the other systems; rows and generations
    that only they show are dropped. EFA, RoCE and TCPX start from the constants of one another.
    """
    table = deepcopy(dict(present))
    inside = [g for g in own if g.fabric in NODE_FABRICS]
    entries = [entry for entry in table["node"] if any(entry_of(g, table) is entry for g in inside)]
    kept = [entry for entry in table["node"] if entry not in entries]
    for entry in entries:
        fit_nodes(rest, table, only=entry, drop=inside)
        if all(entry["curves"].values()):
            kept.append(entry)
    table["node"] = [entry for entry in table["node"] if entry in kept]
    _fit_general(inside, rest, table)
    fit_limits(rest, table)
    for name in sorted({g.fabric for g in own} & set(table["fabric"])):
        constants = table["fabric"][name]
        left = {g.cluster.device.generation for g in rest if g.fabric == name}
        apart = constants.get("generation", {})
        constants["generation"] = {k: v for k, v in apart.items() if k in left}
        # what the rest does not show must not come from constants that have seen `own`
        others = [table["fabric"][f] for f in KIN.get(name, ())]
        for key in [k for k, v in constants.items() if isinstance(v, float) and others]:
            constants[key] = float(np.exp(np.mean([np.log(o[key]) for o in others])))
        for values in constants["generation"].values():
            values |= {k: constants[k] for k, v in values.items() if isinstance(v, float)}
        fit_fabric(name, rest, table)
    return table


def _fit_general(own: Sequence[Group], rest: Sequence[Group], table: dict[str, Any]) -> None:
    """Fits the rows for any device of a switch on all switches, where `own` come to need them."""
    for entry in (e for e in table["node"] if not e["devices"] and "nvswitch" in e["scaleup"]):
        if not any(entry_of(g, table) is entry for g in own):
            continue
        for name, rows in entry["curves"].items():
            for size in rows:
                seen = [
                    g
                    for g in rest
                    if g.fabric == "nvlink" and g.collective == name and len(g.ranks) == int(size)
                ]
                if seen:
                    rows[size] = fit_row(seen, rows[size], entry)


def fitted_table(groups: Sequence[Group], present: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of network.toml with every constant fitted on `groups`."""
    table = deepcopy(dict(present))
    fit_nodes(groups, table)
    fit_limits(groups, table)
    for name in sorted(table["fabric"]):
        fit_fabric(name, groups, table)
    return table


def fit_nodes(
    groups: Sequence[Group],
    table: dict[str, Any],
    only: Any = None,
    drop: Sequence[Group] = (),
) -> None:
    """Fits alpha, B, S0, p, r and the peak of every row of [[node]] that has samples.

    `only` one entry; rows that `drop` shows and nobody else are removed, unless they are of a
    specification.
    """
    for entry in table["node"]:
        if only is not None and entry is not only:
            continue
        for name, rows in entry["curves"].items():
            for size in list(rows):
                seen = [g for g in drop if g.collective == name and len(g.ranks) == int(size)]
                own = [
                    g
                    for g in groups
                    if g.collective == name
                    and len(g.ranks) == int(size)
                    and g.fabric in NODE_FABRICS
                    and entry_of(g, table) is entry
                    and g.cluster.p2p
                    and (g.cluster.scaleup == "none" or g.fabric != "pcie")
                ]
                if own and sum(len(g.sizes) for g in own) >= 8:
                    rows[size] = fit_row(own, rows[size], entry)
                elif seen and entry["mark"] != "spec":
                    del rows[size]


def fit_row(groups: Sequence[Group], row: Sequence[float], entry: Mapping[str, Any]) -> list[float]:
    """Returns [alpha us, B GB/s, S0 MiB, p, r, peak GB/s] fitted on groups of one size."""
    factor = curve.bus_factor(groups[0].collective, len(groups[0].ranks))
    busbw = [float((g.sizes * factor / g.seconds).max()) / 1e9 for g in groups]
    scale = [link_gbs(g) / float(entry["link_gbs"]) for g in groups]
    peak = float(np.median([b / s for b, s in zip(busbw, scale, strict=True)]))
    start = np.log(np.array([max(v, 1e-3) for v in row[:5]]))

    def loss(x: np.ndarray) -> float:
        alpha, bandwidth, half, p, r = np.exp(x)
        if p > 0.85 or r > 12.0 or bandwidth > 2.0 * peak:
            return 10.0 + float(np.sum((x - start) ** 2))
        errors: list[float] = []
        for g, s in zip(groups, scale, strict=True):
            made = curve.curve_from_row([alpha, bandwidth, half, p, r, peak], scale=s, headroom=1.1)
            errors += _cells(g, made.many(g.sizes, factor))
        return float(np.mean(errors)) + PULL * 0.1 * float(np.sum((x - start) ** 2))

    best, _ = minimise(loss, start, [0.2, 0.1, 0.3, 0.1, 0.2], iterations=500, tolerance=1e-6)
    values = [round(float(v), 3) for v in np.exp(best)]
    return [*values, round(peak, 1)]


def fit_fabric(name: str, groups: Sequence[Group], table: dict[str, Any]) -> None:
    """Fits the constants of one fabric, and of the generations that differ, in place.

    A fabric without systems of its own takes those of its class (EFA, RoCE and TCPX are one), one
    whose systems are all of generations that differ is fitted on them.
    """
    constants = table["fabric"][name]
    own = [g for g in groups if g.fabric == name]
    apart = constants.get("generation", {})
    plain = [g for g in own if g.cluster.device.generation not in apart]
    if not plain:
        plain = [
            g for g in groups if CLASSES.get(g.fabric) == CLASSES.get(name, "-") and g not in own
        ]
        plain = [g for g in plain if g.fabric in POOLED] or own
    _fit_constants(plain, constants, table)
    for generation, values in apart.items():
        special = [g for g in own if g.cluster.device.generation == generation]
        _fit_constants(special, values, table)


def _fit_constants(
    groups: Sequence[Group], constants: dict[str, Any], table: dict[str, Any]
) -> None:
    two_only = all(g.cluster.layout(g.ranks).num_nodes <= 2 for g in groups)
    large_only = all(band_of(float(size)) != "< 64 KB" for g in groups for size in g.sizes)
    names = [
        key
        for key in dict.fromkeys(k for g in groups for k in FITTED.get(g.collective, ()))
        if key in constants
        and not (two_only and key in BEYOND_TWO)
        and not (large_only and key in SMALL)
    ]
    if not names:
        return
    start = np.array([float(constants[key]) for key in names])
    bounds = [
        BOUNDS.get(key, (value / 30.0, value * 30.0))
        for key, value in zip(names, start, strict=True)
    ]
    low, high = np.array(bounds).T
    start = np.clip(start, low, high)
    costs = [(g, _Fast(g, table)) for g in groups]
    measured = np.concatenate([np.log(g.seconds) for g in groups])
    weights = np.concatenate([_weights(g) for g in groups])
    weights = np.append(weights / weights.sum(), np.full(len(names), PULL_FABRIC))

    def residual(values: np.ndarray) -> np.ndarray:
        changed = {**constants, **dict(zip(names, values.tolist(), strict=True))}
        times = np.concatenate([np.log(fast(changed)) for _, fast in costs])
        return np.append(times - measured, np.log(values / start))

    best, _ = fit(residual, start, low, high, delta=0.1, weights=weights)
    for key, value in zip(names, best, strict=True):
        constants[key] = round(float(value), 3)


def _weights(group: Group) -> np.ndarray:
    """The weight of every size: bands count alike, and the law of a large all-to-all tenfold."""
    names = np.array([band_of(float(size)) for size in group.sizes])
    weights = np.array([1.0 / np.count_nonzero(names == name) for name in names])
    law = (group.sizes >= 128e6) & (group.collective == "all_to_all")
    return np.where(law, 10.0 * weights, weights)


def _cells(group: Group, times: np.ndarray) -> list[float]:
    """The mean |log error| of every band of sizes that the group has: bands count alike."""
    errors = np.abs(np.log(times / group.seconds))
    names = np.array([band_of(float(size)) for size in group.sizes])
    return [float(errors[names == name].mean()) for name in dict.fromkeys(names.tolist())]


class _Fast:
    """The times of one group for changing fabric constants; what stays is computed once."""

    def __init__(self, group: Group, table: dict[str, Any]) -> None:
        self.group, self.table = group, table
        with _Constants(table):
            layout = group.cluster.layout(group.ranks)
            self.span = collectives.span_of(group.collective, group.ranks, group.cluster, layout, 1)

    def __call__(self, changed: Mapping[str, Any]) -> np.ndarray:
        base = self.table["fabric"][
            self.group.fabric if self.group.fabric in self.table["fabric"] else "ethernet"
        ]
        generation = base.get("generation", {}).get(self.group.cluster.device.generation, {})
        constants = {
            **base,
            **generation,
            **{k: v for k, v in changed.items() if k != "generation"},
        }
        with _Constants(self.table):
            parts = fabric.fabric_parts(self.group.collective, self.span, constants)
        times = np.zeros_like(self.group.sizes)
        sizes = np.maximum(self.group.sizes, 1024.0)
        for made, factor in parts:
            times = np.maximum(times, made.single().many(sizes, float(factor)))
        return times


class _Constants:
    """Lets the model read another table than the committed one."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self.table = table

    def __enter__(self) -> None:
        self.kept = {module: module.load for module in (node, fabric, collectives)}

        def load(name: str) -> Mapping[str, Any]:
            return self.table if name == "network" else calibration.load(name)

        for module in self.kept:
            module.load = load

    def __exit__(self, *_: object) -> None:
        for module, load in self.kept.items():
            module.load = load


def _ratios(group: Group, table: Mapping[str, Any]) -> np.ndarray:
    with _Constants(table):
        cost = collectives.group_cost(group.collective, group.ranks, group.cluster)
        return cost.many(group.sizes) / group.seconds - 1.0


def _print_constants(table: Mapping[str, Any], groups: Sequence[Group]) -> None:
    for entry in table["node"]:
        if not any(entry_of(g, table) is entry for g in groups):
            continue
        print(f"# [[node]] {entry['devices']} {entry.get('most_gbs', '')}")
        for name, rows in entry["curves"].items():
            print(f"[node.curves.{name}]")
            for size, row in rows.items():
                print(f"{size} = {list(row)}")
    print(f"# [rules] {table['rules']['no_p2p_gbs']=} {table['rules']['pairs_ring']=}")
    for name, constants in table["fabric"].items():
        if any(g.fabric == name for g in groups):
            print(f"[fabric.{name}]")
            for key, value in constants.items():
                if not isinstance(value, str):
                    print(f"{key} = {value}")


if __name__ == "__main__":
    modes = {"--leave-out": "system", "--leave-generations": "generation"}
    asked = next((mode for flag, mode in modes.items() if flag in sys.argv), "")
    main(Path(sys.argv[1]), leave_out=asked, write="--write" in sys.argv)
