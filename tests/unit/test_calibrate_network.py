"""`calibrate network`: logs as people have them become curves that `--calibration` reads."""

from __future__ import annotations

import numpy as np
import pytest

from foretrain.analysis.calibrate_network import calibrate_network, device_of
from foretrain.analysis.fit_curve import fit_curve
from foretrain.analysis.nccl_log import read_log
from foretrain.cli.main import main
from foretrain.cost.network.collectives import group_cost
from foretrain.cost.user_calibration import calibration_text, read_calibration
from foretrain.errors import FileFormatError, InputError
from foretrain.hardware import parse_cluster


def seconds(size, *, alpha=20e-6, rate=200e9, half=8e6):
    return alpha + size / rate * (1 + (half / size) ** 0.7)


def table(name, ranks, *, factor, redop="sum", old=False, prefix="", wrong=1.0, first=8, last=34):
    """The text of one nccl-tests table, new or old layout."""
    head = "" if old else f"# Collective test starting: {name}_perf\n"
    lines = [f"{head}# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592", "#", "# Using devices"]
    lines += [
        f"#  Rank {r:2d} Group  0 Pid {100 + r} on node{r // 8} device {r % 8:2d} [0000:1b:00] "
        "NVIDIA H100 80GB HBM3"
        for r in range(ranks)
    ]
    lines += ["#       size         count      type   redop    root     time   algbw   busbw"]
    lines += ["node0:12:12 [0] NCCL INFO Launch mode Parallel"]
    lines += [
        f"{0:12d} {0:10d} float {redop} {'' if old else -1} 33.9 0.00 0.00 N/A 34.0 0.00 0.00 N/A"
    ]
    for power in range(first, last, 1):
        size = 2**power
        time = seconds(size)
        algbw = size / time / 1e9
        row = f"{size:12d} {size // 4:10d} float {redop} {'' if old else -1} {time * 1e6:.2f} "
        row += f"{algbw:.2f} {algbw * factor * wrong:.2f} {'N/A' if old else 0} "
        lines.append(
            row + f"{time * 1e6:.2f} {algbw:.2f} {algbw * factor:.2f} {'N/A' if old else 0}"
        )
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 68.4"]
    return "\n".join(prefix + line for line in lines) + "\n"


def test_several_collectives_in_one_file_with_launcher_prefixes(tmp_path):
    path = tmp_path / "run.log"
    path.write_text(
        table("all_reduce", 16, factor=30 / 16, prefix="[1,0]<stdout>: ")
        + table("alltoall", 16, factor=15 / 16, redop="none", prefix="node0: ")
    )
    found = read_log(path)
    assert [(t.collective, t.ranks, t.nodes) for t in found] == [
        ("all_reduce", 16, 2),
        ("all_to_all", 16, 2),
    ]
    assert len(found[0].samples) == 26  # the size of 0 carries no message
    assert found[0].samples[0].seconds == pytest.approx(seconds(2**8), abs=1e-8)


def test_a_log_without_a_name_is_told_by_its_columns(tmp_path):
    path = tmp_path / "x.log"
    path.write_text(table("?", 8, factor=1.75, old=True))
    assert read_log(path)[0].collective == "all_reduce"
    path.write_text(table("?", 8, factor=0.875, redop="", old=True))
    with pytest.raises(FileFormatError, match="does not say which collective"):
        read_log(path)
    assert read_log(path, collective="all_to_all")[0].collective == "all_to_all"
    named = tmp_path / "a100_allgather.log"
    named.write_text(path.read_text())
    assert read_log(named)[0].collective == "all_gather"


def test_bandwidths_that_contradict_bytes_and_time_are_refused(tmp_path):
    path = tmp_path / "x.log"
    path.write_text(table("all_reduce", 8, factor=1.75, wrong=1.4))
    with pytest.raises(FileFormatError, match="do not follow from bytes and time"):
        read_log(path)


