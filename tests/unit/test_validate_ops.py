"""`validate ops`: reading tables of operators, pricing every row, statistics."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from foretrain.cli.main import main
from foretrain.errors import FileFormatError
from foretrain.validation.ops.classes import is_left_out, shape_key
from foretrain.validation.ops.predict import ALONE_S, predict_ops
from foretrain.validation.ops.report import results_of, statistics_of, to_json
from foretrain.validation.ops.table import read_ops
from foretrain.validation.ops.validate import validate_ops

HEAD = (
    "id", "device", "op", "pass", "dtype", "stack", "launch_included", "host_us", "latency_us",
    "b", "m", "n", "k", "rows", "cols", "operands", "batch", "seq_q", "heads", "head_dim",
    "causal", "c", "h", "w",
    "r", "s", "stride", "padding", "tokens", "hidden", "ffn", "experts", "topk", "distribution",
)  # fmt: skip


def table(path: Path, *rows: dict[str, object]) -> Path:
    """Writes rows; what they leave out of the common columns is filled in."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, HEAD, restval="")
        writer.writeheader()
        for number, row in enumerate(rows):
            usual = {"id": f"r{number}", "device": "h100-sxm", "dtype": "bf16", "latency_us": 100}
            writer.writerow({**usual, **row})
    return path


GEMM = {"op": "gemm", "m": 4096, "n": 4096, "k": 4096}


def prices(path: Path) -> list[float | None]:
    return [outcome.value_s for outcome in predict_ops([item.row for item in read_ops(path)])]


OTHERS = (
    {"op": "linear", "m": 64, "n": 64, "k": 64, "dtype": "float16", "device": "V100-SXM2-16GB"},
    {"op": "attention", "batch": 1, "seq_q": 4096, "heads": 32, "head_dim": 128, "causal": "true"},
    {"op": "conv2d", "n": 32, "c": 256, "k": 256, "h": 14, "w": 14, "r": 3, "s": 3, "padding": 1},
    {
        "op": "moe_gemm", "tokens": 4096, "hidden": 4096, "ffn": 1536, "experts": 64, "topk": 6,
        "distribution": "power_law_1.2",
    },
    {"op": "rmsnorm", "rows": 8192, "cols": 8192},
    {"op": "add", "rows": 8192, "cols": 8192, "operands": 3},
    {"op": "cross_entropy", "rows": 8192, "cols": 32000, "pass": "full"},
)  # fmt: skip


def test_spellings_of_a_dtype_are_one_group_and_a_bad_latency_is_named(tmp_path):
    rows = ({**GEMM, "dtype": "bfloat16"}, GEMM, {**GEMM, "latency_us": "12,5"})
    path = table(tmp_path / "ops.csv", *rows)
    results = validate_ops(path)
    assert set(to_json(results)["groups"]["dtype"]) == {"bf16"}
    assert results[2].outcome.status == "unsupported"
    assert "latency_us '12,5'" in (results[2].outcome.reason or "")


def test_every_family_gets_a_price(tmp_path):
    path = table(tmp_path / "ops.csv", GEMM, *OTHERS)
    outcomes = predict_ops([item.row for item in read_ops(path)])
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [("ok", None)] * 8
    assert all(o.low_s < o.value_s < o.high_s for o in outcomes)


def test_backward_of_a_gemm_is_two_kernels_and_full_is_three(tmp_path):
    whole = {"op": "gemm", "m": 8192, "n": 4096, "k": 4096}
    names = ("forward", "backward_input", "backward_weight", "backward", "full")
    parts = [{**whole, "pass": name} for name in names]
    forward, dgrad, wgrad, backward, full = prices(table(tmp_path / "a.csv", *parts))
    assert backward == pytest.approx(dgrad + wgrad)
    assert full == pytest.approx(forward + backward)


