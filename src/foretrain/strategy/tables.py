"""Where embedding tables lie: a way for each table, and an owner for those that one rank holds.

    table-wise     one rank holds the table and looks up the whole global batch in it
    row-wise       every rank holds 1/n of the rows; partial sums are reduce-scattered
    column-wise    every rank holds 1/n of the columns
    data-parallel  every rank holds the table; its dense gradient is all-reduced
    auto           row-wise where one table is more than a rank's fair share (data-parallel where
                   it has fewer rows than there are ranks), else table-wise

Owners are assigned greedily: tables in order of falling cost, each to the rank that has the least
with it. The cost is the size (greedy-size), the numbers looked up per sample (greedy-lookups), or
both as shares of all tables, of which the larger counts (greedy-both); round-robin deals them in
order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from foretrain.errors import Problem, nearest
from foretrain.frontends.recsys import table_path
from foretrain.frontends.spec import Model, RecSpec, Table
from foretrain.strategy.plan import Plan
from foretrain.strategy.tree import Node

WAYS = ("table-wise", "row-wise", "column-wise", "data-parallel", "auto")
ASSIGNMENTS = ("greedy-size", "greedy-lookups", "greedy-both", "round-robin")
DATA = ("dp_replicate", "dp_shard")

Cost = Callable[[Table], tuple[float, float]]


def table_nodes(plan: Plan, spec: RecSpec, ranks: int) -> list[Node]:
    """Returns one node per table that is not data-parallel."""
    ways = table_ways(plan, spec.tables, ranks)
    owners = assign(spec.tables, ways, ranks, plan.assignment)
    nodes: list[Node] = []
    for table in spec.tables:
        path, way = table_path(table), ways[table.name]
        if table.name in owners:
            nodes.append(Node(pattern=path, owner=owners[table.name], sparse=True))
        elif way in ("row-wise", "column-wise"):
            dim = "row" if way == "row-wise" else "dim"
            nodes.append(Node(pattern=path, computation={dim: DATA}, sparse=True))
    return nodes


def table_ways(plan: Plan, tables: Sequence[Table], ranks: int) -> dict[str, str | int]:
    """Returns the way of every table, or the rank that the plan names; the last match wins."""
    settings: Mapping[str, str | int] = plan.tables or {"*": default_way(plan)}
    ways: dict[str, str | int] = {}
    for table in tables:
        way: str | int = default_way(plan)
        for pattern, value in settings.items():
            if fnmatchcase(table.name, pattern):
                way = value
        ways[table.name] = _auto(table, tables, ranks) if way == "auto" else way
    return ways


def default_way(plan: Plan) -> str:
    """Returns what a preset does with tables: dlrm gives each to one rank, others repeat them."""
    return "table-wise" if plan.preset == "dlrm" else "data-parallel"


def assign(
    tables: Sequence[Table], ways: Mapping[str, str | int], ranks: int, assignment: str
) -> dict[str, int]:
    """Returns the owner of every table-wise table; ranks that the plan names are filled first."""
    owners = {name: way for name, way in ways.items() if isinstance(way, int)}
    free = [table for table in tables if ways[table.name] == "table-wise"]
    if assignment == "round-robin":
        return owners | {table.name: i % ranks for i, table in enumerate(free)}
    cost = _cost(assignment, tables)
    load = [(0.0, 0.0)] * ranks

    def put(table: Table, rank: int) -> None:
        size, lookups = cost(table)
        load[rank] = (load[rank][0] + size, load[rank][1] + lookups)

    for table in tables:
        if table.name in owners:
            put(table, owners[table.name] % ranks)
    for table in sorted(free, key=lambda t: max(cost(t)), reverse=True):  # stable: equals in order
        size, lookups = cost(table)
        rank = min(range(ranks), key=lambda r: (max(load[r][0] + size, load[r][1] + lookups), r))
        owners[table.name] = rank
        put(table, rank)
    return owners


def _cost(assignment: str, tables: Sequence[Table]) -> Cost:
    """Size and lookups of a table as shares of all tables; what does not count is 0."""
    size = float(sum(table.num_parameters for table in tables))
    lookups = sum(map(_lookups, tables))
    by_size = float(assignment != "greedy-lookups") / size
    by_lookups = float(assignment != "greedy-size") / lookups
    return lambda table: (table.num_parameters * by_size, _lookups(table) * by_lookups)


def _lookups(table: Table) -> float:
    """Numbers read and written per sample: pooled rows and the result that is exchanged."""
    return table.dim * (table.pooling + 1.0)


def _auto(table: Table, tables: Sequence[Table], ranks: int) -> str:
    size = sum(other.num_parameters for other in tables)
    lookups = sum(map(_lookups, tables))
    share = max(table.num_parameters / size, _lookups(table) / lookups)
    if share * ranks <= 1.0 or ranks == 1:
        return "table-wise"
    return "row-wise" if table.rows >= ranks else "data-parallel"


def check_no_tables(spec: Model, plan: Plan) -> list[Problem]:
    """Returns what a plan says about embedding tables that the model has not."""
    what = f"{spec.name} has no embedding tables to spread over ranks"
    given = (("tables", dict(plan.tables)), ("preset", plan.preset == "dlrm" and plan.preset))
    return [
        Problem(what=what, where=f"plan.{key}", value=value, way_out=f"leave {key} out")
        for key, value in given
        if value
    ]


def check_rec_plan(spec: RecSpec, plan: Plan, num_devices: int) -> list[Problem]:
    """Returns what a plan asks of a recommendation model that is not modelled."""
    problems: list[Problem] = []
    for key in ("tp", "pp", "cp"):
        value = getattr(plan, key)
        if value > 1:
            what = f"{spec.name} is data parallel with tables spread over the same ranks"
            way_out = "say where its tables lie with plan.tables"
            problems.append(
                Problem(what=what, where=f"plan.{key}", value=value, allowed="1", way_out=way_out)
            )
    if plan.preset == "fsdp":
        what = f"sharding {spec.name} with FSDP is not modelled"
        allowed, way_out = "dlrm, ddp, plain", "use preset dlrm"
        problems.append(
            Problem(what=what, where="plan.preset", value="fsdp", allowed=allowed, way_out=way_out)
        )
    mode = plan.recompute.mode
    if mode != "none":
        what = f"recompute of {spec.name} is not modelled"
        problems.append(Problem(what=what, where="plan.recompute", value=mode, allowed="none"))
    return problems or check_tables(plan, spec, num_devices)


def check_tables(plan: Plan, spec: RecSpec, ranks: int) -> list[Problem]:
    """Returns what is wrong with `plan.tables` for a model on `ranks` data-parallel ranks."""
    problems: list[Problem] = []
    names = [table.name for table in spec.tables]
    for pattern, way in plan.tables.items():
        if not any(fnmatchcase(name, pattern) for name in names):
            problems.append(
                Problem(what="the pattern matches no table", where="plan.tables", value=pattern,
                        allowed=f"names and patterns, e.g. {names[0]} or *",
                        way_out=nearest(pattern, names))
            )  # fmt: skip
        if isinstance(way, int) and not 0 <= way < ranks:
            problems.append(
                Problem(what="no such rank", where=f"plan.tables.{pattern}", value=way,
                        allowed=f"0 to {ranks - 1}")
            )  # fmt: skip
    if problems:
        return problems
    ways = table_ways(plan, spec.tables, ranks)
    wrong = [t for t in spec.tables if ways[t.name] == "column-wise" and t.dim % ranks]
    if wrong:
        first = wrong[0]
        problems.append(
            Problem(what=f"{first.dim} columns cannot be split {ranks} ways",
                    where=f"plan.tables.{first.name}", value="column-wise",
                    allowed=f"widths that {ranks} divides", way_out="table-wise or row-wise")
        )  # fmt: skip
    return problems
