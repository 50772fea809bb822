"""The tile model of a GEMM: against its own formula in plain Python, and against measurements."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf

import numpy as np
import pytest

from foretrain.cost.calibration import load
from foretrain.cost.compute.gemm import price
from foretrain.cost.compute.gemm_tiles import (
    SPLITS,
    Rates,
    gemm_seconds,
    has_no_sides,
    tile_set,
)
from foretrain.cost.machine import Machine
from foretrain.cost.model import build_cost_model
from foretrain.hardware.grammar import parse_cluster
from foretrain.hardware.names import find_device
from foretrain.program import ComputeEvent
from foretrain.run.stacks import load_stack

SETS = [found["name"] for found in load("gemm_tiles")["set"]]
RATES = Rates(peak=1e15, bandwidth=3e12, sms=132)
CONSTANTS = {
    "form": "tile", "e_c": 0.87, "e_b": 0.83, "t0_us": 2.5, "k0": 140.0, "c": 0.6, "q": 0.7,
    "sigma_us": 2.0, "beta": 0.5, "clock": 0.2, "clock_ms": 1.5,
}  # fmt: skip


def used_tiles(name, m, n, k):
    """Tile and cluster sizes that a set offers to a product, from the rows of the file."""
    found = next(item for item in load("gemm_tiles")["set"] if item["name"] == name)
    yield from ((tm, tn, 1, 1) for tm, tn in found.get("tiles", ()))
    for row in found.get("rows", ()):
        if all(
            row.get(f"{key}_from", 0) <= size < row.get(f"{key}_to", inf)
            for key, size in (("m", m), ("n", n), ("k", k))
        ):
            yield row["tm"], row["tn"], row.get("cluster_m", 1), row.get("cluster_n", 1)


def by_hand(b, m, n, k, moved, tiles, constants):
    """The formula of the module's docstring, one candidate at a time."""
    peak, bandwidth, sms = RATES.peak, RATES.bandwidth, RATES.sms
    flops = 2 * b * m * n * k
    x = flops / peak * 1e3
    clock = 1 - constants["clock"] * x / (x + constants["clock_ms"])

    def reuse(area):
        return area / (area + 4096 * constants["c"])

    few = b * ceil(m / 128) * ceil(n / 128) < 2 * sms and tile_set(tiles).split
    total = 0.0
    for tm, tn, cm, cn in used_tiles(tiles, m, n, k):
        for split in (1, *SPLITS):
            if split > 1 and (not few or k < 256 * split):
                continue
            rows = ceil(m / (tm * cm))
            if tile_set(tiles).bounds is not None and m % (tm * cm):
                rows += constants["ragged"]
            w = b * rows * cm * ceil(n / (tn * cn)) * cn * split / sms
            rounds = max(1.0, constants["q"] * ceil(w) + (1 - constants["q"]) * w)
            e = constants["e_c"] * clock * reuse(tm * tn) / reuse(256 * 256)
            t_c = rounds * 2 * tm * tn * (k / split + constants["k0"]) * sms / (peak * e)
            extra = 8 * split * constants["beta"] * b * m * n if split > 1 else 0
            t_m = (moved + extra) / (bandwidth * constants["e_b"] * min(1.0, 2 * w) ** 0.5)
            t = max(t_c, t_m) * (1 + 0.25 * (min(t_c, t_m) / max(t_c, t_m)) ** 4)
            t += constants["sigma_us"] * 1e-6 if split > 1 else 0.0
            total = total + t**-32
    soft = (total / 3) ** (-1 / 32)
    per_row = max(
        constants["cast_bytes"] * k / (bandwidth * constants["e_b"]), 1e-9 * constants["row_ns"]
    )
    alone = constants["t0_us"] * 1e-6 + b * m * per_row + max(flops / peak, soft)
    host = 1e-6 * (constants["host_us"] + (constants["host_odd_us"] if m % 4 else 0.0))
    return max(alone, host) * (1 + 0.25 * (min(alone, host) / max(alone, host)) ** 4)


