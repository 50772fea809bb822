"""Collectives against measured values and against the bounds of the wires."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost_machines import cluster, stack
from foretrain.cost.calibration import load
from foretrain.cost.model import build_cost_model
from foretrain.cost.network.curve import bus_factor, curve_from_row, interpolate
from foretrain.hardware import parse_cluster
from foretrain.hardware.topology import parse_topology
from foretrain.program import CommEvent

MIB = 2**20


def comm(num_bytes, ranks, collective="all_reduce", *, sharers=1, count=1) -> CommEvent:
    if isinstance(ranks, int):
        ranks = range(ranks)
    return CommEvent(
        collective=collective,
        bytes=float(num_bytes),
        dtype="bf16",
        ranks=tuple(ranks),
        sharers=sharers,
        count=count,
    )


def us(where, *events):
    return build_cost_model(where, stack()).price(events).value_s * 1e6


def busbw(where, event):
    seconds = build_cost_model(where, stack()).price([event]).value_s[0]
    return event.bytes * bus_factor(event.collective, len(event.ranks)) / seconds / 1e9


def test_one_h100_node_worked_numbers():
    times = us(cluster("h100-sxm"), *(comm(s * MIB, 8) for s in (1, 25, 256)))
    assert times == pytest.approx((27.2, 167, 1091), rel=0.10)


def test_two_h100_nodes_on_infiniband():
    times = us(cluster("h100-sxm", 2), *(comm(s * MIB, 16) for s in (1, 25, 256)))
    assert times == pytest.approx((81, 262, 1321), rel=0.08)


@pytest.mark.parametrize(
    ("collective", "all_ranks", "one_per_node"),
    [
        ("all_reduce", 345, 48.9),
        ("all_gather", 324, 48.2),
        ("reduce_scatter", 323, 48.8),
        ("all_to_all", 50.5, 44.8),
    ],
)
def test_ten_h100_nodes_reach_the_measured_bandwidth(collective, all_ranks, one_per_node):
    where = cluster("h100-sxm", 10)
    event = comm(16384 * MIB, 80, collective)
    assert busbw(where, event) == pytest.approx(all_ranks, rel=0.05)
    strided = comm(16384 * MIB, range(0, 80, 8), collective)
    assert busbw(where, strided) == pytest.approx(one_per_node, rel=0.05)


def test_a_group_of_one_is_free():
    prices = build_cost_model(cluster("h100-sxm"), stack()).price([comm(MIB, 1)])
    assert prices.value_s[0] == prices.host_s[0] == prices.kernels[0] == 0.0
    assert prices.link == ("",)


def test_count_repeats_the_collective():
    one, three = us(cluster("h100-sxm"), comm(MIB, 8), comm(MIB, 8, count=3))
    assert three == pytest.approx(3 * one)


def test_eight_strided_groups_have_a_nic_each_and_fewer_nics_are_shared():
    event = comm(1024 * MIB, range(0, 32, 8))
    shared = comm(1024 * MIB, range(0, 32, 8), sharers=8)
    rails = us(cluster("h100-sxm", 4), event, shared)
    assert rails[0] == pytest.approx(rails[1])
    scarce = us(cluster("h100-sxm", 4, nics_per_node=2), event, shared)
    assert scarce[1] / scarce[0] == pytest.approx(4.0, rel=0.05)


def test_links_are_named():
    model = build_cost_model(cluster("h100-sxm", 2), stack())
    prices = model.price([comm(MIB, 8), comm(MIB, 16), comm(MIB, (0, 8), "send_recv")])
    assert prices.link == ("scaleup", "nic", "nic")
    assert build_cost_model(cluster("rtx-pro-6000"), stack()).price([comm(MIB, 8)]).link == (
        "pcie",
    )


def test_bridged_pairs_are_fast_and_everything_else_goes_over_pcie():
    a40 = cluster("a40", devices=4)
    pair = busbw(a40, comm(1024 * MIB, (0, 1)))
    crossing = busbw(a40, comm(1024 * MIB, (1, 2)))
    assert pair == pytest.approx(47.5, rel=0.05)
    assert crossing < 0.6 * pair


@pytest.mark.parametrize(
    ("words", "low", "high"),
    [
        ("rtx-3090-ti [nvlink pairs]", 45, 49),  # narrow: NCCL's own figure of a link
        ("rtx-2080-ti [nvlink pairs]", 38, 52),
        ("h100-nvl", 190, 215),  # wide: what the kernels of two ranks copy
        ("a100-pcie-80gb [nvlink pairs]", 190, 215),
    ],
)
def test_a_wide_bridge_stops_at_what_the_kernels_copy(words, low, high):
    assert low < busbw(parse_cluster(f"1x2 {words}"), comm(4096 * MIB, (0, 1))) < high


def test_two_channels_over_pcie_do_not_fill_a_fast_slot_unless_the_matrix_says_one_socket():
    fast, slow = (parse_cluster(f"1x8 {device} [p2p]") for device in ("rtx-5090", "rtx-4090"))
    assert busbw(fast, comm(1024 * MIB, 8)) < 1.3 * busbw(slow, comm(1024 * MIB, 8))
    assert busbw(fast, comm(1024 * MIB, 2)) > 1.9 * busbw(slow, comm(1024 * MIB, 2))
    heads = [f"GPU{i}" for i in range(8)]
    rows = [[heads[i], *("X" if i == j else "PHB" for j in range(8))] for i in range(8)]
    matrix = "\n".join("\t".join(row) for row in [["", *heads], *rows])
    near = replace(fast, topology=parse_topology(matrix, where="matrix"))
    assert busbw(near, comm(1024 * MIB, 8)) > 1.5 * busbw(fast, comm(1024 * MIB, 8))


@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("device", ["a40", "rtx-4090", "rtx-5090", "t4"])
def test_host_memory_and_not_the_slot_limits_cards_without_peer_access(device, devices):
    words = f"1x{devices} {device}"
    bounced, direct = (
        replace(parse_cluster(words), scaleup="none", nvl_domain=1, p2p=p2p, topology=None)
        for p2p in (False, True)
    )
    assert busbw(bounced, comm(1024 * MIB, devices)) == pytest.approx(3.9, rel=0.1)
    prices = [
        build_cost_model(where, stack()).price([comm(1024 * MIB, devices)])
        for where in (bounced, direct)
    ]
    factors = [price.high_s[0] / price.value_s[0] for price in prices]
    assert factors[0] > 2.0 > factors[1]  # hosts differ, slots do not
    for size in (1024, 64 * 1024, MIB, 1024 * MIB):
        event = comm(size, devices)
        assert us(direct, event)[0] <= us(bounced, event)[0]


@pytest.mark.parametrize(
    ("gbit", "low", "high"), [(1, 0.93, 0.95), (10, 0.93, 0.95), (100, 0.45, 0.75)]
)
def test_a_slow_ethernet_carries_all_but_the_headers(gbit, low, high):
    nodes = parse_cluster(f"4x1 v100-sxm-16gb, 1x{gbit}G ethernet")
    rate = busbw(nodes, comm(4096 * MIB, (0, 1, 2, 3)))
    assert low < rate / (gbit / 8) <= high


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather", "send_recv"])
def test_two_cards_are_slower_over_pcie_than_over_a_bridge(collective):
    bridge, slots = (parse_cluster(f"1x2 rtx-3090-ti{kind}") for kind in (" [nvlink pairs]", ""))
    for size in (1024, 1024**2, 1024**3):
        event = comm(size, (0, 1), collective)
        assert us(bridge, event)[0] < us(slots, event)[0]


def test_one_pair_of_ranks_drives_half_of_a_fast_nic():
    model = build_cost_model(cluster("h100-sxm", 2), stack())
    prices = model.price([comm(256 * MIB, (0, 8), "send_recv")])
    assert 256 * MIB / prices.value_s[0] / 1e9 == pytest.approx(24.9, rel=0.05)


def pair_gb_s(gbit):
    nodes = parse_cluster(f"2x1 v100-sxm-16gb, 1x{gbit}G ethernet")
    return 256 * MIB / us(nodes, comm(256 * MIB, (0, 1), "send_recv"))[0] / 1e3


def test_over_sockets_a_pair_stays_far_below_a_ring():
    # hosts 0.21 GB/s and wire 0.95 x 1.25 GB/s: (0.21**-3 + 1.19**-3)**(-1/3)
    assert pair_gb_s(10) == pytest.approx(0.2096, rel=0.01)
    ring = busbw(parse_cluster("4x1 v100-sxm-16gb, 1x10G ethernet"), comm(256 * MIB, (0, 1, 2, 3)))
    assert pair_gb_s(10) < 0.3 * ring
    # a wire of 1 Gb/s decides: 0.119 GB/s
    assert 0.10 < pair_gb_s(1) < 0.119


def test_a_pair_of_later_hosts_drives_two_thirds_of_a_fast_ethernet():
    nodes = parse_cluster("2x8 a100-sxm-80gb, 1x100G ethernet")
    time_us = us(nodes, comm(256 * MIB, (0, 8), "send_recv"))[0]
    assert 256 * MIB / time_us / 1e3 == pytest.approx(7.9, rel=0.02)  # vidur_network, 2x8 A100


@pytest.mark.parametrize(("slow", "fast"), [(1, 2), (2, 5), (5, 10), (10, 25), (25, 100)])
def test_a_pair_over_sockets_is_never_slower_on_a_faster_wire(slow, fast):
    assert pair_gb_s(slow) < pair_gb_s(fast)


def test_latency_is_added_per_crossing():
    near, far = cluster("h100-sxm", 4), cluster("h100-sxm", 4, extra_latency_s=0.05)
    for collective, hops in (("all_reduce", 4), ("all_gather", 3), ("send_recv", 1)):
        ranks = (0, 8) if collective == "send_recv" else 32
        event = comm(1024, ranks, collective)
        assert (us(far, event) - us(near, event))[0] == pytest.approx(hops * 5e4, rel=0.01)


def test_a_broadcast_passes_every_rank():
    """NCCL broadcasts around a ring: twice the ranks, twice the time to fill it."""
    times = [
        us(cluster("a100-sxm-80gb", n), comm(MIB, 8 * n, "broadcast"))[0] for n in (16, 32, 64)
    ]
    assert times[2] - times[1] > 1.5 * (times[1] - times[0])
    where = cluster("a100-sxm-80gb", 64)
    gather = us(where, comm(MIB, 512, "all_gather"))[0]
    assert times[2] == pytest.approx(gather, rel=0.01)


def test_rings_over_roce_take_longer_on_a100_nodes():
    old, new = (parse_cluster(f"16x8 {gpu}, 8x200G roce") for gpu in ("a100-sxm-80gb", "h100-sxm"))
    small = [us(where, comm(MIB, 128, "all_gather"))[0] for where in (old, new)]
    assert small[0] > 2.0 * small[1]


def test_a_wide_domain_counts_as_one_node():
    rack = cluster("gb200", 2, devices=4, nvl_domain=8, nics_per_node=4)
    assert build_cost_model(rack, stack()).price([comm(MIB, 8)]).link == ("scaleup",)
    assert busbw(rack, comm(32768 * MIB, 8)) == pytest.approx(847, rel=0.1)


def test_oversubscription_slows_the_fabric_only():
    free, tight = cluster("h100-sxm", 4), cluster("h100-sxm", 4, oversubscription=2.0)
    assert us(tight, comm(1024 * MIB, 32))[0] > 1.7 * us(free, comm(1024 * MIB, 32))[0]
    assert us(tight, comm(MIB, 8)) == pytest.approx(us(free, comm(MIB, 8)))


def test_overlap_by_link():
    model = build_cost_model(cluster("h100-sxm", 4), stack())
    assert model.overlap("pp") == (0.0, 0.0)
    assert model.overlap("tp") == model.overlap("dp")
    assert 0.0 < model.overlap("dp")[1] < model.overlap("dp")[0] < 0.3
    pcie = build_cost_model(cluster("rtx-pro-6000"), stack())
    assert pcie.overlap("tp") == pcie.overlap("dp") == (0.3, 0.3)


def test_every_measured_row_is_reproduced_at_its_own_size_and_peak():
    for node in load("network")["node"]:
        for collective, rows in node["curves"].items():
            for size, row in rows.items():
                assert interpolate(rows, int(size), doubling_us=4.0) == pytest.approx(row)
                curve = curve_from_row(row, scale=1.0, headroom=1.1)
                factor = bus_factor(collective, int(size))
                assert curve.seconds(1.0, factor) == pytest.approx(row[0] * 1e-6, rel=0.25)
                assert 2**36 * factor / curve.seconds(2**36, factor) <= 1.1001e9 * row[5]


def test_two_devices_of_one_mi250x_package_talk_faster_than_two_packages():
    where = parse_cluster("1x8 mi250x")
    inside, across = (busbw(where, comm(256 * MIB, ranks)) for ranks in ((0, 1), (0, 2)))
    assert 120 < inside < 200  # four links of 50 GB/s
    assert across == pytest.approx(inside / 4, rel=0.1)  # one link
    assert inside > busbw(where, comm(256 * MIB, 8)) > busbw(where, comm(256 * MIB, 4))


@pytest.mark.parametrize(("device", "link_gbs"), [("mi100", 46), ("mi210", 50), ("mi300x", 64)])
def test_a_pair_of_a_full_amd_mesh_has_one_link(device, link_gbs):
    where = parse_cluster(f"1x4 {device}")
    pair = busbw(where, comm(1024 * MIB, 2))
    assert 0.65 * link_gbs < pair < link_gbs
    assert 2.3 * pair < busbw(where, comm(1024 * MIB, 4)) < 3 * pair
