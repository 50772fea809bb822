"""Odd files and odd models of the newer surfaces: tables, curves, logs, lookups, topologies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foretrain import InputError, load_run, predict
from foretrain.cli.main import main
from foretrain.report.json_form import to_json

DLRM: dict[str, Any] = {
    "model": {
        "family": "dlrm", "dense": 13, "bottom": [64, 16], "top": [64, 1],
        "tables": {"rows": [1000, 5, 100_000], "dim": 16, "pooling": [1, 20, 2.5]},
    },
    "training": {"global_batch": 256},
    "plan": {"preset": "dlrm"},
    "cluster": "1x4 a100-sxm-80gb",
}  # fmt: skip
T5: dict[str, Any] = {
    "model": {"family": "t5", "layers": 4, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 1000},
    "training": {"sequence": 64, "target_sequence": 32, "global_batch": 16, "microbatch": 1},
    "plan": {"preset": "megatron", "tp": 2, "pp": 2},
    "cluster": "1x8 h100-sxm",
}
OPS = "id,device,op,dtype,m,n,k,latency_us\n"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns the one message of a refusal: exit code 1, no output, nothing internal."""
    code = main(list(arguments))
    seen = capsys.readouterr()
    assert (code, seen.out) == (1, ""), seen.err
    assert "internal error" not in seen.err
    assert 0 < len(seen.err) < 3000
    return seen.err


def gemms(rows: int = 12, n: str = "4096") -> str:
    lines = (f"r{i},h100-sxm,gemm,bf16,{128 * (i + 1)},{n},4096,{28 + 8 * i}" for i in range(rows))
    return OPS + "\n".join(lines) + "\n"


def log(device: str = "NVIDIA H100 80GB HBM3", last: str = "", scale: float = 1.0) -> str:
    lines = ["# all_reduce_perf"]
    for rank in range(8):
        name = last if last and rank == 7 else device
        lines.append(f"#  Rank  {rank} Group  0 Pid  1 on  host0 device  {rank} [0x07] {name}")
    for power in range(10, 30, 2):
        micros = (20.0 + 2**power / 2.7e5) * scale
        rate = 2**power / micros / 1e3
        lines.append(
            f"{2**power} {2**power // 4} float sum -1 {micros:.2f} {rate:.2f} {rate * 1.75:.2f} 0"
        )
    return "\n".join(lines) + "\n"


# -- models and their files ----------------------------------------------------------------------


@pytest.mark.parametrize("tables", [{"rows": []}, {"rows": [], "dim": []}, {}, []], ids=str)
def test_a_recommender_without_tables_is_refused(tables: object) -> None:
    with pytest.raises(InputError, match=r"model\.tables") as caught:
        load_run({**DLRM, "model": {**DLRM["model"], "tables": tables}})
    assert "sequence" not in str(caught.value), "a broken model of tables needs no tokens"


def test_a_recommender_is_not_sharded_by_fsdp() -> None:
    with pytest.raises(InputError, match=r"plan\.preset.*FSDP"):
        load_run({**DLRM, "plan": {"preset": "fsdp"}})


@pytest.mark.parametrize("family", [5, ["dlrm"], "dlmr", None], ids=str)
def test_an_unknown_family_is_one_message(family: object) -> None:
    with pytest.raises(InputError, match="dlrm") as caught:
        load_run({**DLRM, "model": {"family": family, "layers": 2}})
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("m.yaml", "family: dlrm\ndense: 2020-13-41\n"),
        ("m.yaml", "family: dlrm\ndense: !!int x\n"),
        ("m.yaml", "family: !!timestamp x\n"),
        ("m.yaml", "family: !!bool maybe\n"),
        ("m.yaml", f"family: dlrm\ndense: {'9' * 5000}\n"),
        ("m.toml", f"family = 'dlrm'\ndense = {'9' * 5000}\n"),
    ],
    ids=["date", "int", "timestamp", "bool", "digits", "digits of TOML"],
)
def test_a_model_file_with_an_odd_value_is_refused(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=r"not valid (YAML|TOML)"):
        load_run({**DLRM, "model": str(tmp_path / name)})