def test_a_call_timed_alone_is_its_launch_and_then_its_kernel(tmp_path):
    tiny = {"op": "gemm", "m": 16, "n": 16, "k": 64}
    alone, graph = prices(table(tmp_path / "a.csv", {**tiny, "launch_included": "yes"}, tiny))
    assert alone > 10e-6 > graph
    launch = alone - ALONE_S  # two events apart show no kernel shorter than that
    large = {"op": "gemm", "m": 4096, "n": 4096, "k": 4096}
    call, kernel = prices(table(tmp_path / "b.csv", {**large, "launch_included": "yes"}, large))
    assert call - kernel == pytest.approx(launch)


def test_a_row_may_state_its_host(tmp_path):
    large = {"op": "conv2d", "n": 64, "c": 64, "k": 64, "h": 56, "w": 56, "r": 3, "s": 3,
             "padding": 1, "device": "p100-pcie-16gb", "dtype": "fp32",
             "stack": "torch_conv2d"}  # fmt: skip
    kernel, mean, stated = prices(
        table(
            tmp_path / "a.csv",
            large,
            {**large, "launch_included": "yes"},
            {**large, "host_us": 500},
        )
    )
    assert stated - kernel == pytest.approx(500e-6)
    assert 200e-6 < mean - kernel < 600e-6  # the calls of that collection grew slower and slower
    rows = read_ops(table(tmp_path / "b.csv", {**large, "host_us": -1}))
    assert rows[0].row.unreadable == ("host_us '-1'",)


def test_small_calls_take_what_the_host_needs_for_their_operator(tmp_path):
    """Measured 27, 33 and 47 us on hosts of A100, T4 and P4 (NeuSight); hosts differ by 1.7."""
    names, measured = ("elementwise", "softmax", "layernorm"), (27.0, 33.0, 47.0)
    calls = [{"op": op, "rows": 64, "cols": 64, "launch_included": "yes"} for op in names]
    path = table(tmp_path / "a.csv", *({**call, "stack": "torch_vector"} for call in calls))
    outcomes = predict_ops([item.row for item in read_ops(path)])
    for outcome, us in zip(outcomes, measured, strict=True):
        assert outcome.value_s == pytest.approx(us * 1e-6, rel=0.12)
        assert outcome.low_s == pytest.approx(outcome.value_s / 1.7)
        assert outcome.high_s == pytest.approx(outcome.value_s * 1.7)


def test_kernels_of_unknown_caches_have_wide_intervals_and_calls_of_pytorch_have_not(tmp_path):
    sizes = ({"rows": 64}, {"rows": 8192}, {"rows": 262144})  # of floors, of L2 (50 MB), of DRAM
    kernels = [{"op": "gelu", "cols": 1024, "stack": "kernel", **size} for size in sizes]
    large = {**kernels[2], "launch_included": "yes"}
    path = table(tmp_path / "a.csv", *kernels, large)
    outcomes = predict_ops([item.row for item in read_ops(path)])
    factors = [(o.high_s or 0.0) / (o.value_s or 1.0) for o in outcomes]
    assert factors[:3] == pytest.approx([1.92, 2.3, 1.94])
    assert factors[3] < 1.25


def test_rows_that_cannot_be_priced_keep_their_place_and_say_why(tmp_path):
    path = table(
        tmp_path / "ops.csv",
        {**GEMM, "device": "abacus"},
        {**GEMM, "dtype": "int4_wo"},
        {**GEMM, "op": "sorting"},
        {"op": "gemm", "m": 8, "n": 8},
        {**GEMM, "k": "many"},
        {**GEMM, "pass": "sideways"},
        {**GEMM, "latency_us": ""},
    )
    items = read_ops(path)
    outcomes = predict_ops([item.row for item in items])
    reasons = [outcome.reason for outcome in outcomes]
    words = ("abacus", "int4_wo", "sorting", "gemm needs k", "k 'many'", "sideways")
    for word, reason in zip(words, reasons, strict=False):
        assert word in reason
    assert outcomes[-1].status == "ok"
    results = results_of(outcomes, [item.latency_us for item in items])
    assert statistics_of(results).n == 0  # nothing measured is no error


