"""Properties of the cluster grammar and of group layouts, for every input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from foretrain.catalog import names
from foretrain.errors import InputError
from foretrain.hardware import Cluster, find_devices, format_cluster, parse_cluster, resolve_cluster
from foretrain.hardware.device import FABRICS

DEVICES = names("devices")
RATES = st.one_of(
    st.integers(1, 1600).map(str),
    st.decimals(min_value="0.001", max_value="999", places=3).map(str),
)
OPTIONS = {
    "latency": st.tuples(st.integers(0, 5000), st.sampled_from(["us", "ms", "s"])).map(
        lambda pair: f"[latency {pair[0]}{pair[1]}]"
    ),
    "p2p": st.sampled_from(["[p2p]", "[no p2p]"]),
    "over": st.decimals(min_value=1, max_value=16, places=2).map(
        lambda factor: f"[oversubscribed {factor}:1]"
    ),
    "kind": st.sampled_from(["nvswitch", "mesh", "pairs", "none"]).map("[nvlink {}]".format),
    "nvl": st.integers(1, 96).map("[nvl {}]".format),
    "rate": RATES.map("[scaleup {} GB/s]".format),
}


@st.composite
def texts(draw: st.DrawFn) -> str:
    text = (
        f"{draw(st.integers(1, 600))}x{draw(st.integers(1, 72))} {draw(st.sampled_from(DEVICES))}"
    )
    if draw(st.booleans()):
        nics, rate = draw(st.integers(1, 32)), draw(RATES)
        text += f", {nics}x{rate}G {draw(st.sampled_from(FABRICS))}"
    for option in draw(st.lists(st.sampled_from(sorted(OPTIONS)), unique=True, max_size=4)):
        text += " " + draw(OPTIONS[option])
    return text


def parsed(text: str) -> Cluster | None:
    try:
        return parse_cluster(text)
    except InputError:
        return None  # e.g. a bridge on a device that has no link


def refusal(function: Callable[[str], Cluster], text: str) -> list[str] | None:
    try:
        function(text)
    except InputError as error:
        return [str(problem) for problem in error.problems if problem.what]
    return None


@given(texts())
def test_text_reads_back_as_the_same_cluster(text: str) -> None:
    cluster = parsed(text)
    if cluster is None:
        return
    again = parse_cluster(format_cluster(cluster))
    effects = {"notes": (), "name": ""}
    assert replace(again, **effects) == replace(cluster, **effects)
    assert format_cluster(again) == format_cluster(cluster)


@given(texts(), st.randoms(use_true_random=False), st.integers(1, 200))
def test_layout_counts_every_rank_once(text: str, random: object, size: int) -> None:
    cluster = parsed(text)
    if cluster is None:
        return
    world = cluster.world_size
    ranks = random.sample(range(world), min(size, world))  # type: ignore[attr-defined]
    layout = cluster.layout(ranks)
    nodes = [cluster.node_of(rank) for rank in ranks]
    assert sum(layout.islands) == layout.num_ranks == len(ranks)
    assert layout.num_nodes == len(set(nodes))
    assert layout.max_per_node == max(nodes.count(node) for node in nodes)
    assert layout.min_per_node == min(nodes.count(node) for node in nodes)
    assert max(layout.islands) <= cluster.island_size
    if cluster.island_size >= cluster.devices_per_node:
        assert len(layout.islands) <= layout.num_nodes
    else:
        assert len(layout.islands) >= layout.num_nodes
    same = cluster.layout(sorted(ranks))  # the order of the members does not matter
    assert sorted(same.islands) == sorted(layout.islands)
    assert same.inside_scaleup_domain == layout.inside_scaleup_domain


@given(st.one_of(st.text(max_size=40), texts().map(lambda text: text[::2]), texts()))
def test_any_text_gives_a_cluster_or_one_clear_error(text: str) -> None:
    for function in (parse_cluster, resolve_cluster):
        problems = refusal(function, text)
        assert problems is None or problems


@given(st.text(max_size=20))
def test_any_device_name_gives_devices_or_none(text: str) -> None:
    assert all(device.name in DEVICES for device in find_devices(text))
