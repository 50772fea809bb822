"""`validate network`: tables of measured collectives, our own layout and published ones."""

from __future__ import annotations

import json

import pytest

from foretrain.cli.main import main
from foretrain.errors import FileFormatError
from foretrain.hardware import find_device, parse_cluster
from foretrain.validation.network.adapters import read_network_rows
from foretrain.validation.network.compare import (
    by_fabric,
    by_system,
    group_ranks,
    validate_network,
)
from foretrain.validation.network.interconnect import is_unnamed, network_of

HEAD = "id,cluster,gpus,collective,bytes,dtype,time_us,stack\n"
OWN = HEAD + (
    "a,1x8 h100-sxm,8,all_reduce,268435456,fp16,1091,\n"
    'b,"2x8 h100-sxm, 8x400G ib",16,allreduce,26214400,fp16,262,\n'
    'c,"2x8 h100-sxm, 8x400G ib",16,alltoall,1048576,fp16,,\n'
    'd,"2x8 h100-sxm, 8x400G ib",5,all_reduce,1048576,fp16,10,\n'
    "e,1x8 warp-drive,8,all_reduce,1048576,fp16,10,\n"
    "f,1x8 h100-sxm,8,all_shuffle,1048576,fp16,10,\n"
)


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(OWN)
    return path


def test_collectives_may_be_named_like_the_programs_of_nccl_tests(tmp_path):
    path = tmp_path / "perf.csv"
    path.write_text(HEAD + "a,1x8 h100-sxm,8,reduce_scatter_perf,268435456,fp16,1091,\n")
    assert read_network_rows(path)[0].collective == "reduce_scatter"


def test_every_row_is_predicted_or_says_why(own):
    found = {item.row.id: item for item in validate_network(own)}
    assert found["a"].ratio == pytest.approx(1.0, abs=0.1)
    assert found["b"].ratio == pytest.approx(1.0, abs=0.15)
    assert found["c"].value_s
    assert found["c"].ratio is None
    assert "do not spread evenly" in found["d"].reason
    assert "warp-drive" in found["e"].reason
    assert "unknown collective" in found["f"].reason


def test_statistics_are_medians_of_medians(own):
    systems = by_system(validate_network(own))
    assert {key[0] for key in systems} == {"nvlink", "ib"}
    fabrics = by_fabric(systems)
    pooled = fabrics["NVLink, xGMI, InfiniBand", ">= 32 MB"]
    assert pooled.systems == 1
    assert pooled.median == systems["nvlink", "8 h100-sxm", ">= 32 MB"].median


def test_the_command_prints_tables_and_json(own, capsys):
    assert main(["validate", "network", str(own)]) == 0
    text = capsys.readouterr().out
    assert "6 rows: 3 predicted, 3 unsupported, 2 compared" in text
    assert main(["validate", "network", str(own), "--json", "-"]) == 0
    form = json.loads(capsys.readouterr().out)
    assert form["schema"] == 1
    assert [row["status"] for row in form["rows"]] == ["ok"] * 3 + ["unsupported"] * 3
    low, value, high = (form["rows"][0]["time_us"][key] for key in ("low", "value", "high"))
    assert low < value < high


def test_a_published_layout(tmp_path):
    path = tmp_path / "published.csv"
    path.write_text(
        "source,gpu,nodes,gpus,interconnect,collective,dtype,bytes,time_us\n"
        "x,H100 80GB HBM3,2,16,NVSwitch + InfiniBand NDR 8x400Gb/s,all_reduce,float,1048576,81\n"
        "x,NVIDIA H100 80GB HBM3,4,4,NVSwitch + InfiniBand (x),all_gather,float,1048576,81\n"
    )
    whole, strided = read_network_rows(path)
    assert whole.cluster == "2x8 h100-sxm, 8x400G ib"
    assert strided.cluster.startswith("4x8 h100-sxm")  # one rank on each of the usual nodes
    assert strided.assumed


def test_an_unknown_table_lists_the_known_ones(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("size,speed\n1,2\n")
    with pytest.raises(FileFormatError, match="nccl-tests collection"):
        read_network_rows(path)
    path.write_text(HEAD + "a,1x8 h100-sxm,8,all_reduce,1,fp16,1,\n" * 2)
    with pytest.raises(FileFormatError, match="given twice"):
        read_network_rows(path)


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("NVLink4 4xGH200/node + HPE Slingshot-11 200Gb/s x4", ", 4x200G slingshot"),
        ("NVSwitch + EFAv2 3200Gb/s/node (p5.48xlarge)", ", 32x100G efa"),
        ("NVSwitch + RoCE 8x400Gb/s (GCP)", ", 8x400G roce"),
        ("NVSwitch + OCI RoCE 16x100Gb/s", ", 16x100G roce"),
        ("NVLink3 (4xA100, no switch) + HPE Slingshot-11 2x200Gb/s", ", 2x200G slingshot"),
    ],
)
def test_free_texts_of_interconnects(text, network):
    assert network_of(text, find_device("h100-sxm"), 2)[0] == network


@pytest.mark.parametrize(
    ("source", "nodes", "network"),
    [
        ("argonne-lcf/alcf-nccl-tests:polaris/all_reduce_output.dat.1", 2, "slingshot-tcp"),
        ("argonne-lcf/alcf-nccl-tests:polaris/all_reduce_output.dat.3", 2, "slingshot"),
        ("", 2, "slingshot"),
        ("argonne-lcf/alcf-nccl-tests:polaris/all_reduce_output.dat.1", 1, ""),
    ],
)
def test_runs_without_the_plugin_of_their_network_go_through_sockets(source, nodes, network):
    text = "NVLink3 (4xA100, no switch) + HPE Slingshot-11 2x200Gb/s"
    found, assumed = network_of(text, find_device("a100-sxm-40gb"), nodes, source)
    assert found == (f", 2x200G {network}" if network else "")
    assert bool(assumed) == (network == "slingshot-tcp")


def test_a_run_on_an_earlier_network_is_not_taken_for_one_on_todays():
    assert is_unnamed("argonne-lcf/alcf-nccl-tests:polaris/all_reduce.2023-10-13.dat")
    assert not is_unnamed("argonne-lcf/alcf-nccl-tests:polaris/all_reduce_output.dat.1")


def test_ranks_are_the_first_devices_of_each_node():
    cluster = parse_cluster("2x8 h100-sxm, 8x400G ib")
    assert group_ranks(cluster, 4) == (0, 1, 8, 9)
    assert group_ranks(cluster, 1) == (0,)
    assert group_ranks(cluster, 5) == ()
