"""Who shares what: NICs among sibling groups, links inside a node, and prices of many sizes."""

from __future__ import annotations

from time import perf_counter, process_time

import numpy as np
import pytest

from foretrain.cost.network.collectives import collective_seconds, group_cost
from foretrain.cost.network.columns import column_seconds
from foretrain.cost.straggler import slowest_of, straggler_factor
from foretrain.errors import InputError
from foretrain.hardware import parse_cluster
from foretrain.simulator.fairness import fair_rates

SIZE = 1e9


def rate(cluster, ranks, sharers):
    cost = group_cost("all_gather", ranks, cluster, sharers=sharers)
    return SIZE / (cost.seconds(SIZE) - cost.alpha_s)


def test_two_groups_of_four_crossing_one_nic_get_half_each():
    cluster = parse_cluster("2x4 a100-sxm-80gb, 1x100G ib")
    group = (0, 1, 4, 5)  # its sibling is 2, 3, 6, 7
    assert rate(cluster, group, 2) == pytest.approx(rate(cluster, group, 1) / 2, rel=0.02)


def test_disjoint_groups_on_nvlink_are_unaffected():
    cluster = parse_cluster("1x8 h100-sxm")
    assert rate(cluster, (0, 1, 2, 3), 2) == rate(cluster, (0, 1, 2, 3), 1)
    mesh = parse_cluster("1x8 v100-sxm-16gb")
    assert rate(mesh, (0, 1, 2, 3), 2) == rate(mesh, (0, 1, 2, 3), 1)


def test_strided_groups_have_their_own_nic_or_share():
    own = parse_cluster("4x8 h100-sxm, 8x400G ib")
    group = (0, 8, 16, 24)
    assert rate(own, group, 8) == pytest.approx(rate(own, group, 1), rel=1e-9)
    two = parse_cluster("4x8 h100-sxm, 2x400G ib")
    assert rate(two, group, 8) == pytest.approx(rate(own, group, 8) / 4, rel=0.02)


def test_an_uneven_group_has_the_nics_of_its_smallest_part():
    cluster = parse_cluster("2x8 h100-sxm, 8x400G ib")
    even, uneven = (4, 5, 6, 7, 8, 9, 10, 11), (1, 2, 3, 4, 5, 6, 7, 8)
    assert rate(cluster, uneven, 1) < 0.4 * rate(cluster, even, 1)


def test_max_min_shares_of_one_link():
    # two flows that would fill the link, and one on a link of its own
    assert fair_rates([((0, 1.0),), ((0, 1.0),), ((1, 1.0),)]) == [0.5, 0.5, 1.0]


def test_many_sizes_agree_with_single_ones_and_are_fast():
    cluster = parse_cluster("16x8 h100-sxm, 8x400G ib")
    sizes = np.geomspace(1.0, 1e11, 1_000_000)
    started = perf_counter()
    times = collective_seconds("all_to_all", sizes, range(128), cluster)
    assert perf_counter() - started < 2.0
    cost = group_cost("all_to_all", tuple(range(128)), cluster)
    for i in (0, 123_456, 999_999):
        assert times[i] == pytest.approx(cost.seconds(float(sizes[i])), rel=1e-12)
    assert (np.diff(times) >= 0).all()


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast")


def columns(cluster, rows):
    random = np.random.default_rng(0)
    return (
        random.integers(0, len(KINDS), rows),
        random.integers(1, cluster.nodes + 1, rows),
        random.integers(1, cluster.devices_per_node + 1, rows),
        10 ** random.uniform(0.0, 10.0, rows),
        random.integers(1, 4, rows),
    )


