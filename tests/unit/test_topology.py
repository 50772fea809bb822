"""Link topology of a node: rings over NVLink, siblings, routes, and `nvidia-smi topo -m`."""

from __future__ import annotations

import pytest

from foretrain.cost.network.collectives import group_cost
from foretrain.errors import FileFormatError, InputError
from foretrain.hardware import parse_cluster, resolve_cluster
from foretrain.hardware.topology import parse_topology, tile, usual_topology
from foretrain.run.load import load_run

DGX1 = usual_topology("v100-sxm-16gb", 8)
MI250X = usual_topology("mi250x", 8)
SOCKETS = """\
\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tPHB\tSYS\tSYS\t0-11,24-35\t0
GPU1\tPHB\t X \tSYS\tSYS\t0-11,24-35\t0
GPU2\tSYS\tSYS\t X \tPHB\t12-23,36-47\t1
GPU3\tSYS\tSYS\tPHB\t X \t12-23,36-47\t1

Legend:

  X    = Self
"""


@pytest.mark.parametrize(
    ("members", "rings"),
    [
        ((0, 1), 4),
        ((0, 6), 2),
        ((0, 2), 1),
        ((0, 4), 0),
        ((0, 1, 2, 3), 2),
        ((1, 3, 5, 7), 2),
        (range(8), 4),
    ],
)
def test_rings_of_four_packages_of_mi250x(members, rings):
    assert MI250X is not None
    assert MI250X.rings(members) == rings
    # even devices have two partners outside of their package over three links, odd ones over two
    outside = [sum(MI250X.nvlinks(a, b) for b in range(8) if b not in (a, a ^ 1)) for a in range(8)]
    assert outside == [3, 2] * 4


@pytest.mark.parametrize(
    ("members", "rings"),
    [
        ((0, 1), 1),
        ((0, 3), 2),
        ((0, 5), 0),
        ((0, 1, 2, 3), 4),
        ((0, 2, 4, 6), 2),
        (range(8), 6),
        ((0, 1, 2, 5), 0),
    ],
)
def test_rings_of_the_hybrid_cube_mesh(members, rings):
    assert DGX1 is not None
    assert DGX1.rings(members) == rings


def test_siblings_cover_a_node_once():
    assert tile((0, 2), 4) == ((0, 2), (1, 3))
    assert tile((0, 1, 2, 3), 8) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert tile((0, 2, 4, 6), 8) == ((0, 2, 4, 6), (1, 3, 5, 7))


def test_groups_that_cross_sockets_share_the_link_and_others_do_not():
    found = parse_topology(SOCKETS, where="sockets.txt")
    assert found.sharers(((0, 1), (2, 3))) == (1, 1)
    assert found.sharers(((0, 2), (1, 3))) == (2, 2)
    assert [str(link) for link in found.route(0, 2)][-1] == "socket"
    assert found.bottleneck(0, 2) == "SYS"


def test_a_file_of_the_user_decides_prices_and_reads_back(tmp_path):
    path = tmp_path / "topo.txt"
    path.write_text(SOCKETS)
    cluster = parse_cluster(f"1x4 rtx-a6000 [topology {path}]")
    assert parse_cluster(cluster.text) == cluster
    assert cluster.scaleup == "none"

    def seconds(ranks: tuple[int, ...]) -> float:
        return group_cost("all_reduce", ranks, cluster, sharers=2).seconds(256e6)

    near, far = seconds((0, 1)), seconds((0, 2))
    assert far > 1.8 * near
    text = group_cost("all_reduce", (0, 2), cluster, sharers=2).text
    assert "the link between sockets, 2 groups share it" in text

    (tmp_path / "box.toml").write_text(
        'device = "rtx-a6000"\nnodes = 1\ndevices_per_node = 4\ntopology = "topo.txt"\n'
    )
    again = resolve_cluster(tmp_path / "box.toml")
    assert again.topology is not None
    assert again.topology.paths == cluster.topology.paths


def test_the_slowest_sibling_counts_and_one_group_alone_does_not_wait():
    cluster = parse_cluster("1x8 v100-sxm-16gb")
    size = 256e6
    alone = group_cost("all_reduce", (0, 4), cluster).seconds(size)
    all_four = group_cost("all_reduce", (0, 4), cluster, sharers=4)
    assert all_four.seconds(size) == pytest.approx(2 * alone, rel=0.1)  # {2, 6} has one link
    assert "devices 2-6" in all_four.text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("nothing here", "no matrix"),
        (SOCKETS.replace("GPU3\tSYS", "GPU3\tfoo"), "foo"),
        (SOCKETS.replace("GPU1\tPHB", "GPU1\tPIX"), "not symmetric"),
        ("\n".join(SOCKETS.splitlines()[:3]), "lines are missing"),
    ],
)
def test_a_broken_matrix_says_what_and_where(text, part):
    with pytest.raises(FileFormatError, match=part):
        parse_topology(text, where="topo.txt")


def test_a_topology_of_another_node_is_refused(tmp_path):
    path = tmp_path / "topo.txt"
    path.write_text(SOCKETS)
    with pytest.raises(InputError, match="another node"):
        parse_cluster(f"1x8 rtx-a6000 [topology {path}]")


def test_a_topology_lies_beside_the_run_file(tmp_path, monkeypatch):
    (tmp_path / "topo.txt").write_text("      GPU0 GPU1\nGPU0  X  NV4\nGPU1  NV4  X\n")
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        "model: gpt2-124m\ntraining: {sequence: 128, microbatch: 1}\nplan: {preset: ddp}\n"
        'cluster: "1x2 a40 [topology topo.txt]"\n'
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_run(run_file).cluster.topology is not None


def test_keys_beside_the_text_of_a_cluster_are_refused():
    with pytest.raises(InputError, match="no effect beside `cluster`"):
        resolve_cluster({"cluster": "1x2 a40", "topology": "topo.txt"})