def test_the_encoder_of_t5_alone_is_refused(tmp_path: Path) -> None:
    config = {
        "model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 4,
        "num_heads": 4, "vocab_size": 1000, "architectures": ["T5EncoderModel"],
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(InputError, match="architectures"):
        load_run({**T5, "model": str(path)})


@pytest.mark.parametrize("stages", [[4, 4], [1, 7], [7, 1]], ids=str)
def test_no_part_of_the_time_is_below_zero(stages: list[int]) -> None:
    """Rounding of the sum once made 'other' negative."""
    run = load_run({**T5, "plan": {**T5["plan"], "stages": stages}})
    form = to_json(predict(run), run)
    parts = form["time_parts_s"]
    communication = parts.pop("exposed_communication")
    every = [*parts.values(), *communication.values()]
    assert min(every) >= 0.0
    assert sum(every) == pytest.approx(form["step_time_s"]["value"], rel=1e-12)


# -- lookups -------------------------------------------------------------------------------------

HEAD = "table,lookups,distinct\n"
COUNTS = "# of indices: 100\n# of unique cols: 50\nHistogram of col sizes:\n"
RATIO = "Ratio of index distribution\n(0, 1]: 0.5\n(1, 2]: 0.5\n"


@pytest.mark.parametrize(
    "content",
    [
        HEAD + "t0,50,5\nt0,50,7\n",
        HEAD + "x" * 200_000,
        COUNTS + "(0, 1]: 0.5.5\n(1, 2]: .\n" + RATIO,
        COUNTS + "(0, 1]: 5\n(1, 2]: 7\n" + RATIO,
        COUNTS.replace("50", "200") + "(0, 1]: 0.5\n(1, 2]: 0.5\n" + RATIO,
        COUNTS + "(0, 1]: 0\n(1, 2]: 0\n" + RATIO.replace("0.5", "0"),
    ],
    ids=["twice", "long field", "no numbers", "no shares", "more rows than lookups", "all zero"],
)
def test_a_damaged_file_of_lookups_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lookups.csv"
    path.write_text(content)
    with pytest.raises(InputError):
        load_run({**DLRM, "training": {"global_batch": 256, "lookups": {"file": str(path)}}})


@pytest.mark.parametrize("file", [None, 5, [], ""], ids=str)
def test_lookups_without_a_file_are_refused(file: object) -> None:
    with pytest.raises(InputError, match="names no file"):
        load_run({**DLRM, "training": {"global_batch": 256, "lookups": {"file": file}}})


def test_a_mark_of_the_byte_order_is_no_part_of_a_column(tmp_path: Path) -> None:
    path = tmp_path / "lookups.csv"
    path.write_text("\ufeff" + HEAD + "*,50,5\n", encoding="utf-8")
    load_run({**DLRM, "training": {"global_batch": 256, "lookups": {"file": str(path)}}})


# -- topologies ----------------------------------------------------------------------------------

MATRIX = "\tGPU0\tGPU1\nGPU0\tX\tNV1\nGPU1\tNV1\tX\n"


@pytest.mark.parametrize(
    "content",
    [
        MATRIX.replace("NV1", "NV0"),
        MATRIX.replace("NV1", "NV" + "9" * 5000),
        MATRIX * 40_000,
        "\ufffe",
    ],
    ids=["NV0", "digits", "large", "no matrix"],
)
def test_an_odd_topology_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "topo.txt"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match="topo"):
        load_run({**DLRM, "cluster": f"1x2 v100-sxm-16gb [topology {path}]"})


def test_a_topology_of_no_path_is_refused() -> None:
    with pytest.raises(InputError, match="cannot read"):
        load_run({**DLRM, "cluster": "1x2 v100-sxm-16gb [topology a\0b]"})


