"""Baselines: simpler models of the same run, against numbers worked by hand."""

from __future__ import annotations

import json

import pytest

from foretrain.analysis.baselines import baselines, task_graph_limit, wire_seconds
from foretrain.cli.main import main
from foretrain.predict import predict
from foretrain.program import CommEvent
from foretrain.run.load import load_run
from foretrain.validation.ablation import AblationRow, render_ablation

MODEL = {"family": "llama", "layers": 4, "hidden": 1024, "heads": 8, "ffn": 4096, "vocab": 32000}


def run(cluster: str, plan: dict[str, object], **training: object):
    given = {"sequence": 1024, "microbatch": 2, "precision": "bf16", "optimizer": "adamw"}
    return load_run(
        {"model": MODEL, "training": {**given, **training}, "plan": plan, "cluster": cluster}
    )


def event(collective: str, size: float, ranks: range) -> CommEvent:
    return CommEvent(collective=collective, bytes=size, dtype="bf16", ranks=tuple(ranks))  # type: ignore[arg-type]


def test_wire_seconds_are_ring_bytes_over_the_slowest_nominal_link():
    cluster = run("2x8 h100-sxm, 8x400G ib", {"preset": "ddp"}).cluster
    inside = wire_seconds(event("all_reduce", 8e9, range(8)), cluster)
    assert inside == pytest.approx(2 * 7 / 8 * 8e9 / cluster.scaleup_bandwidth)
    across = wire_seconds(event("all_gather", 16e9, range(16)), cluster)
    assert across == pytest.approx(15 / 16 * 16e9 / (8 * 50e9))
    assert wire_seconds(event("send_recv", 4e8, range(7, 9)), cluster) == pytest.approx(1e-3)
    assert wire_seconds(event("all_reduce", 8e9, range(1)), cluster) == 0.0


def test_without_communication_all_models_see_the_same_work():
    one = run("1x1 h100-sxm", {"preset": "ddp"})
    found, ours = baselines(one), predict(one).step_time_s.value
    assert found.plain_s == pytest.approx(ours)
    assert found.task_graph_s is not None
    assert found.task_graph_s <= ours
    assert found.analytical_s < ours  # every FLOP at the rate of the largest GEMM


def test_the_task_graph_names_what_it_cannot_express():
    plan = {"preset": "megatron", "tp": 2, "pp": 2, "sequence_parallel": True, "recompute": "full"}
    text = task_graph_limit(run("1x8 h100-sxm", plan, microbatch=1, global_batch=8))
    words = ("micro-batches", "a pipeline", "recomputation", "sequence parallelism")
    assert all(word in text for word in words)
    assert task_graph_limit(run("1x8 h100-sxm", {"preset": "ddp"})) == ""
    assert "sharded states" in task_graph_limit(run("1x8 h100-sxm", {"preset": "fsdp"}))


def test_a_slow_network_shows_in_the_analytical_formula():
    fast = baselines(run("4x8 h100-sxm, 8x400G ib", {"preset": "ddp"}))
    slow = baselines(run("4x8 h100-sxm, 1x10G ethernet", {"preset": "ddp"}))
    assert slow.analytical_s > fast.analytical_s


def test_predict_prints_and_writes_them(tmp_path, capsys):
    target = tmp_path / "p.json"
    arguments = ["predict", "--model", "gpt2-124m", "--sequence", "1024", "--cluster"]
    arguments += ["1x8 a100-sxm-80gb", "--preset", "ddp", "--baselines", "--json", str(target)]
    assert main(arguments) == 0
    assert "What simpler models say" in capsys.readouterr().out
    form = json.loads(target.read_text())["baselines"]
    assert form["plain_s"] > 0
    assert form["analytical_s"] > 0
    assert form["task_graph_s"] > 0
    assert form["task_graph_cannot_express"] is None


def test_the_ablation_table_shows_dashes_where_nothing_can_be_expressed():
    empty = AblationRow(name="x", rows=0, median=None, mean=None, max=None, same_rows_mean=None)
    assert render_ablation([empty]).splitlines()[-1].split() == ["x", "0", "-", "-", "-", "-"]
