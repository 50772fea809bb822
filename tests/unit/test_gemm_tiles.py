"""The tile model of a GEMM: against its own formula in plain Python, and against measurements."""

from __future__ import annotations

from math import ceil, inf

import numpy as np
import pytest

from foretrain.cost.calibration import load
from foretrain.cost.compute.gemm_tiles import SPLITS, TILES, Rates, gemm_seconds
from foretrain.cost.model import build_cost_model
from foretrain.hardware.grammar import parse_cluster
from foretrain.program import ComputeEvent
from foretrain.run.stacks import load_stack

RATES = Rates(peak=1e15, bandwidth=3e12, sms=132)
CONSTANTS = {
    "form": "tile", "e_c": 0.87, "e_b": 0.83, "t0_us": 2.5, "k0": 140.0, "c": 0.6, "q": 0.7,
    "sigma_us": 2.0, "beta": 0.5, "clock": 0.2, "clock_ms": 1.5,
}  # fmt: skip


def by_hand(b, m, n, k, moved, tiles, constants=CONSTANTS, cast=0.0):
    """The formula of the module's docstring, one candidate at a time."""
    peak, bandwidth, sms = RATES.peak, RATES.bandwidth, RATES.sms
    flops = 2 * b * m * n * k
    x = flops / peak * 1e3
    clock = 1 - constants["clock"] * x / (x + constants["clock_ms"])

    def reuse(area):
        return area / (area + 4096 * constants["c"])

    few = b * ceil(m / 128) * ceil(n / 128) < 2 * sms
    total, best = 0.0, inf
    for tm, tn in TILES[tiles]:
        for split in (1, *SPLITS):
            if split > 1 and (not few or k < 256 * split):
                continue
            w = b * ceil(m / tm) * ceil(n / tn) * split / sms
            rounds = max(1.0, constants["q"] * ceil(w) + (1 - constants["q"]) * w)
            e = constants["e_c"] * clock * reuse(tm * tn) / reuse(256 * 256)
            t_c = rounds * 2 * tm * tn * (k / split + constants["k0"]) * sms / (peak * e)
            extra = 8 * split * constants["beta"] * b * m * n if split > 1 else 0
            t_m = (moved + extra) / (bandwidth * constants["e_b"] * min(1.0, 2 * w) ** 0.5)
            t = max(t_c, t_m) * (1 + 0.25 * (min(t_c, t_m) / max(t_c, t_m)) ** 4)
            t += constants["sigma_us"] * 1e-6 if split > 1 else 0.0
            total, best = total + t**-32, min(best, t)
    soft = (total / 3) ** (-1 / 32)
    floor = constants["t0_us"] * 1e-6 + cast * b * m * k / (bandwidth * constants["e_b"])
    return floor + max(flops / peak, soft)


SHAPES = [
    (1, 1, 1, 1), (1, 16, 8192, 8192), (1, 129, 257, 5000), (8, 512, 512, 64),
    (1, 4096, 4096, 4096), (64, 2048, 128, 2048), (1, 8192, 1024, 100), (1, 300, 300, 65536),
    (1, 20000, 20000, 20000),
]  # fmt: skip


@pytest.mark.parametrize("tiles", list(TILES))
def test_columns_equal_the_formula(tiles):
    columns = {name: np.array([s[i] for s in SHAPES], float) for i, name in enumerate("bmnk")}
    moved = np.array([2.0 * b * (m * k + k * n + m * n) for b, m, n, k in SHAPES])
    constants = {**CONSTANTS, "tiles": tiles, "cast_bytes": 3.0}
    times = gemm_seconds(columns, rates=RATES, constants=constants, bytes_moved=moved)
    expected = [
        by_hand(*shape, moved=d, tiles=tiles, cast=3.0)
        for shape, d in zip(SHAPES, moved, strict=True)
    ]
    assert times.seconds == pytest.approx(expected, rel=1e-9)
    assert set(times.split) <= {1, *SPLITS}


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
    [("b200-sxm", "bf16", 0.70), ("b200-sxm", "fp8", 1.0), ("h100-sxm", "bf16", 1.0)],
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