SHAPES = [
    (1, 1, 1, 1), (1, 16, 8192, 8192), (1, 129, 257, 5000), (8, 512, 512, 64),
    (1, 4096, 4096, 4096), (64, 2048, 128, 2048), (1, 8192, 1024, 100), (1, 300, 300, 65536),
    (1, 20000, 20000, 20000),
]  # fmt: skip


@pytest.mark.parametrize("tiles", SETS)
def test_columns_equal_the_formula(tiles):
    columns = {name: np.array([s[i] for s in SHAPES], float) for i, name in enumerate("bmnk")}
    moved = np.array([2.0 * b * (m * k + k * n + m * n) for b, m, n, k in SHAPES])
    constants = {
        **CONSTANTS, "tiles": tiles, "cast_bytes": 3.0, "row_ns": 4.0, "ragged": 0.4,
        "host_us": 40.0, "host_odd_us": 15.0,
    }  # fmt: skip
    times = gemm_seconds(columns, rates=RATES, constants=constants, bytes_moved=moved)
    expected = [
        by_hand(*shape, moved=d, tiles=tiles, constants=constants)
        for shape, d in zip(SHAPES, moved, strict=True)
    ]
    assert times.seconds == pytest.approx(expected, rel=1e-9)
    assert set(times.split) <= {1, *SPLITS}


@pytest.mark.parametrize("tiles", SETS)
def test_every_product_has_a_tile(tiles):
    for m in (1, 16, 17, 64, 65, 128, 129, 256, 257, 1024, 8192):
        for n, k in ((1280, 64), (1281, 4095), (65536, 4096), (64, 6144)):
            assert list(used_tiles(tiles, m, n, k)), (m, n, k)


@pytest.mark.parametrize("tiles", ["basic", "fine"])
def test_product_and_transpose_at_once_equal_the_better_of_both(tiles):
    columns = {name: np.array([s[i] for s in SHAPES], float) for i, name in enumerate("bmnk")}
    moved = 2.0 * columns["b"] * columns["m"] * columns["n"]
    same = {"rates": RATES, "constants": {**CONSTANTS, "tiles": tiles}, "bytes_moved": moved}
    other = {**columns, "m": columns["n"], "n": columns["m"]}
    each = [gemm_seconds(shape, **same).seconds for shape in (columns, other)]
    once = gemm_seconds(columns, **same, turned=True).seconds
    assert once == pytest.approx(np.minimum(*each), rel=1e-12)
    assert has_no_sides(same["constants"])
    assert not has_no_sides({**same["constants"], "cast_bytes": 3.0})


def test_many_columns_equal_one_by_one():
    rng = np.random.default_rng(0)
    columns = {name: np.ceil(2.0 ** rng.uniform(0, 14, 700)) for name in "mnk"}
    columns["b"] = np.ones(700)
    moved = 2.0 * columns["m"] * columns["n"]
    constants = {**CONSTANTS, "tiles": "fine"}
    together = gemm_seconds(columns, rates=RATES, constants=constants, bytes_moved=moved).seconds
    for i in range(0, 700, 97):
        one = {name: column[i : i + 1] for name, column in columns.items()}
        alone = gemm_seconds(one, rates=RATES, constants=constants, bytes_moved=moved[i : i + 1])
        assert alone.seconds[0] == pytest.approx(together[i], rel=1e-12)


#: Microseconds of forward bf16 GEMMs m, n, k in CUDA graphs; NVIDIA aiconfigurator 0.12.0.
MEASURED = {
    "h100-sxm": {(4096, 12288, 4096): 519.8, (16, 16384, 8192): 89.3, (1024, 6144, 4096): 68.7},
    "a100-sxm-80gb": {
        (4096, 12288, 4096): 1517.3, (8192, 1024, 8192): 539.9, (128, 4096, 16384): 111.9,
        (1024, 6144, 4096): 205.7,
    },
    "b200-sxm": {
        (4096, 12288, 4096): 262.7, (8192, 1024, 8192): 97.2, (128, 4096, 16384): 30.3,
        (256, 12288, 4096): 24.5,
    },
}  # fmt: skip