# -- calibration ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def curve_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("curve")
    (folder / "x.log").write_text(log())
    assert main(["calibrate", "network", str(folder / "x.log"), "-o", str(folder / "c")]) == 0
    return (folder / "c").read_text()


@pytest.fixture(scope="module")
def operator_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("operators")
    (folder / "x.csv").write_text(gemms())
    flags = ["--device", "h100-sxm", "-o", str(folder / "c")]
    assert main(["calibrate", "ops", str(folder / "x.csv"), *flags]) == 0
    return (folder / "c").read_text()


def changed(text: str, key: str, value: str) -> str:
    lines = text.splitlines()
    found = [i for i, line in enumerate(lines) if line.startswith(f"{key} = ")]
    assert len(found) == 1, key
    lines[found[0]] = f"{key} = {value}"
    return "\n".join(lines)


RUN_FLAGS = ("--model", "llama-2-7b", "--sequence", "512", "--cluster", "1x8 h100-sxm", "--tp", "8")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("nodes", "inf"), ("nodes", "0"), ("nodes", "true"), ("ranks", "1e300"), ("ranks", "1"),
        ("device", "5"), ("collective", "'zzz'"), ("fabric", "[]"), ("plateau", "'no'"),
        ("latency_us", "nan"), ("latency_us", "1e300"), ("latency_us", "-1"),
        ("bandwidth_gb_s", "nan"), ("bandwidth_gb_s", "1e-300"), ("bandwidth_gb_s", "inf"),
        ("m1_bytes", "nan"), ("m2_bytes", "-1"), ("sigmoid", "[1, 2]"),
        ("sigmoid", "[nan, 1, 1, 1]"), ("largest_bytes", "inf"), ("max_error", "nan"),
    ],
)  # fmt: skip
def test_a_damaged_curve_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], curve_file: str, key: str, value: str
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(changed(curve_file, key, value))
    assert "number 1" in refused(capsys, "predict", *RUN_FLAGS, "--calibration", str(path))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("devices", "[1]"), ("devices", "[nan]"), ("dtypes", "[1]"), ("tiles", "'zzz'"),
        ("e_c", "0"), ("e_c", "-1"), ("e_b", "1e-300"), ("t0_us", "1e300"), ("k0", "-1"),
        ("q", "inf"), ("band", "0"), ("band", "'zzz'"), ("band", "[]"), ("band", "[1]"),
        ("band", "[nan, 1.0, 2.0]"), ("band", "[-1, -1, -1]"), ("band", "[1e300, 1e300, 1e300]"),
        ("e_c", "5"), ("k0", "1" + "0" * 400), ("mark", "'foo'"), ("dtypes", "['bf17']"),
        ("dtypes", "[]"), ("dtypes", "['bf16']\nunits = 'foo'"), ("dtypes", "['bf16']\nunits = 3"),
        ("dtypes", "['bf16']\nkernels = ['[']"), ("dtypes", "['bf16']\nkernels = []"),
    ],
)  # fmt: skip
def test_a_damaged_entry_of_operators_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], operator_file: str, key: str, value: str
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(changed(operator_file, key, value))
    assert "number 1" in refused(capsys, "predict", *RUN_FLAGS, "--calibration", str(path))


def test_a_nested_calibration_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.toml"
    path.write_text("a = " + "[" * 3000)
    refused(capsys, "predict", *RUN_FLAGS, "--calibration", str(path))


COLUMNS = "id,device,op,dtype,batch,seq_q,heads,head_dim,rows,cols,latency_us\n"


