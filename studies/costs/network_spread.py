"""Fits how far measured collectives lie from the model, by number of nodes: the band of fabrics.

Usage: python studies/costs/network_spread.py FOLDER

For every fabric and number of nodes, the 90th percentile of |log(predicted / measured)| over rows
from 1 MB on (below, latency rules and does not scatter more on more nodes). Its excess over the
band of intervals.toml is log(spread) + log(1 + spread_doubling) per doubling of nodes beyond two,
fitted by least squares, both at least 0. Slingshot: GH200 only, whose runs differ in settings of
the network; A100 machines have constants of their own, on few numbers of nodes.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from math import exp, log, log2
from pathlib import Path

import numpy as np
from network_data import PUBLISHED

from foretrain.cost.answer import width
from foretrain.hardware import parse_cluster
from foretrain.validation.network.adapters import read_network_rows
from foretrain.validation.network.compare import predict_row

FABRICS = ("ib", "roce", "efa", "tcpx", "slingshot")


def main(folder: Path) -> None:
    """Prints the percentiles and the fitted spreads."""
    errors: dict[tuple[str, int], list[float]] = defaultdict(list)
    for table in (folder / "network/collectives.csv.gz", PUBLISHED):
        for item in map(predict_row, read_network_rows(table)):
            if item.ratio is None or item.fabric not in FABRICS or item.row.bytes < 1e6:
                continue
            cluster = parse_cluster(item.row.cluster)
            if item.fabric == "slingshot" and cluster.device.generation == "ampere":
                continue
            band = "comm_large" if item.row.bytes >= 2**25 else "comm_mid"
            excess = abs(log(item.ratio)) - log(width("fitted", band))
            errors[item.fabric, cluster.nodes].append(excess)
    for fabric in FABRICS:
        found = {n: values for (name, n), values in sorted(errors.items()) if name == fabric}
        excess = {n: float(np.quantile(values, 0.9)) for n, values in found.items()}
        weights = np.sqrt([len(values) for values in found.values()])
        doublings = np.array([log2(n / 2.0) for n in excess])
        columns = np.stack([np.ones_like(doublings), doublings], axis=1)
        target = np.array(list(excess.values()))
        base, slope = 0.0, 0.0
        if len(excess) > 2:
            base, slope = np.linalg.lstsq(columns * weights[:, None], target * weights)[0]
            base = max(float(base), 0.0)
            slope = float(doublings @ (weights**2 * (target - base)))
            slope /= float(doublings @ (weights**2 * doublings))
        text = ", ".join(f"{n}: {value:+.2f}" for n, value in excess.items())
        print(f"{fabric:10s} excess of log error over the band by nodes: {text}")
        print(f"{'':10s} spread {exp(base):.2f}, spread_doubling {max(exp(slope) - 1.0, 0.0):.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
