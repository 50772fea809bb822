"""Recommendation models: parameter counts, exchanges of embeddings, ranks with unequal tables."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest

from foretrain.errors import InputError
from foretrain.frontends.build import build_graph, flops_per_sample
from foretrain.frontends.catalog import find_model, resolve_model
from foretrain.frontends.spec import RecSpec, Table
from foretrain.predict import compile_run, predict
from foretrain.program import Comm, CommEvent, ComputeEvent, Program
from foretrain.run.load import load_run
from foretrain.run.spec import RunSpec
from foretrain.simulator.result import Result
from foretrain.strategy.plan import Plan
from foretrain.strategy.tables import assign, table_ways

GIB = 1 << 30


def _run(model: object = "dlrm-516m", **changes: Any) -> RunSpec:
    training = {"global_batch": 2048, "precision": "fp32", "optimizer": "sgd"}
    return load_run(
        {
            "model": model,
            "training": training | changes.get("training", {}),
            "plan": changes.get("plan", {"preset": "dlrm"}),
            "cluster": changes.get("cluster", "1x8 v100-sxm-32gb"),
            "stack": changes.get("stack", "pytorch-dlrm"),
        }
    )


def _exchanges(program: Program, index: int = 0) -> list[tuple[str, float]]:
    """Collective and bytes of every exchange of embeddings in the launch list of a rank class."""
    found: list[tuple[str, float]] = []
    for entry in program.classes[index].entries:
        if isinstance(entry, Comm) and entry.category == "ep":
            event = program.events[entry.event]
            assert isinstance(event, CommEvent)
            found.append((event.collective, event.bytes))
    return found


def _mixed(order: tuple[int, ...] = (0, 1, 2, 3)) -> dict[str, Any]:
    """Four tables of different size and lookups, in any order."""
    tables = (
        {"name": "wide", "rows": 4_000_000, "dim": 64, "pooling": 40},
        {"name": "hot", "rows": 200_000, "dim": 64, "pooling": 90},
        {"name": "small", "rows": 1_000, "dim": 64, "pooling": 1},
        {"name": "tall", "rows": 30_000_000, "dim": 64, "pooling": 2},
    )
    return {
        "family": "dlrm", "dense": 13, "bottom": [256, 64], "top": [256, 1],
        "tables": [tables[i] for i in order],
    }  # fmt: skip


# -- models ------------------------------------------------------------------------------------


def _mlp(sizes: list[int]) -> int:
    return sum(a * b + b for a, b in pairwise(sizes))


@pytest.mark.parametrize(
    ("name", "tables", "dense"),
    [
        # 8 tables of 1M x 64; bottom 128-512-512-512-64, (9 features: 36 pairs) + 64 = 100
        ("dlrm-516m", 8 * 1_000_000 * 64,
         _mlp([128, 512, 512, 512, 64]) + _mlp([100, 1024, 1024, 1024, 1024, 1])),
        ("dlrm-default", 8 * 1_000_000 * 64,
         _mlp([512, 512, 64]) + _mlp([100, 1024, 1024, 1024, 1])),
        # 8 tables of 80k x 128: 36 pairs + 128
        ("dlrm-ddp", 8 * 80_000 * 128,
         _mlp([128, 128, 128, 128]) + _mlp([164, 512, 512, 512, 256, 1])),
        # 26 tables: 27 features, 351 pairs + 128 = 479
        ("dlrm-mlperf", 187_767_399 * 128,
         _mlp([13, 512, 256, 128]) + _mlp([479, 1024, 1024, 512, 256, 1])),
        # 27 x 128 = 3456 wide, three cross layers of rank 512
        ("dlrm-dcnv2", 204_184_588 * 128,
         _mlp([13, 512, 256, 128]) + _mlp([3456, 1024, 1024, 512, 256, 1])
         + 3 * (2 * 3456 * 512 + 3456)),
    ],
)  # fmt: skip
def test_parameter_counts_are_exact(name: str, tables: int, dense: int):
    spec = find_model(name)
    assert isinstance(spec, RecSpec)
    assert sum(table.num_parameters for table in spec.tables) == tables
    assert build_graph(spec, batch=16).num_parameters == tables + dense == spec.num_parameters


def test_published_sizes():
    """516M (Proteus), 4.2B and 22.8B (NVIDIA DLRM small, large), 214 lookups (MLPerf)."""
    sizes = {"dlrm-516m": 516e6, "dlrm-criteo-small": 4.2e9, "dlrm-criteo-large": 22.8e9}
    for name, published in sizes.items():
        assert build_graph(find_model(name), batch=1).num_parameters == pytest.approx(
            published, rel=0.01
        )
    dcn = find_model("dlrm-dcnv2")
    assert isinstance(dcn, RecSpec)
    assert sum(table.pooling for table in dcn.tables) == 214


def test_flops_are_those_of_the_matrix_products():
    bottom, top = [128, 512, 512, 512, 64], [100, 1024, 1024, 1024, 1024, 1]
    macs = sum(a * b for s in (bottom, top) for a, b in pairwise(s)) + 9 * 9 * 64
    assert flops_per_sample(find_model("dlrm-516m")) == 6 * macs


# -- exchanges of embeddings -------------------------------------------------------------------


def test_eight_tables_on_eight_ranks_exchange_twice():
    """Worked example, section 9: per rank and direction B d w x (tables on this rank)."""
    program = compile_run(_run()).program
    assert _exchanges(program) == [("all_to_all", 2048 * 64 * 4)] * 2
    assert len(program.classes) == 1  # equal tables: all ranks are alike
    assert len(program.classes[0].ranks) == 8


def test_two_tables_a_rank_double_the_exchange():
    tables = {"rows": 500_000, "dim": 64, "pooling": 100, "count": 16}
    model = {
        "family": "dlrm",
        "dense": 128,
        "bottom": [512, 64],
        "top": [1024, 1],
        "tables": tables,
    }
    assert _exchanges(compile_run(_run(model)).program) == [("all_to_all", 2 * 2048 * 64 * 4)] * 2


def test_row_wise_tables_leave_partial_sums():
    """P(x) -> S_batch: a reduce-scatter of B d w per table; the gradient is gathered again."""
    program = compile_run(_run(plan={"preset": "dlrm", "tables": "row-wise"})).program
    whole = 8 * 2048 * 64 * 4
    assert _exchanges(program) == [("reduce_scatter", whole), ("all_gather", whole)]
    bag = next(e for e in program.events if isinstance(e, ComputeEvent) and e.op == "embedding_bag")
    shape = dict(bag.shape)
    assert (shape["rows"], shape["pooling"], shape["batch"]) == (125_000, 12.5, 2048)


def test_column_wise_tables_exchange_as_much_as_table_wise():
    program = compile_run(_run(plan={"preset": "dlrm", "tables": "column-wise"})).program
    assert _exchanges(program) == [("all_to_all", 8 * 2048 * 8 * 4)] * 2


def test_replicated_tables_reduce_dense_gradients():
    program = compile_run(_run(plan={"preset": "ddp"})).program
    assert _exchanges(program) == []
    reduced = sum(
        event.bytes * event.count
        for entry in program.classes[0].entries
        if isinstance(entry, Comm) and isinstance(event := program.events[entry.event], CommEvent)
    )
    assert reduced == pytest.approx(4 * 515_877_441, rel=1e-6)


def test_a_sparse_exchange_sends_only_what_was_found():
    """One lookup per sample: a row is on one rank, so 1/n of the vectors of every table move."""
    tables = {"rows": 1_000_000, "dim": 64, "count": 8}
    model = {
        "family": "dlrm",
        "dense": 128,
        "bottom": [512, 64],
        "top": [1024, 1],
        "tables": tables,
    }
    plan = {"preset": "dlrm", "tables": "row-wise"}
    program = compile_run(_run(model, plan=plan, stack="hugectr")).program
    assert _exchanges(program) == [("all_to_all", 2048 * 64 * 4)] * 2


def test_the_exchange_hides_behind_the_bottom_mlp():
    hidden = predict(_run(training={"global_batch": 65536}, stack="hugectr"))
    plan = {"preset": "dlrm", "overlap": {"tables": False}}
    shown = predict(_run(training={"global_batch": 65536}, plan=plan, stack="hugectr"))
    exposed = [r.time_parts.exposed_communication["ep"] for r in (hidden, shown)]
    assert hidden.step_time_s.value < shown.step_time_s.value
    assert exposed[0] < exposed[1]


# -- unequal tables ----------------------------------------------------------------------------


def _predict_mixed(order: tuple[int, ...] = (0, 1, 2, 3), *, flat: bool = False) -> Result:
    plan = {"preset": "dlrm", "tables": {"*": "table-wise", "small": "data-parallel"}}
    run = _run(
        _mixed(order), plan=plan, cluster="1x4 a100-sxm-80gb", training={"global_batch": 16384}
    )
    return predict(run, flat=flat)


def test_ranks_with_unequal_tables_wait_for_the_slowest():
    result = _predict_mixed()
    assert len(result.classes) == 4  # wide, hot, tall, and one without a table
    busy = {c.ranks[0]: c.busy_s for c in result.classes}
    assert max(busy.values()) > 1.2 * min(busy.values())
    for one in result.classes:  # all leave the step together, whatever they did
        assert one.busy_s + one.exposed_s + one.idle_s == pytest.approx(
            result.step_time_s.value, rel=0.35
        )
    assert all(one.bubble_s == 0.0 for one in result.classes)  # there is no pipeline
    assert max(one.parts.wait for one in result.classes) > 1e-4  # they wait for the fullest rank


def test_flat_agrees_with_folded_for_unequal_tables():
    folded, flat = _predict_mixed(), _predict_mixed(flat=True)
    assert flat.step_time_s.value == pytest.approx(folded.step_time_s.value, rel=1e-9)


def test_the_order_of_the_tables_does_not_matter():
    times = {_predict_mixed(order).step_time_s.value for order in ((0, 1, 2, 3), (3, 1, 0, 2))}
    assert max(times) == pytest.approx(min(times), rel=1e-12)


def test_every_row_is_held_once():
    """Memory per rank: what all ranks hold of the tables adds up to the tables."""
    run = _run(_mixed(), plan={"preset": "dlrm"}, cluster="1x4 a100-sxm-80gb")
    program = compile_run(run).program
    total = sum(len(c.ranks) * c.persistent["tables"] for c in program.classes)
    assert total == 4 * sum(t["rows"] * t["dim"] for t in _mixed()["tables"])


@pytest.mark.parametrize(
    ("optimizer", "per_rank"),
    [("sgd", 0.0), ("rowwise-adagrad", 4e6), ("adagrad", 256e6), ("adam", 512e6)],
)
def test_table_optimizers_keep_their_states(optimizer: str, per_rank: float):
    """One table of 1M x 64 per rank: nothing, one fp32 per row, one or two per number."""
    run = _run(training={"table_optimizer": optimizer})
    persistent = compile_run(run).program.classes[0].persistent
    assert persistent["tables"] == 256e6
    assert persistent["table states"] == per_rank
    assert persistent["weights"] == 4 * 3_877_441  # the MLPs; no table among them
    assert persistent["gradients"] == 4 * 3_877_441


def test_one_rank_needs_no_exchange():
    result = predict(_run(cluster="1x1 v100-sxm-32gb"), strict=True)
    assert result.time_parts.exposed_communication["ep"] == 0.0
    assert result.warnings == ()


# -- assignment --------------------------------------------------------------------------------


def _tables(*sizes: tuple[int, float]) -> tuple[Table, ...]:
    return tuple(
        Table(name=f"t{i}", rows=rows, dim=16, pooling=pooling)
        for i, (rows, pooling) in enumerate(sizes)
    )


def _load(tables: tuple[Table, ...], owners: Mapping[str, int], ranks: int) -> list[float]:
    load = [0.0] * ranks
    for table in tables:
        load[owners[table.name]] += table.rows
    return load


def test_greedy_by_size_balances_rows():
    tables = _tables((8, 1), (7, 1), (6, 1), (5, 1), (4, 1))
    ways = dict.fromkeys((t.name for t in tables), "table-wise")
    owners = assign(tables, ways, 2, "greedy-size")
    assert sorted(_load(tables, owners, 2)) == [13, 17]
    dealt = assign(tables, ways, 2, "round-robin")
    assert [dealt[t.name] for t in tables] == [0, 1, 0, 1, 0]


def test_greedy_by_lookups_parts_the_hot_tables():
    tables = _tables((1000, 1), (900, 1), (10, 50), (10, 40))
    ways = dict.fromkeys((t.name for t in tables), "table-wise")
    owners = assign(tables, ways, 2, "greedy-lookups")
    assert owners["t2"] != owners["t3"]
    both = assign(tables, ways, 2, "greedy-both")
    assert both["t0"] != both["t1"]
    assert both["t2"] != both["t3"]


def test_named_ranks_are_kept_and_filled_first():
    tables = _tables((10, 1), (10, 1), (10, 1))
    plan = Plan(preset="dlrm", tables={"t0": 1})
    ways = table_ways(plan, tables, 2)
    owners = assign(tables, ways, 2, plan.assignment)
    assert owners["t0"] == 1
    assert owners["t1"] == 0


def test_auto_spreads_what_one_rank_cannot_hold_alone():
    run = _run("dlrm-dcnv2", plan={"preset": "dlrm", "tables": "auto"}, cluster="1x8 h100-sxm")
    assert isinstance(run.model, RecSpec)
    ways = table_ways(run.plan, run.model.tables, 8)
    assert ways["t20"] == "row-wise"  # 100 of 214 lookups
    assert ways["t12"] == "table-wise"


def test_the_plan_reads_back():
    import yaml

    from foretrain.strategy.text import read_tree, tree_text

    tree = compile_run(_run(_mixed(), cluster="1x4 a100-sxm-80gb")).tree
    assert read_tree(yaml.safe_load(tree_text(tree))["tree"]) == tree


# -- files and bad input -----------------------------------------------------------------------


def test_a_model_of_ones_own_in_a_file(tmp_path: Any):
    text = 'family = "dlrm"\ndense = 13\nbottom = [64, 16]\ntop = [64, 1]\n'
    (tmp_path / "mine.toml").write_text(text + "tables = {rows = [10, 20], dim = 16}\n")
    spec = resolve_model("mine.toml", folder=tmp_path)
    assert isinstance(spec, RecSpec)
    assert (spec.name, [t.rows for t in spec.tables]) == ("mine", [10, 20])
    listed = text.replace("family", "[[model]]\nfamily") + "[model.tables]\nrows = 5\ndim = 16\n"
    (tmp_path / "listed.toml").write_text(listed)
    assert resolve_model("listed.toml", folder=tmp_path).family == "dlrm"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tables": {"rows": [1, 2], "dim": [4]}}, "different lengths"),
        ({"tables": [{"rows": 0, "dim": 4}]}, "whole number above 0"),
        ({"tables": [{"rows": 5, "dim": 4, "lookups": 3}]}, "unknown key"),
        ({"tables": None}, "embedding tables"),
        ({"bottom": []}, "whole numbers"),
        ({"interaction": "sum"}, "unknown word"),
        ({"tables": [{"rows": 5, "dim": 4}]}, "as wide as the bottom MLP"),
        ({"tables": [{"name": "a", "rows": 5, "dim": 64}] * 2}, "one name"),
    ],
)
def test_a_wrong_model_is_one_clear_message(change: dict[str, Any], words: str):
    with pytest.raises(InputError, match=words):
        _run(_mixed() | change)


@pytest.mark.parametrize(
    ("section", "values", "words"),
    [
        ("plan", {"preset": "dlrm", "tables": "diagonal"}, "unknown word"),
        ("plan", {"preset": "dlrm", "tables": {"nothing": 0}}, "matches no table"),
        ("plan", {"preset": "dlrm", "tables": {"t0": 8}}, "no such rank"),
        ("plan", {"preset": "dlrm", "tp": 2}, "spread over the same ranks"),
        ("plan", {"preset": "dlrm", "overrides": {"features.bottom": {"owner": 1}}}, "embedding"),
        ("training", {"sequence": 10}, "dense features"),
        ("training", {"lookups": {"zipf": 9}}, "not an exponent"),
        ("training", {"lookups": "often"}, "not understood"),
        ("training", {"lookups": {"file": "/nowhere.csv"}}, "cannot read"),
        ("training", {"table_optimizer": "lion"}, "unknown word"),
    ],
)
def test_a_wrong_run_is_one_clear_message(section: str, values: dict[str, Any], words: str):
    with pytest.raises(InputError, match=words):
        compile_run(_run(**{section: values}))


def test_columns_that_do_not_divide_are_refused():
    with pytest.raises(InputError, match="cannot be split 6 ways"):
        _run(plan={"preset": "dlrm", "tables": "column-wise"}, cluster="1x6 v100-sxm-32gb",
             training={"global_batch": 2046})  # fmt: skip


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("training", {"lookups": "zipf"}),
        ("training", {"table_optimizer": "sgd"}),
        ("plan", {"tables": "row-wise"}),
        ("plan", {"preset": "dlrm"}),
    ],
)
def test_tables_of_a_transformer_are_refused(section: str, values: dict[str, Any]):
    run: dict[str, Any] = {
        "model": "gpt2-124m", "training": {"sequence": 128, "microbatch": 1}, "plan": {},
        "cluster": "1x1 a100-sxm-80gb",
    }  # fmt: skip
    with pytest.raises(InputError, match="embedding tables"):
        load_run(run | {section: run[section] | values})


def test_micro_steps_exchange_each_time():
    """Tables are updated in every backward; the dense gradients are reduced once."""
    program = compile_run(_run(training={"accumulation": 2})).program
    assert _exchanges(program) == [("all_to_all", 1024 * 64 * 4)] * 4


def test_the_catalog_lists_tables(capsys: pytest.CaptureFixture[str]):
    from foretrain.cli.main import main

    assert main(["catalog", "models", "dlrm-dcnv2"]) == 0
    assert "40,000,000 x 128, 100 lookups per sample" in capsys.readouterr().out