@pytest.mark.parametrize("op", ["attention", "softmax", "elementwise"])
def test_predict_reads_what_calibrate_ops_wrote(tmp_path: Path, op: str) -> None:
    """Entries that lack what only other shipped entries hold were once refused."""
    rows = (
        f"r{i},h100-sxm,{op},bf16,2,{512 * i},8,64,{1000 * i},4096,{50 * i}" for i in range(1, 9)
    )
    (tmp_path / "x.csv").write_text(COLUMNS + "\n".join(rows) + "\n")
    target = str(tmp_path / "c.toml")
    flags = ["--device", "h100-sxm", "-o", target]
    assert main(["calibrate", "ops", str(tmp_path / "x.csv"), *flags]) == 0
    assert main(["predict", *RUN_FLAGS, "--calibration", target]) == 0


@pytest.mark.parametrize(
    "content",
    [
        log(last="NVIDIA A100-SXM4-80GB"),
        log(scale=1e300),
        log().replace("Rank  7", "Rank  " + "9" * 5000).replace(" 2 ", " " + "9" * 5000 + " "),
    ],
    ids=["two devices", "endless", "digits"],
)
def test_an_odd_log_is_refused_and_nothing_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "x.log").write_text(content)
    target = tmp_path / "c.toml"
    main_flags = (str(tmp_path / "x.log"), "-o", str(target))
    if content.count("9" * 5000):
        assert main(["calibrate", "network", *main_flags]) in (0, 1)
        assert "internal" not in capsys.readouterr().err
        return
    refused(capsys, "calibrate", "network", *main_flags)
    assert not target.exists()


def test_a_log_of_no_path_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "calibrate", "network", "a\0b")


# -- tables to compare with ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [OPS, gemms(n="0"), gemms(n="x"), gemms(n="1e200")], ids=["none", "0", "x", "1e200"]
)
@pytest.mark.parametrize("flags", [(), ("--json", "-")], ids=["text", "json"])
def test_a_table_without_a_priced_operator_is_reported(
    tmp_path: Path, content: str, flags: tuple[str, ...]
) -> None:
    (tmp_path / "x.csv").write_text(content)
    assert main(["validate", "ops", str(tmp_path / "x.csv"), *flags]) == 0


NETWORK = "gpu,nodes,gpus,interconnect,collective,bytes,time_us\n"


@pytest.mark.parametrize(
    "row",
    [
        "H100,x,16,8x400G IB,all_reduce,1000000,50",
        "H100,0,16,8x400G IB,all_reduce,1000000,50",
        "H100,2,1.5,8x400G IB,all_reduce,1000000,50",
        "H100,2,16,8x400G IB,all_reduce,1e300,50",
    ],
)
def test_a_damaged_row_of_a_network_table_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: str
) -> None:
    (tmp_path / "x.csv").write_text(NETWORK + row + "\n")
    assert main(["validate", "network", str(tmp_path / "x.csv"), "--json", "-"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["rows"]
    assert line["status"] == "unsupported"
    assert line["reason"]


def test_a_network_table_without_a_column_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.csv").write_text(NETWORK.replace("bytes", "size") + "H100,2,16,x,y,5,5\n")
    message = refused(capsys, "validate", "network", str(tmp_path / "x.csv"))
    assert "no column 'bytes'" in message


@pytest.mark.parametrize(
    "arguments",
    [
        ("validate", "ops", "--by", "model"),
        ("validate", "ops", "--ablation"),
        ("validate", "ops", "--report", "page.md"),
        ("validate", "network", "--part", "fitted"),
        ("validate", "network", "--limit", "3"),
        ("validate", "runs", "--calibration", "c.toml"),
        ("calibrate", "network", "--device", "h100-sxm"),
        ("calibrate", "ops", "--cluster", "1x8 h100-sxm"),
    ],
    ids=" ".join,
)
def test_an_option_that_nothing_would_read_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    command, kind, *flags = arguments
    assert "not an option of" in refused(capsys, command, kind, "x.csv", *flags)


@pytest.mark.parametrize("flags", [("--suggest",), ("--noise", "5%")], ids=" ".join)
def test_a_limit_measures_nothing(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    message = refused(capsys, "fit", "x.yaml", "--max", "sequence", *flags)
    assert f"{flags[0]}: --max measures nothing" in message
