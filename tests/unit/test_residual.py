"""Residuals: what tables of measurements add to the formulas, where, and where not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from foretrain.cost import residual as residual_module
from foretrain.cost.calibration import Constants, constants_of_user, load
from foretrain.cost.compute import attention, gemm
from foretrain.cost.compute.features import gemm_features
from foretrain.cost.machine import Machine
from foretrain.cost.operator_constants import operators_text, read_operators
from foretrain.cost.operators import Operators, time
from foretrain.cost.residual import LEAF, Trees, has_residual, key_of, residual_of
from foretrain.errors import FileFormatError
from foretrain.hardware.names import find_device
from foretrain.program import ComputeEvent
from foretrain.run.stacks import load_stack

#: A kernel of the tables; a stack that names none has the formula alone on this device.
STACK = replace(load_stack("pytorch-eager"), gemm_kernel="torch.nn.functional.linear")


def machine(device: str = "h100-sxm", **words: str) -> Machine:
    return Machine(device=find_device(device), stack=replace(STACK, **words), warm=False)


def gemm_entry(device: str = "h100-sxm", dtype: str = "bf16") -> Constants:
    return gemm.constants_for(machine(device), dtype)


def seconds(device: str, m: float, n: float = 4096.0, k: float = 4096.0) -> float:
    ops = Operators(op="gemm", dtype="bf16", shape={"m": m, "n": n, "k": k})
    return float(time(ops, find_device(device), STACK).value_s[0])


def formula(device: str, m: float, n: float = 4096.0, k: float = 4096.0) -> float:
    where, found = machine(device), gemm_entry(device)
    columns = {
        name: np.array([value])
        for name, value in {"b": 1.0, "m": m, "n": n, "k": k, "out_bytes": 2.0, "row": k}.items()
    }
    return float(gemm.column_seconds(columns, np.ones(1), "bf16", where, found.values).seconds[0])


def test_trees_are_sums_of_leaves_by_the_answers():
    trees = Trees(
        feature=np.array([[0, 1], [1, 0]]),
        threshold=np.array([[1.0, 5.0], [5.0, np.inf]], dtype=np.float32),
        leaf=np.array([[1, 2, 3, 4], [10, 20, 30, 40]]),
    )
    features = np.array([[0.0, 2.0, 2.0], [0.0, 0.0, 9.0]])
    # first tree: bit 0 is feature 0 > 1, bit 1 is feature 1 > 5; second: bit 0 is feature 1 > 5
    assert trees(features) == pytest.approx(np.array([1 + 10, 2 + 10, 4 + 20]) * LEAF)


def test_more_rows_than_a_block_are_what_they_are_alone():
    found = gemm_entry()
    residual = residual_of("gemm", found, find_device("h100-sxm"), "bf16")
    assert residual is not None
    rng = np.random.default_rng(3)
    features = rng.uniform(0.0, 12.0, (20, 2500))
    together = residual.trees(features)
    alone = [float(residual.trees(features[:, [i]])[0]) for i in range(0, 2500, 250)]
    assert together[::250] == pytest.approx(alone, rel=1e-12)


def test_a_shape_of_the_table_gets_the_factor_and_one_beyond_it_the_formula():
    inside, beyond = 4096.0, 200_000.0
    assert seconds("h100-sxm", inside) != pytest.approx(formula("h100-sxm", inside), rel=1e-6)
    assert 0.7 < seconds("h100-sxm", inside) / formula("h100-sxm", inside) < 1.4
    assert seconds("h100-sxm", beyond) == pytest.approx(formula("h100-sxm", beyond), rel=1e-12)


def test_another_chip_with_the_same_constants_has_the_formula_alone():
    # the H20 shares the entry of H100 and has 78 SMs instead of 132, H200 is the same chip
    assert gemm_entry("h20").values == gemm_entry("h100-sxm").values
    assert seconds("h20", 4096.0) == pytest.approx(formula("h20", 4096.0), rel=1e-12)
    assert seconds("h200-sxm", 4096.0) != pytest.approx(formula("h200-sxm", 4096.0), rel=1e-6)


def test_a_stack_that_names_no_kernel_has_the_formula_alone():
    device = find_device("h100-sxm")
    unknown = gemm.constants_for(machine(gemm_kernel=""), "bf16")
    assert residual_of("gemm", unknown, device, "bf16") is None


def test_a_dtype_that_the_table_does_not_hold_has_the_formula_alone():
    found, device = gemm_entry(), find_device("h100-sxm")
    assert "tf32" in found.values["dtypes"]
    assert residual_of("gemm", found, device, "bf16") is not None
    assert residual_of("gemm", found, device, "tf32") is None


def test_a_constant_that_moves_ends_the_residual_of_its_entry():
    found, device = gemm_entry(), find_device("h100-sxm")
    moved = replace(found, values={**found.values, "e_c": 0.5})
    assert residual_of("gemm", moved, device, "bf16") is None
    same = replace(found, values={**found.values, "source": "other words"})
    assert residual_of("gemm", same, device, "bf16") is not None


def test_a_calibrated_entry_keeps_the_residual_that_it_names_and_its_own_band():
    found, device = gemm_entry(), find_device("h100-sxm")
    mine = {**found.values, "calibrated": True, "devices": ["h100-sxm"], "e_b": 0.4}
    named = replace(found, values={**mine, "residual": key_of(found.values)})
    kept = residual_of("gemm", named, device, "bf16")
    assert kept is not None
    assert kept.bands is None
    assert residual_of("gemm", replace(found, values=mine), device, "bf16") is None
    with constants_of_user({"gemm_fitted": [named.values]}):
        assert seconds("h100-sxm", 4096.0) != pytest.approx(formula("h100-sxm", 4096.0), rel=1e-6)


def test_backward_that_stands_on_forward_takes_its_factor_too():
    shape = {name: np.zeros(1) for name in attention.SHAPE}
    given = {"batch": 2.0, "seq_q": 4096.0, "heads": 32.0, "head_dim": 128.0, "causal": 1.0}
    shape |= {name: np.array([value]) for name, value in given.items()}
    where = machine("a100-sxm-80gb", attention_kernel="flash2")
    forward, backward = (
        attention.column_times(shape, "bf16", way, where)[0] for way in ("forward", "backward")
    )
    assert forward.beyond[0] != 1.0
    assert backward.beyond[0] == forward.beyond[0]
    assert "of shapes measured nearby" not in forward.formula


def test_every_shipped_residual_belongs_to_an_entry_and_gains():
    index = residual_module._index()
    keys = {
        key_of(entry)
        for table in ("gemm_fitted", "gemm_kernels", "moe_fitted", "attention_fitted",
                      "convolution_fitted")
        for entry in load(table)["entry"]
    }  # fmt: skip
    assert len(index) > 100
    orphans = [entry["name"] for (_, key, _), entry in index.items() if key not in keys]
    assert not orphans, "constants moved: run studies/costs/residuals.py again"
    for family, key, case in index:
        found = residual_module._shipped(family, key, case)
        assert found is not None
        assert np.all(np.abs(LEAF * found.trees.leaf) < 3.0)
        assert found.bands is not None
        assert np.all(found.bands >= 1.0)
    assert has_residual(next(iter(index))[1])
    assert not has_residual("no such key")


def test_beyond_the_sizes_of_a_table_the_factor_fades_over_one_doubling():
    residual = residual_of("gemm", gemm_entry(), find_device("h100-sxm"), "bf16")
    assert residual is not None
    most = residual.bounds["m"][1]
    for share, left in ((1.0, 1.0), (2.0**0.5, 0.5), (2.0, 0.0), (4.0, 0.0)):
        sizes = {"m": most * share, "n": 4096.0, "k": 4096.0, "b": 1.0, "loss": 1.0}
        columns = {name: np.array([size]) for name, size in sizes.items()}
        features = gemm_features(columns, 132)
        whole = residual.trees(features)
        found = residual.beyond(features, columns)
        assert np.log(found.factor) == pytest.approx(left * whole, abs=1e-9)
        assert bool(found.inside[0]) == (left == 1.0)


def test_a_price_is_never_below_its_own_latency():
    where = Machine(
        device=find_device("a100-pcie-40gb"),
        stack=replace(STACK, gemm_kernel="torch_bmm"),
        warm=False,
    )
    shape = tuple({"b": 2.0, "m": 128.0, "n": 32.0, "k": 64.0}.items())
    event = ComputeEvent(
        op="gemm", direction="forward", dtype="fp32", shape=shape, flops=0.0, bytes=0.0
    )
    answer = gemm.price([event], where)[0]
    assert 0.0 <= answer.latency_s <= answer.value_s


@pytest.mark.parametrize("device", ["mi300x", "mi325x"])
def test_short_products_of_a_table_without_short_ones_have_a_band(device):
    columns = {name: np.array([8.0, 256.0, 2048.0]) for name in "mnk"}
    ops = Operators(op="gemm", dtype="bf16", shape=columns)
    times = time(ops, find_device(device), load_stack("pytorch-eager"))
    assert np.all(times.low_s < times.high_s)


@pytest.mark.parametrize("value", ["foo", 5, True, ["a"], ""])
def test_a_calibration_file_that_names_no_shipped_residual_is_refused(tmp_path, value):
    found = gemm_entry()
    entry = {**found.values, "calibrated": True, "residual": value, "devices": ["h100-sxm"]}
    file = tmp_path / "mine.toml"
    file.write_text(operators_text({"gemm": [entry]}))
    with pytest.raises(FileFormatError, match="residual"):
        read_operators(file)


def test_sizes_with_few_shapes_have_intervals_of_their_own():
    residual = residual_of("gemm", gemm_entry(), find_device("h100-sxm"), "bf16")
    assert residual is not None
    assert residual.bands is not None
    wide = replace(residual, own_bands={"k": {4096.0: np.full(3, 9.0)}})
    columns = {name: np.array([value, value]) for name, value in
               {"b": 1.0, "m": 2048.0, "n": 4096.0, "loss": 1.0}.items()}  # fmt: skip
    columns["k"] = np.array([4096.0, 8192.0])
    found = wide.beyond(gemm_features(columns, 132), columns)
    band = found.band(np.array([0, 0]), 1.0)
    assert band.tolist() == [9.0, residual.bands[0]]