@pytest.mark.parametrize(
    "text",
    [
        "32x8 h100-sxm, 8x400G ib",
        "36x4 gb200, 4x400G ib",
        "8x8 v100-sxm-32gb, 4x100G ib",
        "4x4 a100-pcie-80gb [nvlink pairs], 1x100G ethernet",
    ],
)
def test_columns_of_groups_cost_what_the_groups_cost(text):
    cluster = parse_cluster(text)
    kind, nodes, per_node, size, sharers = columns(cluster, 60)
    times = column_seconds(cluster, KINDS, kind, nodes, per_node, size, sharers)
    wide = cluster.devices_per_node
    for i, time in enumerate(times):
        ranks = tuple(n * wide + local for n in range(nodes[i]) for local in range(per_node[i]))
        cost = group_cost(KINDS[kind[i]], ranks, cluster, sharers=int(sharers[i]))
        assert time == pytest.approx(cost.seconds(float(size[i])), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("nodes", [128, 4096])  # 6,144 different groups, and 400,000
def test_a_million_rows_of_many_groups_are_fast(nodes):
    cluster = parse_cluster(f"{nodes}x8 h100-sxm, 8x400G ib")
    rows = columns(cluster, 1_000_000)
    started = process_time()
    times = column_seconds(cluster, KINDS, *rows)
    assert process_time() - started < 2.0
    assert np.isfinite(times).all()


def test_columns_outside_the_cluster_are_refused():
    one = np.array([1])
    with pytest.raises(InputError, match="do not lie on"):
        column_seconds(
            parse_cluster("2x8 h100-sxm, 8x400G ib"), KINDS, one, 3 * one, one, 1e6 * one
        )


@pytest.mark.parametrize(
    ("text", "collective", "microseconds"),
    [
        ("2x8 h100-sxm, 8x400G ib", "all_reduce", 30.0),
        ("4x8 h100-sxm, 8x400G ib", "all_reduce", 37.1),
        ("2x8 b200-sxm, 8x400G ib", "all_gather", 34.4),
        ("2x8 b200-sxm, 8x400G roce", "all_gather", 43.3),
        ("2x8 h100-sxm, 32x100G efa", "all_reduce", 72.0),
        ("2x8 a100-sxm-40gb, 4x100G efa", "all_reduce", 179.0),
        ("2x8 b200-sxm, 8x400G efa", "all_reduce", 57.0),
    ],
)
def test_small_messages_take_what_the_fabric_was_measured_at(text, collective, microseconds):
    cluster = parse_cluster(text)
    cost = group_cost(collective, tuple(range(cluster.world_size)), cluster)
    assert cost.seconds(1024.0) * 1e6 == pytest.approx(microseconds, rel=0.15)


def test_one_slot_bounds_what_a_rank_sends_to_nics():
    cluster = parse_cluster("2x8 v100-sxm-16gb, 8x100G ib")
    assert rate(cluster, (0, 8), 1) / 1e9 == pytest.approx(8.3 / 0.5, rel=0.06)


def test_trees_without_a_reducing_switch_bound_two_nodes():
    # measured: 189.6 GB/s of bus bandwidth on 16 x 100 Gb/s per node
    cluster = parse_cluster("2x8 a100-sxm-40gb, 16x100G roce")
    cost = group_cost("all_reduce", tuple(range(16)), cluster)
    assert 8e9 * 30 / 16 / cost.seconds(8e9) / 1e9 == pytest.approx(189.6, rel=0.1)


def test_the_band_widens_with_the_nodes():
    spreads = [
        group_cost("all_reduce", tuple(range(8 * n)), parse_cluster(f"{n}x8 h100-sxm, 8x400G ib"))
        for n in (2, 8, 64)
    ]
    assert spreads[0].spread < spreads[1].spread < spreads[2].spread


def test_the_slowest_of_many_devices():
    # expected maxima of normal samples, from tables of order statistics
    assert slowest_of(1) == 0.0
    assert slowest_of(8) == pytest.approx(1.4236, rel=0.01)
    assert slowest_of(100) == pytest.approx(2.5076, rel=0.01)
    assert 1.0 < straggler_factor(8) < straggler_factor(64) < straggler_factor(1024) < 1.05