@pytest.mark.parametrize("device", list(MEASURED))
def test_measured_gemms(device):
    model = build_cost_model(
        parse_cluster(f"1x1 {device}"), load_stack("pytorch-eager"), warm=False
    )
    events = [
        ComputeEvent(
            op="gemm",
            direction="forward",
            dtype="bf16",
            shape=(("m", float(m)), ("n", float(n)), ("k", float(k))),
            flops=2.0 * m * n * k,
            bytes=1.0,
        )
        for m, n, k in MEASURED[device]
    ]
    ratio = model.price(events).value_s * 1e6 / np.array(list(MEASURED[device].values()))
    assert np.abs(ratio - 1).max() < 0.15
    assert np.abs(ratio - 1).mean() < 0.08


@pytest.mark.parametrize(
    ("device", "dtype", "share"),
    [("b200-sxm", "bf16", 0.70), ("b200-sxm", "fp8", 0.94), ("h100-sxm", "bf16", 1.0)],
)
def test_sustained_load_slows_products_of_a_step_only(device, dtype, share):
    event = ComputeEvent(
        op="gemm",
        direction="forward",
        dtype=dtype,
        shape=(("m", 32768.0), ("n", 16384.0), ("k", 16384.0)),
        flops=2.0 * 32768 * 16384**2,
        bytes=1.0,
    )
    cluster, stack = parse_cluster(f"1x1 {device}"), load_stack("megatron-te")
    burst, step = (
        float(build_cost_model(cluster, stack, warm=warm).price([event]).value_s[0])
        for warm in (False, True)
    )
    beyond = load("step")["compute"]
    assert burst / (step / beyond) == pytest.approx(share, abs=0.02)


def kernel_us(device, dtype, kernel, *shapes):
    """Times of forward GEMMs (m, n, k) by a named kernel ("" for any), in microseconds."""
    stack = replace(load_stack("pytorch-eager"), gemm_kernel=kernel)
    machine = Machine(device=find_device(device), stack=stack, warm=False)
    events = [
        ComputeEvent(
            op="gemm", direction="forward", dtype=dtype, flops=0.0, bytes=0.0,
            shape=tuple(zip("mnk", (float(x) for x in shape), strict=True)),
        )
        for shape in shapes
    ]  # fmt: skip
    return [1e6 * answer.value_s for answer in price(events, machine)]


def test_a_call_outside_of_graphs_waits_for_its_host_and_longer_for_odd_rows():
    even, odd = kernel_us(
        "b200-sxm", "fp8_block", "DeepGemmFp8BlockScaledMMKernel", (16, 512, 512), (17, 512, 512)
    )
    assert 150 < even < odd - 30  # 177 and 233 us in the table of kernels


def test_a_kernel_with_one_tile_pays_for_rows_that_it_does_not_have():
    kernel = "CutlassFP8ScaledMMLinearKernel"
    few, full = kernel_us("h100-sxm", "fp8", kernel, (257, 16384, 8192), (512, 16384, 8192))
    assert few > 0.95 * full


def test_a_cast_by_rows_costs_as_much_for_short_rows():
    kernel = "CutlassFP8ScaledMMLinearKernel"
    short, longer = kernel_us("h100-sxm", "fp8", kernel, (8192, 64, 64), (8192, 64, 256))
    assert 45 < short < 80  # 60 us in the table
    assert longer == pytest.approx(short, rel=0.2)


def test_units_of_a_kernel_may_be_others_than_those_of_its_dtype():
    (xla,) = kernel_us("mi300x", "fp32", "xla", (4096, 4096, 4096))
    (usual,) = kernel_us("mi300x", "fp32", "", (4096, 4096, 4096))
    assert xla < 2 * 4096**3 / 163.4e12 * 1e6 < usual
