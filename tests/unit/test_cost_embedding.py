"""Embedding bags: what caches serve, and how reuse of rows changes it."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.cost.calibration import load
from foretrain.cost.compute.embedding_bag import price
from foretrain.cost.compute.reuse import harmonic, reuse_of, uniform_distinct, zipf_distinct
from foretrain.cost.machine import Machine
from foretrain.cost.operators import Operators, time
from foretrain.errors import FileFormatError
from foretrain.hardware import find_device
from foretrain.program import ComputeEvent
from foretrain.run.lookups import read_histogram, read_reuse
from foretrain.run.stacks import load_stack

MACHINE = Machine(device=find_device("v100-sxm-16gb"), stack=load_stack("pytorch-dlrm"), warm=False)
PLACE = (MACHINE.device, MACHINE.stack)
BIG = {"batch": 4096.0, "tables": 32.0, "rows": 500_000.0, "dim": 128.0, "pooling": 16.0}


def seconds(shape: dict[str, float], direction: str = "forward") -> float:
    event = ComputeEvent(
        op="embedding_bag", direction=direction, dtype="fp32",  # pyright: ignore[reportArgumentType]
        shape=tuple(shape.items()), flops=0.0, bytes=0.0,
    )  # fmt: skip
    return price([event], MACHINE)[0].value_s


def test_backward_moves_rows_twice_at_half_the_bandwidth():
    """Measured 5.14 to 5.19 ms for this shape with SGD on a V100 (open kernel rows)."""
    assert seconds(BIG, "backward") == pytest.approx(5.16e-3, rel=0.03)


@given(st.floats(1e3, 1e8), st.floats(1.1, 10.0))
def test_more_rows_are_never_faster(rows: float, factor: float):
    small, large = BIG | {"rows": rows}, BIG | {"rows": rows * factor}
    assert seconds(large) >= seconds(small) * (1 - 1e-9)


def test_a_tiny_table_is_served_by_the_cache_and_a_huge_one_is_not():
    shape = {"batch": 4096.0, "dim": 128.0, "pooling": 16.0}
    tiny, huge = shape | {"rows": 10.0}, shape | {"rows": 1e9}
    assert seconds(tiny) < 0.6 * seconds(huge)
    rows = 4096 * 16 * 512
    assert seconds(huge) >= rows / MACHINE.device.memory_bandwidth


@given(st.floats(0.3, 2.0))
def test_popular_rows_are_never_slower(exponent: float):
    assert seconds(BIG | {"zipf": exponent}) <= seconds(BIG) * (1 + 1e-9)


@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.05, 1.45])
def test_harmonic_numbers_and_distinct_rows_are_those_of_the_full_sums(exponent: float):
    rows, lookups = 20_000, 5_000
    weights = [k**-exponent for k in range(1, rows + 1)]
    total = sum(weights)
    found = [np.array([value]) for value in (rows, lookups, exponent)]
    assert harmonic(found[0], found[2])[0] == pytest.approx(total, rel=1e-6)
    exact = sum(1 - (1 - w / total) ** lookups for w in weights)
    assert zipf_distinct(*found)[0] == pytest.approx(exact, rel=2e-3)


def test_uniform_lookups_find_the_expected_rows():
    rows, lookups = np.array([1.0, 10.0, 1e9]), np.array([7.0, 10_000.0, 1000.0])
    assert uniform_distinct(rows, lookups) == pytest.approx([1.0, 10.0, 1000.0], rel=1e-5)


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_what_hot_rows_serve_grows_and_ends_at_one(a: float, b: float):
    tables = {
        "rows": np.full(2, 1e6), "zipf": np.array([1.1, 0.0]), "distinct": np.array([0.0, 0.5]),
        "reuse_rows.0": np.array([0.0, 0.1]), "reuse_lookups.0": np.array([0.0, 0.6]),
        "reuse_rows.1": np.array([0.0, 0.9]), "reuse_lookups.1": np.array([0.0, 0.4]),
    }  # fmt: skip
    reuse = reuse_of(tables, np.full(2, 1e6))
    low, high = (reuse.served(np.full(2, value)) for value in sorted((a, b)))
    assert ((low >= 0.0) & (low <= high) & (high <= 1.0 + 1e-9)).all()
    assert reuse.served(np.full(2, 1e6)) == pytest.approx([1.0, 1.0])


def by_hand(rows: float, batch: float, dim: float, pooling: float, zipf: float = 0.0) -> float:
    """Returns the time of a forward kernel, written out for one table."""
    rules, lookups = load("embedding")["rules"], batch * pooling
    row, index = (32.0 * ceil(size / 32.0) for size in (4.0 * dim, 8.0 * pooling))
    weights = np.arange(1.0, rows + 1.0) ** -zipf
    share = weights / weights.sum()
    distinct = float((1.0 - (1.0 - share) ** lookups).sum())
    device = MACHINE.device
    kept = rules["l2_resident"] * device.l2_bytes / max(1.0, device.sm_count * 64.0 / batch) / row
    kept = min(kept, rows, lookups)
    hit = 1.0 - distinct / lookups
    if distinct > kept:
        whole = int(kept)
        hit = min(hit, float(share[:whole].sum()) + (kept - whole) * float(share[whole]))
    fixed, weight = 96.0 + index + row, pooling * row
    from_dram = (fixed + weight * (1.0 - hit)) / (0.9 * device.memory_bandwidth)
    wide = 1.1 if row <= 128.0 else 1.0
    return wide * max(from_dram, (fixed + weight) / (2.5 * device.memory_bandwidth)) * batch


@pytest.mark.parametrize("zipf", [0.0, 0.8, 1.0, 1.2])
def test_tables_at_once_cost_what_each_costs_by_hand(zipf: float):
    """Uniform lookups exactly; popular ones but for the slices of their sum."""
    rows, batch = np.array([50_000.0, 300_000.0, 2_000.0]), np.array([2048.0, 8192.0, 16384.0])
    dim, pooling = np.array([64.0, 128.0, 16.0]), np.array([20.0, 5.0, 40.0])
    shape = {"rows": rows, "batch": batch, "dim": dim, "pooling": pooling, "zipf": zipf}
    found = time(Operators(op="embedding_bag", dtype="fp32", shape=shape), *PLACE).value_s
    hand = [by_hand(*one, zipf) for one in zip(rows, batch, dim, pooling, strict=True)]
    assert found == pytest.approx(hand, rel=1e-9 if zipf == 0.0 else 5e-3)
    names = ("rows", "batch", "dim", "pooling")
    for i, one in enumerate(zip(rows, batch, dim, pooling, strict=True)):
        alone = dict(zip(names, one, strict=True)) | {"zipf": zipf}
        assert found[i] == pytest.approx(seconds(alone), rel=1e-12)


def test_order_of_tables_and_counts_do_not_matter():
    """Two equal tables cost what `tables = 2` costs; numbered kinds may stand in any order."""
    one = {"batch": 512.0, "rows": 1e6, "dim": 64.0, "pooling": 10.0}
    two = {**one, "rows": 2e6}

    def numbered(*kinds: dict[str, float]) -> dict[str, float]:
        shape = {"kinds": float(len(kinds))}
        for i, kind in enumerate(kinds):
            shape |= {f"{name}.{i}": value for name, value in kind.items()}
        return shape

    assert seconds(numbered(one, two)) == pytest.approx(seconds(numbered(two, one)), rel=1e-12)
    assert seconds(numbered(one, one)) == pytest.approx(seconds({**one, "tables": 2.0}), rel=1e-12)


def test_optimizers_move_what_they_keep():
    sgd = seconds(BIG, "backward")
    rowwise = seconds(BIG | {"row_states": 1.0}, "backward")
    adagrad = seconds(BIG | {"states": 1.0}, "backward")
    assert sgd < rowwise < adagrad
    assert adagrad == pytest.approx(2 * sgd, rel=0.2)


HISTOGRAM = """\
Locality stats after processing 1 batches of size 4
Avg # of indices: 100
Avg # of unique cols: 25
Avg col size: 4.0
Histogram of col sizes:
(0, 1]: 0.600
(1, 2]: 0.300
(2, 4]: 0.100
[0, 1, 2, 4]
['0.000', '0.600', '0.900', '1.000']
Ratio of index distribution at different column sizes:
(0, 1]: 0.150
(1, 2]: 0.150
(2, 4]: 0.700
[0, 1, 2, 4]
['0.000', '0.150', '0.300', '1.000']
"""


def test_a_histogram_gives_the_bound_of_any_cache():
    reuse = read_histogram(HISTOGRAM, "text")
    assert reuse.distinct == 0.25
    assert reuse.bins == ((0.1, 0.7), (0.3, 0.15), (0.6, 0.15))  # hottest first
    shape = {"rows": np.array([1e9]), "distinct": np.array([0.25])}
    for i, (rows, lookups) in enumerate(reuse.bins):
        shape |= {f"reuse_rows.{i}": np.array([rows]), f"reuse_lookups.{i}": np.array([lookups])}
    found = reuse_of(shape, np.array([1000.0]))
    assert found.distinct[0] == 250.0
    assert found.served(np.array([25.0]))[0] == pytest.approx(0.7)


def test_a_table_of_lookups_is_read(tmp_path: Path):
    path = tmp_path / "lookups.csv"
    path.write_text("table,lookups,distinct\nt0,1000,100\nt*,10,10\n")
    found = read_reuse(path)
    assert found["t0"].distinct == 0.1
    assert found["t*"].distinct == 1.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("table,lookups\nt0,5\n", "no column distinct"),
        ("table,lookups,distinct\nt0,5,9\n", "at most all distinct"),
        ("table,lookups,distinct\n", "no table"),
        ("Histogram of col sizes: none", "no number of indices"),
    ],
)
def test_a_wrong_file_is_one_clear_message(tmp_path: Path, text: str, words: str):
    path = tmp_path / "wrong.csv"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=words):
        read_reuse(path)