def test_equal_work_of_several_kernels_gives_the_noise_floor(tmp_path):
    rows = [{**GEMM, "stack": s, "latency_us": t} for s, t in (("a", 90), ("b", 100), ("c", 120))]
    results = validate_ops(table(tmp_path / "a.csv", *rows))
    assert [result.spread for result in results] == pytest.approx([0.1, 0.0, 0.2])
    form = to_json(results)
    assert form["overall"]["noise"] == pytest.approx(0.1)
    assert set(form["groups"]["kernel"]) == {"a", "b", "c"}


def test_a_named_kernel_has_constants_of_its_own(tmp_path):
    rows = [{**GEMM, "dtype": "fp8", "stack": s} for s in ("", "torch_flow", "megatron-te")]
    unknown, kernel, stack = prices(table(tmp_path / "a.csv", *rows))
    assert kernel != unknown
    assert stack == pytest.approx(kernel)  # its FP8 products run in that kernel


def test_the_split_is_by_whole_pairs_and_near_a_third(tmp_path):
    one, other = ({"m": m, "n": 8, "k": 16} for m in (1, 99))
    assert shape_key("gemm", one) == shape_key("gemm", other)
    keys = [f"{n}_{k}" for n in range(64, 4096, 64) for k in range(64, 2048, 64)]
    assert 0.3 < sum(map(is_left_out, keys)) / len(keys) < 0.37
    path = table(tmp_path / "a.csv", *({**GEMM, "n": 64 * i} for i in range(1, 40)))
    left, fitted = (validate_ops(path, part=part) for part in ("left-out", "fitted"))
    assert len(left) + len(fitted) == 39
    assert 0 < len(left) < 39


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("id,device,op\nx,h100-sxm,gemm\n", "latency_us"),
        ("id,device,op,latency_us\nx,h100-sxm,gemm,1\nx,h100-sxm,gemm,2\n", "twice"),
        ("id,device,op,latency_us\n,h100-sxm,gemm,1\n", "empty"),
        ("", "no column"),
    ],
)
def test_bad_tables_are_refused_in_one_message(tmp_path, text, word):
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FileFormatError, match=word):
        read_ops(path)


def test_the_command_writes_json_for_every_row(tmp_path, capsys):
    path = table(tmp_path / "ops.csv", GEMM, {**GEMM, "device": "abacus"})
    assert main(["validate", "ops", str(path), "--json", str(tmp_path / "out.json")]) == 0
    shown = capsys.readouterr().out
    assert "unknown device 'abacus'" in shown
    assumed = shown.split("Assumed (not stated in the table):")[1].split("\n\n")[0]
    assert assumed.split() == ["1", "stack", "pytorch-eager"]
    form = json.loads((tmp_path / "out.json").read_text())
    assert [row["status"] for row in form["rows"]] == ["ok", "unsupported"]
    latency = form["rows"][0]["latency_us"]
    assert latency["measured"] == pytest.approx(100)
    assert latency["error"] == pytest.approx(abs(latency["value"] / 100 - 1))


def test_the_command_refuses_what_it_does_not_know(tmp_path, capsys):
    path = table(tmp_path / "ops.csv", GEMM)
    assert main(["validate", "ops", str(path), "--part", "half"]) == 1
    assert "left-out" in capsys.readouterr().err
    assert main(["validate", "ops", str(tmp_path / "absent.csv")]) == 1
    assert "cannot read" in capsys.readouterr().err


def test_parquet_reads_like_csv(tmp_path):
    pandas = pytest.importorskip("pandas", reason="needs foretrain[data]")
    pytest.importorskip("pyarrow", reason="needs foretrain[data]")
    path = table(tmp_path / "ops.csv", GEMM, {"op": "rmsnorm", "rows": 64, "cols": 4096})
    pandas.read_csv(path).to_parquet(tmp_path / "ops.parquet")
    assert prices(tmp_path / "ops.parquet") == pytest.approx(prices(path))
    (tmp_path / "broken.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(FileFormatError, match="cannot read"):
        read_ops(tmp_path / "broken.parquet")
