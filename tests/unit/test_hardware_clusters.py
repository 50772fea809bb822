"""The cluster grammar, layouts of groups, the catalog of clusters, fabrics and prices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foretrain.catalog import names, read_bytes, read_toml
from foretrain.errors import CatalogError, FileFormatError, InputError
from foretrain.hardware import (
    find_device,
    find_price,
    format_cluster,
    list_clusters,
    list_fabrics,
    parse_cluster,
    resolve_cluster,
)
from foretrain.hardware.device import FABRICS
from foretrain.hardware.fabrics import fabric_name

EXAMPLES = [
    "8x8 h100-sxm, 8x400G ib",
    "64x1 v100-sxm-16gb, 1x1G ethernet [latency 50ms]",
    "2x36 gb200 [nvl 72]",
    "1x2 rtx-3090-ti [nvlink pairs]",
]


def test_the_main_example() -> None:
    cluster = parse_cluster("8x8 h100-sxm, 8x400G ib")
    assert cluster.world_size == 64
    assert cluster.device is find_device("h100-sxm")
    assert (cluster.nics_per_node, cluster.nic_bandwidth, cluster.fabric) == (8, 50e9, "ib")
    assert (cluster.scaleup, cluster.nvl_domain) == ("nvswitch", 8)
    assert cluster.scaleup_bandwidth == 450e9
    assert cluster.node_bandwidth == 400e9
    assert cluster.notes == ()
    assert cluster.text == "8x8 h100-sxm, 8x400G ib"


def test_options() -> None:
    slow = parse_cluster("64x1 v100-sxm-16gb, 1x1G ethernet [latency 50ms]")
    assert slow.extra_latency_s == 0.05
    assert slow.nic_bandwidth == 0.125e9
    rack = parse_cluster("2x36 gb200 [nvl 72]")
    assert (rack.nvl_domain, rack.island_size) == (72, 72)
    pair = parse_cluster("1x2 rtx-3090-ti [nvlink pairs]")
    assert (pair.scaleup, pair.island_size) == ("pairs", 2)
    assert pair.scaleup_bandwidth == pytest.approx(56.25e9)
    many = parse_cluster(
        "2x8 a100-sxm-80gb, 1x100G roce [no p2p, oversubscribed 2:1] [latency 5us]"
    )
    assert (many.p2p, many.oversubscription, many.extra_latency_s) == (False, 2.0, 5e-6)
    cut = parse_cluster("2x8 h100-sxm, 8x400G ib [scaleup 200 GB/s]")
    assert cut.scaleup_bandwidth == 200e9
    assert parse_cluster("1x8 h100-sxm [no nvlink]").island_size == 1


@pytest.mark.parametrize(
    ("loose", "strict"),
    [
        ("  8X8   H100-SXM ,8x400g   InfiniBand ", "8x8 h100-sxm, 8x400G ib"),
        ("8 x 8 H100, 8 x 400 Gb/s ib", "8x8 h100-sxm, 8x400G ib"),
        ("4x8 A100-80GB, 4x100Gbps RoCEv2", "4x8 a100-sxm-80gb, 4x100G roce"),
        ("2x4 RTX 4090, 1x2.5G tcp", "2x4 rtx-4090, 1x2.5G ethernet"),
        ("8 h100-sxm", "1x8 h100-sxm"),
        ("8x h100", "1x8 h100-sxm"),
        ("1x2 4090", "1x2 rtx-4090"),
        ("1x8 h100-sxm [NVLink Mesh]", "1x8 h100-sxm [nvlink mesh]"),
    ],
)
def test_white_space_case_and_words_are_tolerated(loose: str, strict: str) -> None:
    assert parse_cluster(loose).text == strict


@pytest.mark.parametrize("text", EXAMPLES)
def test_text_reads_back_as_the_same_hardware(text: str) -> None:
    cluster = parse_cluster(text)
    again = parse_cluster(format_cluster(cluster))
    assert again.text == cluster.text
    assert (again.device, again.nvl_domain) == (cluster.device, cluster.nvl_domain)


def test_what_is_not_stated_is_the_usual_node_and_is_noted() -> None:
    cluster = parse_cluster("4x8 h100-sxm")
    assert (cluster.nics_per_node, cluster.nic_bandwidth, cluster.fabric) == (8, 50e9, "ib")
    assert cluster.notes == ("NICs not stated: the usual node of h100-sxm has 8 x 400 Gb/s ib",)
    half = parse_cluster("4x4 h100-sxm")
    assert half.nics_per_node == 4  # one NIC per GPU, not eight in half a node
    assert parse_cluster("1x8 h100-sxm").fabric == "none"
    bridge = parse_cluster("1x8 a100-pcie-80gb")
    assert bridge.scaleup == "none"
    assert "[nvlink pairs]" in bridge.notes[0]


def test_an_option_without_effect_is_noted() -> None:
    assert "no effect" in parse_cluster("1x8 h100-sxm [latency 1ms]").notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read nodes"),
        ("8x8", "cannot read nodes"),
        ("h100-sxm", "cannot read nodes"),
        ("8x4090", "cannot read nodes"),
        ("-1x8 h100-sxm", "cannot read nodes"),
        ("0x8 h100-sxm", "start at 1"),
        ("16 h100-sxm", "write NODESx8 h100-sxm"),
        ("8x8 h100-sxm, 8x400G", "fabric is missing"),
        ("8x8 h100-sxm, 8x400G ibb", "unknown fabric .*did you mean 'ib'"),
        ("8x8 h100-sxm, 400G ib", "write e.g. 1x400G ib"),
        ("8x8 h100-sxm, 8x50GB/s ib", "50 GB/s is written 400G"),
        ("8x8 h100-sxm, 8x400M ib", "unknown unit"),
        ("8x8 h100-sxm, 8x0G ib", "above 0"),
        ("8x8 h100-sxm, eight ib", "cannot read the network"),
        ("8x8 h100-sxm, 8x400G ib, more", "too many commas"),
        ("8x8 h100-sxm [latency 50]", "unknown option"),
        ("8x8 h100-sxm [warp 9]", "unknown option .*latency 50ms"),
        ("8x8 h100-sxm []", "unknown option"),
        ("8x8 h100-sxm [nvl 72", "not closed"),
        ("8x8 h100-sxm [nvl 12]", "whole nodes"),
        ("8x8 h100-sxm [nvl 0]", "above 0"),
        ("8x8 h100-sxm [scaleup 200 Gb/s]", "unknown option"),
        ("8x8 h100-sxm [oversubscribed 0.5:1]", "starts at 1:1"),
        ("8x8 h100-sxm [p2p] [no p2p]", "given twice"),
        ("2x8 rtx-4090 [nvlink pairs]", "no scale-up link"),
        ("2x8 rtx-4090 [nvl 8]", "without a scale-up network"),
        ("1x4 rtx-3090 [nvlink pairs] [nvl 4]", "join 2 devices"),
    ],
)
def test_malformed_text_says_what_and_how(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_cluster(text)
    assert caught.value.exit_code == 1
    assert repr(text) in str(caught.value)


def test_the_grammar_and_an_example_are_shown() -> None:
    with pytest.raises(InputError, match=r"NODESxDEVICES DEVICE.*8x8 h100-sxm, 8x400G ib"):
        parse_cluster("lots of gpus")


def test_all_problems_of_a_text_come_together() -> None:
    with pytest.raises(InputError) as caught:
        parse_cluster("0x8 h100-sxm, 8x400M token-ring [warp 9]")
    assert len(caught.value.problems) == 4


def test_device_names_keep_their_own_error() -> None:
    with pytest.raises(CatalogError, match="ambiguous"):
        parse_cluster("2x8 a100")
    with pytest.raises(CatalogError, match="unknown device"):
        parse_cluster("2x8 zz9")


def test_layout_inside_and_across_nodes() -> None:
    cluster = parse_cluster("8x8 h100-sxm, 8x400G ib")
    node = cluster.layout(range(8))
    assert node.inside_scaleup_domain
    assert (node.num_nodes, node.max_per_node, node.islands) == (1, 8, (8,))
    rail = cluster.layout(range(3, 64, 8))
    assert not rail.inside_scaleup_domain
    assert (rail.num_ranks, rail.num_nodes, rail.max_per_node) == (8, 8, 1)
    uneven = cluster.layout((0, 1, 2, 8))
    assert (uneven.max_per_node, uneven.min_per_node, uneven.islands) == (3, 1, (3, 1))
    assert cluster.node_of(63) == 7


def test_layout_of_domains_wider_and_narrower_than_a_node() -> None:
    rack = parse_cluster("36x4 gb200, 4x400G ib")  # two racks of 18 trays
    assert rack.island_size == 72
    assert rack.layout(range(72)).inside_scaleup_domain
    assert rack.layout(range(72)).num_nodes == 18
    assert rack.layout(range(60, 80)).islands == (12, 8)
    pairs = parse_cluster("2x4 rtx-3090, 1x10G ethernet [nvlink pairs]")
    assert pairs.layout((0, 1)).inside_scaleup_domain
    assert not pairs.layout((1, 2)).inside_scaleup_domain
    assert pairs.layout(range(8)).islands == (2, 2, 2, 2)
    odd = parse_cluster("2x3 rtx-3090, 1x10G ethernet [nvlink pairs]")
    assert odd.layout(range(6)).islands == (2, 1, 2, 1)  # no pair crosses a node
    hives = parse_cluster("1x8 mi100")
    assert hives.layout(range(8)).islands == (4, 4)
    plain = parse_cluster("1x2 rtx-4090")
    assert plain.layout((0, 1)).islands == (1, 1)
    assert plain.layout((0, 1)).inside_node
    assert plain.layout((1,)).inside_scaleup_domain


def test_layout_refuses_ranks_that_do_not_exist() -> None:
    cluster = parse_cluster("1x8 h100-sxm")
    for ranks in ((), (8,), (-1, 0)):
        with pytest.raises(InputError, match="ranks 0 to 7"):
            cluster.layout(ranks)


def test_the_usual_domain_is_whole_nodes() -> None:
    assert parse_cluster("16x8 gb200").nvl_domain == 72
    assert parse_cluster("16x5 gb200").nvl_domain == 70
    assert parse_cluster("1x80 gb200").nvl_domain == 80
    assert parse_cluster("64x1 v100-sxm-16gb").island_size == 1


CLUSTERS = list_clusters()


@pytest.mark.parametrize("entry", CLUSTERS, ids=lambda entry: entry.name)
def test_every_named_cluster(entry: Any) -> None:
    assert entry.description
    assert entry.source
    assert resolve_cluster(entry.name) == entry.cluster
    for alias in entry.aliases:
        assert resolve_cluster(alias.upper()).name == entry.name
    assert parse_cluster(entry.cluster.text).text == entry.cluster.text
    assert not entry.cluster.notes or "bridge" in entry.cluster.notes[0]


def test_cluster_names_are_unique() -> None:
    words = [word for entry in CLUSTERS for word in (entry.name, *entry.aliases)]
    assert len(words) == len(set(words))
    assert [entry.name for entry in CLUSTERS] == list(names("clusters"))


def test_multiples_of_a_named_cluster() -> None:
    cluster = resolve_cluster("16x dgx-h100")
    assert (cluster.nodes, cluster.name) == (16, "dgx-h100")
    assert cluster.text == "16x8 h100-sxm, 8x400G ib"
    assert resolve_cluster("16 DGX_H100") == cluster
    assert resolve_cluster("2x gb200-nvl72").world_size == 144
    boxes = resolve_cluster("4x box-2x-rtx-3090")
    assert (boxes.nics_per_node, boxes.scaleup) == (1, "pairs")
    assert boxes.notes[-1].startswith("NICs not stated")
    with pytest.raises(InputError, match="start at 1"):
        resolve_cluster("0x dgx-h100")


def test_text_that_is_neither_name_nor_grammar() -> None:
    with pytest.raises(CatalogError, match="did you mean 'dgx-h100'"):
        resolve_cluster("dgx-h10")
    with pytest.raises(CatalogError, match="say how many: 1x8 h100-sxm"):
        resolve_cluster("H100")
    with pytest.raises(InputError, match="cannot read nodes"):
        resolve_cluster(" ")


def test_mappings_and_files(tmp_path: Path) -> None:
    stated = {
        "nodes": 2,
        "devices_per_node": 8,
        "device": "H100",
        "nics_per_node": 4,
        "nic_gbit_s": 200,
        "fabric": "roce",
        "latency_us": 3,
        "oversubscription": 2,
    }
    cluster = resolve_cluster(stated)
    assert cluster.text == "2x8 h100-sxm, 4x200G roce [latency 3us] [oversubscribed 2:1]"
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\ncluster = "2x8 h100-sxm, 4x200G roce"\n')
    assert resolve_cluster(str(path)) == resolve_cluster(path)
    assert resolve_cluster(path).name == "mine"


def test_devices_of_a_user(tmp_path: Path) -> None:
    text = read_bytes("devices/h100-sxm.toml").decode().replace("tdp_w = 700", "tdp_w = 600")
    (tmp_path / "dev.toml").write_text(text.replace('name = "h100-sxm"', 'name = "mine"'))
    cluster = parse_cluster(f"2x8 {tmp_path / 'dev.toml'}, 8x400G ib")
    assert (cluster.device.name, cluster.device.tdp_w) == ("mine", 600)
    assert parse_cluster(cluster.text) == cluster  # the text keeps the file
    (tmp_path / "c.toml").write_text('device = "dev.toml"\nnodes = 1\ndevices_per_node = 8\n')
    assert resolve_cluster(tmp_path / "c.toml").device.name == "mine"
    inline = dict(read_toml("devices", "h100-sxm")) | {"name": "inline"}
    found = resolve_cluster({"device": inline, "nodes": 1, "devices_per_node": 8})
    assert found.device.name == "inline"


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "'nodes': missing"),
        ({"nodes": 0, "devices_per_node": 8, "device": "h100"}, "'nodes': not a valid count"),
        ({"nodes": 1, "devices_per_node": 8, "devise": "h100"}, "did you mean 'device'"),
        ({"cluster": "8x8 h100", "nodez": 1}, "unknown key"),
        ({"cluster": "8x8"}, "cannot read nodes"),
        ({"cluster": 8}, "not a text"),
        ({"nodes": 2, "devices_per_node": 8, "device": "h100", "fabric": "ib"}, "nic_gbit_s"),
        ({"nodes": 2, "devices_per_node": 8, "device": "a100"}, "ambiguous"),
        ({"nodes": 2, "devices_per_node": 8, "device": 5}, "not a text"),
        ({"nodes": 2, "devices_per_node": 8, "device": "h100", "nvl_domain": 12}, "whole nodes"),
        ({"cluster": "1x8 h100-sxm", "source": "me"}, "kind of source"),
    ],
)
def test_bad_mappings(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(FileFormatError, match=message):
        resolve_cluster(mapping)


def test_bad_files(tmp_path: Path) -> None:
    for content, message in ((b"nodes = ", "not TOML"), (b"\xff", "not TOML")):
        path = tmp_path / "bad.toml"
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match=message):
            resolve_cluster(path)
    with pytest.raises(FileFormatError, match="cannot be read"):
        resolve_cluster(str(tmp_path / "absent.toml"))
    with pytest.raises(FileFormatError, match="cannot be read"):
        parse_cluster(f"1x8 {tmp_path / 'absent.toml'}")


def test_fabrics() -> None:
    assert {fabric.name for fabric in list_fabrics()} == set(FABRICS)
    words = [word for fabric in list_fabrics() for word in (fabric.name, *fabric.aliases)]
    assert len(words) == len(set(words))
    assert fabric_name("Infini Band".replace(" ", "")) == "ib"
    assert fabric_name("Omni Path") == "opa"


def test_prices() -> None:
    priced = [name for name in names("devices") if find_price(name)]
    assert set(priced) == set(read_toml("", "prices"))  # every price is one of a device
    price = find_price("a100-sxm-80gb")
    assert price is not None
    assert 0.1 < price.usd_per_hour < 20
    assert not price.verified  # the table calls it a list price without a checked source
    assert price.source
    assert find_price("gb300") is None


def test_unknown_catalog_files() -> None:
    with pytest.raises(CatalogError, match="did you mean 'h100-sxm'"):
        read_toml("devices", "h100-sx")
    with pytest.raises(CatalogError, match="no such file"):
        read_bytes("devices/none.toml")
    assert names("no-such-folder") == ()
