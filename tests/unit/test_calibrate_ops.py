"""`calibrate ops`: planted constants are found, nothing moves without need, files round-trip."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foretrain.cli.main import main
from foretrain.cost.calibration import constants_of_user, load
from foretrain.cost.operator_constants import operators_text, read_operators
from foretrain.errors import FileFormatError, InputError
from foretrain.validation.ops.calibrate import calibrate_ops
from foretrain.validation.ops.calibrate_text import render_calibrated
from foretrain.validation.ops.predict import predict_ops
from foretrain.validation.ops.table import MeasuredOp, OpRow

SIZES = (512, 1024, 2048, 4096, 8192)


def rows(count: int, op: str = "gemm", device: str = "h100-sxm", stack: str = "") -> list[OpRow]:
    rng = np.random.default_rng(5)
    made: list[OpRow] = []
    for number in range(count):
        a, b, c = (float(rng.choice(SIZES)) for _ in range(3))
        shapes = {
            "gemm": {"m": a, "n": b, "k": c},
            "rmsnorm": {"rows": 8 * a, "cols": b},
            "attention": {"batch": 1.0, "seq_q": a, "heads": 32.0, "head_dim": 128.0},
            "moe_gemm": {
                "tokens": a, "hidden": b, "ffn": c, "experts": 64.0, "topk": 6.0,
            },
            "conv2d": {
                "n": a / 64, "c": b / 8, "h": 28.0, "w": 28.0, "k": c / 8, "r": 3.0, "s": 3.0,
                "padding": 1.0,
            },
        }  # fmt: skip
        made.append(
            OpRow(
                id=f"{op}-{number}", device=device, op=op, part="forward", dtype="bf16",
                stack=stack, launch_included=False, shape=shapes[op],
            )
        )  # fmt: skip
    return made


def measured(made: list[OpRow], factor: float = 1.0, noise: float = 0.0) -> list[MeasuredOp]:
    """Times of the model with the rate of compute units and memory divided by `factor`."""
    rng = np.random.default_rng(9)
    return [
        MeasuredOp(row=o.row, latency_us=o.value_s * 1e6 * factor * np.exp(rng.normal(0, noise)))
        for o in predict_ops(made)
    ]


@pytest.mark.parametrize("op", ["gemm", "rmsnorm", "attention", "moe_gemm", "conv2d"])
def test_a_slower_device_is_found_from_thirty_rows(op):
    made = rows(30, op)
    result = calibrate_ops(measured(made, factor=1.3, noise=0.02), "h100-sxm", "table.csv")
    refit = result.refits[0]
    assert refit.before > 0.15
    assert refit.after < 0.05
    assert refit.after < 0.4 * refit.before


def test_a_calibration_on_its_own_output_changes_nothing():
    result = calibrate_ops(measured(rows(30)), "h100-sxm", "table.csv")
    for old, new in result.refits[0].changes.values():
        assert new == pytest.approx(old, rel=0.01)


def test_what_the_rows_say_nothing_about_stays_near_its_prior():
    made = [row for row in rows(200) if min(row.shape.values()) >= 4096]
    changes = calibrate_ops(measured(made, factor=1.2), "h100-sxm", "t").refits[0].changes
    assert changes["e_c"][1] < 0.9 * changes["e_c"][0]
    assert changes["t0_us"][1] == pytest.approx(changes["t0_us"][0], rel=0.15)


def test_several_kernels_get_an_entry_each_and_one_for_all():
    items = measured(rows(20, stack="fast")) + measured(rows(20, stack="slow"), factor=1.4)
    result = calibrate_ops(items, "h100-sxm", "t")
    assert {refit.kernel for refit in result.refits} == {"", "fast", "slow"}
    entries = {"gemm_fitted": [refit.entry for refit in result.refits]}
    with constants_of_user(entries):
        fast, slow = (predict_ops(rows(20, stack=name)) for name in ("fast", "slow"))
    ratio = [b.value_s / a.value_s for a, b in zip(fast, slow, strict=True)]
    assert np.median(ratio) == pytest.approx(1.4, rel=0.05)


def test_other_devices_and_bad_rows_are_counted_not_used():
    items = measured(rows(10)) + measured(rows(4, device="a100-sxm-80gb"))
    result = calibrate_ops(items, "h100-sxm", "t")
    assert result.refits[0].rows == 10
    assert list(result.unused.values()) == [4]


def write(path: Path, items: list[MeasuredOp]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "device", "op", "dtype", "latency_us", "m", "n", "k"])
        for item in items:
            shape = [item.row.shape[name] for name in "mnk"]
            writer.writerow([item.row.id, "h100-sxm", "gemm", "bf16", item.latency_us, *shape])
    return path


def test_the_file_moves_predictions_and_round_trips(tmp_path, capsys):
    table = write(tmp_path / "table.csv", measured(rows(30), factor=1.5))
    file = tmp_path / "mine.toml"
    command = ["calibrate", "ops", str(table), "--device", "h100", "--output", str(file)]
    assert main(command) == 0
    assert "error before" in capsys.readouterr().out
    entries = read_operators(file)
    again = operators_text({"gemm": entries["gemm_fitted"]})
    assert again == file.read_text()
    assert main(["validate", "ops", str(table)]) == 0
    before = capsys.readouterr().out
    assert main(["validate", "ops", str(table), "--calibration", str(file)]) == 0
    assert capsys.readouterr().out != before
    run = [
        "--model",
        "llama-3-8b",
        "--cluster",
        "1x8 h100-sxm",
        "--global-batch",
        "64",
        "--sequence",
        "4096",
    ]
    speed = []
    for more in ([], ["--calibration", str(file)]):
        assert main(["predict", *run, "--microbatch", "1", "--tp", "4", "--json", "-", *more]) in (
            0,
            2,
        )
        speed.append(capsys.readouterr().out)
    assert speed[0] != speed[1]
    assert "your constants of gemm go before the shipped ones" in speed[1]
    assert "your constants" not in speed[0]
    with constants_of_user(entries):
        pass
    assert predict_ops(rows(3))[0].value_s > 0  # the constants of the user ended with the block


@pytest.mark.parametrize(
    ("op", "device", "stack", "dtype"),
    [
        *(("attention", "h100-sxm", kernel, "bf16") for kernel in ("flash2", "flash3", "cudnn")),
        ("attention", "h200", "megatron-te", "bf16"),
        ("conv2d", "h100-sxm", "", "bf16"),
        ("conv2d", "h100-sxm", "", "fp32"),
        ("conv2d", "a100-sxm-80gb", "", "fp32"),
        ("conv2d", "l40s", "", "bf16"),
    ],
)
def test_what_calibrate_writes_can_be_read_and_is_used(tmp_path, op, device, stack, dtype):
    made = [replace(row, dtype=dtype) for row in rows(16, op, device, stack)]
    refit = calibrate_ops(measured(made, factor=1.3), device, "test").refits[0]
    path = tmp_path / "mine.toml"
    path.write_text(operators_text({op: [refit.entry]}))
    before = np.array([outcome.value_s for outcome in predict_ops(made)])
    with constants_of_user(read_operators(path)):
        after = np.array([outcome.value_s for outcome in predict_ops(made)])
    assert after / before == pytest.approx(1.3, rel=0.05)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("weight_limit", None, "'weight_limit' is missing"), ("band", [1.2], "'band' is malformed")],
)
def test_convolutions_that_start_from_a_product_are_checked(tmp_path, key, value, words):
    made = [replace(row, dtype="bf16") for row in rows(16, "conv2d", "h100-sxm")]
    entry = dict(calibrate_ops(measured(made), "h100-sxm", "test").refits[0].entry)
    entry = {name: entry[name] for name in entry if name != key}
    path = tmp_path / "mine.toml"
    path.write_text(operators_text({"conv2d": [entry if value is None else {**entry, key: value}]}))
    with pytest.raises(FileFormatError) as caught:
        read_operators(path)
    assert words in str(caught.value)


def test_a_file_for_another_device_says_that_it_changes_nothing(tmp_path, capsys):
    table = write(tmp_path / "table.csv", measured(rows(30), factor=1.5))
    file = tmp_path / "mine.toml"
    assert main(["calibrate", "ops", str(table), "--device", "h100", "-o", str(file)]) == 0
    run = [
        "--model",
        "llama-3-8b",
        "--cluster",
        "1x8 a100-sxm-80gb",
        "--global-batch",
        "64",
        "--sequence",
        "4096",
    ]
    capsys.readouterr()
    main(["predict", *run, "--microbatch", "1", "--tp", "4", "--calibration", str(file)])
    assert "h100-sxm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("schema = ", "not TOML"),
        ("[[operators.sorting]]\na = 1\n", "unknown kind"),
        ("[operators]\ngemm = 3\n", "no list"),
        ("operators = 3\n", "no table"),
        ('[[operators.gemm]]\nform = "tile"\n', "lists no device"),
        ('[[operators.gemm]]\nform = "tile"\ndevices = ["x"]\n', "is missing"),
        ('[[operators.gemm]]\nform = "tile"\ndevices = ["x"]\ne_c = nan\n', "not finite"),
        ('[[operators.gemm]]\nform = "cube"\ndevices = ["x"]\n', "form"),
    ],
)
def test_bad_files_are_refused_with_their_place(tmp_path, text, word):
    file = tmp_path / "bad.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(FileFormatError, match=word) as error:
        read_operators(file)
    assert "bad.toml" in str(error.value)


def test_a_calibration_needs_a_device_and_rows(tmp_path, capsys):
    table = write(tmp_path / "table.csv", measured(rows(3)))
    assert main(["calibrate", "ops", str(table)]) == 1
    assert "--device" in capsys.readouterr().err
    assert main(["calibrate", "ops", str(table), "--device", "h100"]) == 1
    assert "usable rows" in capsys.readouterr().err


#: An entry of a device that the catalog has no GEMM constants for, but for the constants.
NEW = {
    "devices": ["ascend-910b"], "dtypes": ["bf16"], "form": "tile", "mark": "fitted",
    "source": "made up",
}  # fmt: skip


def unseen_gemms(factors: dict[str, float], stacks: tuple[str, ...]) -> list[MeasuredOp]:
    """Times of a device without constants of its own, which are those of any device x `factors`."""
    made = [
        replace(row, device="ascend-910b", stack=stacks[i % len(stacks)])
        for i, row in enumerate(rows(40, device="ascend-910b"))
    ]
    usual = next(prior for prior in load("gemm_prior")["prior"] if prior["tiles"] == "basic")
    truth = {name: value * factors.get(name, 1.0) for name, value in usual["start"].items()}
    entry = {**NEW, "tiles": "basic", **truth}
    with constants_of_user({"gemm_fitted": [entry]}):
        return measured(made, noise=0.02)


def test_a_device_without_constants_starts_from_what_families_have_in_common():
    items = unseen_gemms({"e_c": 0.8, "q": 0.3, "clock_ms": 3.0}, ("",))
    (refit,) = calibrate_ops(items, "ascend-910b", "table.csv").refits
    assert refit.after < 0.03
    assert refit.entry["e_c"] == pytest.approx(0.8 * 0.89, rel=0.05)


def test_kernels_of_an_unseen_device_stay_near_what_all_of_them_show():
    """Ten rows of each of four kernels: none is fitted on its own."""
    items = unseen_gemms({"e_c": 0.8}, ("one", "two", "three", "four"))
    first, *others = calibrate_ops(items, "ascend-910b", "table.csv").refits
    assert not first.kernel
    assert {refit.kernel for refit in others} == {"one", "two", "three", "four"}
    for refit in others:
        for name in ("e_c", "e_b", "k0"):
            assert refit.entry[name] == pytest.approx(first.entry[name], rel=0.15)


def test_the_priors_of_gemms_cover_every_constant_of_a_tile_entry(tmp_path: Path):
    for prior in load("gemm_prior")["prior"]:
        assert set(prior["start"]) == set(prior["width"])
        assert all(0.1 <= width < 3.0 for width in prior["width"].values())
        entry = {**NEW, "tiles": prior["tiles"], **prior["start"]}
        path = tmp_path / f"{prior['tiles']}.toml"
        path.write_text(operators_text({"gemm": [entry]}))
        assert read_operators(path)["gemm_fitted"][0]["tiles"] == prior["tiles"]


def test_rows_of_a_stack_of_the_catalog_move_what_the_stack_uses():
    made = rows(40, "gemm", stack="pytorch-eager") + rows(40, "gemm", stack="mykernel")
    result = calibrate_ops(measured(made, factor=1.5), "h100-sxm", "table.csv")
    entries = {refit.kernel: refit.entry for refit in result.refits}
    assert set(entries) == {"", "mykernel"}
    assert "kernels" not in entries[""]
    with constants_of_user({"gemm_fitted": [entries[""], entries["mykernel"]]}):
        now = predict_ops(rows(20, "gemm", stack="pytorch-eager"))
    before = predict_ops(rows(20, "gemm", stack="pytorch-eager"))
    ratio = [b.value_s / a.value_s for a, b in zip(before, now, strict=True)]
    assert np.median(ratio) == pytest.approx(1.5, rel=0.1)


def test_narrow_products_of_a_stack_move_the_kernel_that_it_runs():
    stacks = ("megatron-te", "vllm_cutlass")
    made = [
        replace(row, id=f"{row.id}-{name}", dtype="fp8", stack=name)
        for name in stacks
        for row in rows(20)
    ]
    items = [
        replace(item, latency_us=item.latency_us * (1.5 if item.row.stack == stacks[0] else 3.0))
        for item in measured(made)
    ]
    refits = calibrate_ops(items, "h100-sxm", "test").refits
    assert [refit.kernel for refit in refits] == ["", "torch_flow", "vllm_cutlass"]
    with constants_of_user({"gemm_fitted": [refit.entry for refit in refits]}):
        times = [outcome.value_s * 1e6 for outcome in predict_ops(made)]
    off = np.array(times) / [item.latency_us for item in items] - 1.0
    assert np.abs(off).mean() < 0.05


def test_a_dtype_without_units_on_the_device_is_named():
    made = [replace(row, dtype="nvfp4") for row in rows(12)]
    with pytest.raises(InputError, match="no units for nvfp4"):
        calibrate_ops(measured(made), "h100-sxm", "table.csv")


def test_constants_that_are_zero_are_no_obstacle():
    made = [replace(row, dtype="fp16") for row in rows(12, "conv2d", device="v100-sxm-16gb")]
    result = calibrate_ops(measured(made, factor=1.2), "v100-sxm-16gb", "table.csv")
    assert any(old == 0.0 for old, _ in result.refits[0].changes.values())
    assert "conv2d" in render_calibrated(result, None)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("input_tiles", "foo", "'input_tiles' is none of cudnn7-input"),
        ("weight_piece", 0.0, "must lie between"),
        ("most_taps", "a", "'most_taps' is no number"),
    ],
)
def test_convolution_constants_of_a_file_are_checked(tmp_path, key, value, words):
    shipped = next(e for e in load("convolution_fitted")["entry"] if e["kind"] == "tensor")
    entry = {**shipped, "calibrated": True, "devices": ["v100-sxm-16gb"], key: value}
    path = tmp_path / "c.toml"
    path.write_text(operators_text({"conv2d": [entry]}))
    with pytest.raises(FileFormatError) as caught:
        read_operators(path)
    assert words in str(caught.value)