def test_a_curve_keeps_latency_bend_and_bandwidth():
    sizes = [2.0**p for p in range(8, 34)]
    curve = fit_curve(
        sizes,
        [seconds(s) for s in sizes],
        device="h100-sxm",
        nodes=1,
        ranks=8,
        fabric="none",
        collective="all_reduce",
        source="test",
    )
    assert curve.plateau
    assert seconds(2**8) < curve.latency_s < seconds(2**15)
    assert curve.mean_error < 0.05  # a smooth law; measured tables bend harder
    assert curve.max_error < 0.10
    times = curve.seconds(np.geomspace(1.0, 1e12, 5000))
    assert (np.diff(times) >= -1e-12).all()


def test_large_sizes_alone_leave_the_latency_to_the_model(tmp_path):
    path = tmp_path / "x.log"
    path.write_text(table("all_reduce", 8, factor=1.75, first=25))
    curve = calibrate_network([path])[0].curve
    assert not curve.plateau
    cluster = parse_cluster("1x8 h100-sxm")
    ranks = tuple(range(8))
    measured = group_cost("all_reduce", ranks, cluster, curves=[curve])
    model = group_cost("all_reduce", ranks, cluster)
    assert measured.seconds(2.0**25) == pytest.approx(seconds(2**25), rel=0.05)
    ratio = measured.seconds(2.0**25) / model.seconds(2.0**25)
    assert measured.seconds(2.0**20) == pytest.approx(ratio * model.seconds(2.0**20), rel=1e-6)


def test_a_written_file_reads_back_and_wins(tmp_path):
    path, out = tmp_path / "x.log", tmp_path / "cal.toml"
    path.write_text(table("all_reduce", 16, factor=30 / 16))
    fitted = calibrate_network([path], fabric="ib")
    out.write_text(calibration_text([item.curve for item in fitted]))
    curves = read_calibration(out).curves
    assert curves == tuple(item.curve for item in fitted)
    cluster, ranks = parse_cluster("2x8 h100-sxm, 8x400G ib"), tuple(range(16))
    cost = group_cost("all_reduce", ranks, cluster, curves=curves)
    assert cost.mark == "measured"
    assert cost.seconds(2.0**30) == pytest.approx(seconds(2**30), rel=0.06)
    other = parse_cluster("2x8 h100-sxm, 32x100G efa")
    assert group_cost("all_reduce", ranks, other, curves=curves).measured is None
    assert group_cost("all_reduce", ranks, cluster, sharers=2, curves=curves).measured is None


def test_the_command_writes_and_predict_says_what_it_used(tmp_path, capsys):
    log, out = tmp_path / "x.log", tmp_path / "cal.toml"
    log.write_text(table("all_reduce", 8, factor=1.75))
    assert main(["calibrate", "network", str(log), "-o", str(out)]) == 0
    assert "error of the fit" in capsys.readouterr().out
    run = ["predict", "--model", "gpt2-124m", "--cluster", "1x8 h100-sxm", "--sequence", "1024"]
    run += ["--global-batch", "8", "--preset", "megatron"]
    assert main([*run, "--calibration", str(out)]) == 0
    assert "measured curve (x.log)" in " ".join(capsys.readouterr().out.split())
    assert main([*run, "--calibration", str(log)]) == 1
    assert "not TOML" in capsys.readouterr().err


def test_what_is_missing_is_asked_for(tmp_path):
    path = tmp_path / "x.log"
    path.write_text(table("all_reduce", 16, factor=30 / 16))
    with pytest.raises(InputError, match="give --fabric"):
        calibrate_network([path])
    with pytest.raises(InputError, match="more ranks"):
        calibrate_network([path], cluster=parse_cluster("1x8 h100-sxm"))
    bad = tmp_path / "bad.toml"
    bad.write_text('[[network.curve]]\ndevice = "h100-sxm"\n')
    with pytest.raises(FileFormatError, match="malformed"):
        read_calibration(bad)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("Tesla V100-SXM2-16GB", "v100-sxm-16gb"),
    ],
)
def test_product_names_of_the_driver(text, name):
    assert device_of(text, "log").name == name
