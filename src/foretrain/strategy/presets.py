"""Presets: how a Plan of a few knobs becomes a StrategyTree. Only layouts, no collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from foretrain.errors import PlanError, Problem
from foretrain.frontends.encoder_decoder import STACKS
from foretrain.frontends.spec import Model, ModelSpec, RecSpec, num_layers
from foretrain.mesh import AXES, Mesh
from foretrain.stack import Stack
from foretrain.strategy.plan import Plan
from foretrain.strategy.tables import table_nodes
from foretrain.strategy.tree import ALL_BUCKETS, Node, Runtime, Schedule, StrategyTree
from foretrain.units import MIB

T = TypeVar("T")
DATA_AXES = ("dp_replicate", "dp_shard", "cp")
#: Default bucket sizes: PyTorch DDP (25 MiB, the first 1 MiB); the others reduce in larger pieces:
#: Megatron max(40e6, 1e6 dp) elements, DeepSpeed 5e8 elements (framework defaults, recalled).
DDP_BUCKET_MIB = 25.0
DDP_FIRST_BUCKET_MIB = 1.0


def build_tree(
    plan: Plan, spec: Model, *, world_size: int, accumulation: int, stack: Stack
) -> StrategyTree:
    """Returns the tree of a checked plan on `world_size` ranks (see strategy/checks.py)."""
    if plan.tree is not None:
        from foretrain.strategy.text import read_tree

        return read_tree(plan.tree)
    mesh = build_mesh(plan, world_size)
    nodes = [
        *_data_nodes(plan, mesh, spec),
        *_tensor_nodes(plan, spec),
        *(table_nodes(plan, spec, mesh.size(DATA_AXES)) if isinstance(spec, RecSpec) else ()),
        *_recompute_nodes(plan, spec),
        *(node_from_mapping(pattern, value) for pattern, value in plan.overrides.items()),
    ]
    return StrategyTree(
        mesh=mesh,
        nodes=tuple(nodes),
        schedule=build_schedule(plan, num_layers(spec), accumulation),
        runtime=_runtime(plan, stack, mesh),
        data_axes=DATA_AXES,
    )


def build_mesh(plan: Plan, world_size: int) -> Mesh:
    """Returns the mesh pp, dp_replicate, dp_shard, cp, tp (or in `plan.order`)."""
    dp = world_size // (plan.tp * plan.pp * plan.cp)
    shard = min(plan.shard or dp, dp) if (plan.zero or 0) > 0 else dp
    sizes = {
        "pp": plan.pp,
        "dp_replicate": dp // shard,
        "dp_shard": shard,
        "cp": plan.cp,
        "tp": plan.tp,
    }
    axes = plan.order or AXES
    expanded: list[str] = []
    for axis in axes:  # "dp" in an order stands for both data axes
        expanded += ["dp_replicate", "dp_shard"] if axis == "dp" else [axis]
    expanded += [axis for axis in AXES if axis not in expanded]
    return Mesh(axes=tuple(expanded), sizes=tuple(sizes[axis] for axis in expanded))


def build_schedule(plan: Plan, layers: int, accumulation: int) -> Schedule:
    """Returns the schedule: layers spread evenly over the virtual stages unless stated."""
    chunks = plan.pp * plan.interleave
    if plan.stages is not None:
        stages = plan.stages
    else:
        base, extra = divmod(layers, chunks)
        stages = tuple(base + (1 if i < extra else 0) for i in range(chunks))
    kind = plan.schedule or ("interleaved" if plan.interleave > 1 else "1f1b")
    limit = plan.in_flight
    in_flight = (limit,) * plan.pp if isinstance(limit, int) else limit
    return Schedule(
        kind=kind,
        accumulation=accumulation,
        pp=plan.pp,
        interleave=plan.interleave,
        stages=stages,
        in_flight=in_flight,
    )


def _data_nodes(plan: Plan, mesh: Mesh, spec: Model) -> list[Node]:
    """Batch over the data axes, sequence over cp; ZeRO as memory layouts."""
    flat = {"*": ("dp_shard", "cp")}
    seq = ("cp", "tp") if plan.sequence_parallel and plan.tp > 1 else ("cp",)
    memory: dict[str, Mapping[str, tuple[str, ...]]] = {
        "residual": {"batch": ("dp_replicate", "dp_shard"), "seq": seq}
    }
    if isinstance(spec, ModelSpec) and spec.decoder_layers:
        memory["residual"] = {**memory["residual"], "source": seq}  # the encoder's output
    zero = plan.zero or 0
    if zero >= 1:
        memory["master"] = flat
    if zero >= 2 and not plan.no_sync:
        memory["grad_accumulator"] = flat
    if zero >= 3:
        memory["weight"] = flat
    root = Node(
        pattern="",
        computation={"batch": ("dp_replicate", "dp_shard"), "seq": ("cp",)},
        memory=memory,
        reshard=plan.reshard,
    )
    # FSDP keeps the last unit: its backward comes right after its forward
    return [root, Node(pattern="head", reshard=False)] if zero >= 3 else [root]


def _tensor_nodes(plan: Plan, spec: Model) -> list[Node]:
    """Megatron's column and row splits; sequence parallelism is a layout of the residual stream.

    The rest (rotary, attention core, output and down projections, activation, loss) follows by
    propagation from these nodes.
    """
    if plan.tp == 1 or not isinstance(spec, ModelSpec):
        return []
    nodes = [
        *(
            Node(pattern=pattern, computation={"vocab": ("tp",)})
            for pattern, present in (
                ("embedding.word", spec.image is None),
                ("bridge.*.word", spec.decoder_layers > 0),
                ("head.logits", spec.head in ("lm", "mlm", "pretraining")),
            )
            if present
        ),
        *(
            Node(pattern=f"{part}.{name}", computation={"heads": ("tp",)})
            for part in attention_paths(spec)
            for name in ("q", "k", "v")
        ),
        *(
            Node(pattern=f"{block}.*.mlp.{name}", computation={"ffn": ("tp",)})
            for block in stack_names(spec)
            for name in (("up", "gate") if spec.gated else ("up",))
        ),
    ]
    if plan.sequence_parallel:
        nodes += [
            Node(pattern=path, computation={"seq": ("cp", "tp")})
            for path in _sequence_split_paths(spec)
        ]
    return nodes


def stack_names(spec: Model) -> tuple[str, ...]:
    """Returns the names of the blocks that repeat ("": all of a model that is no transformer)."""
    if not isinstance(spec, ModelSpec):
        return ("",)
    return STACKS if spec.decoder_layers else ("layers",)


def attention_paths(spec: ModelSpec) -> list[str]:
    """Returns the paths of all attention parts."""
    paths = [f"{block}.*.attention" for block in stack_names(spec)]
    return [*paths, "decoder.*.cross"] if spec.decoder_layers else paths


def _sequence_split_paths(spec: ModelSpec) -> list[str]:
    """What sums partial results into a split sequence and is no residual."""
    after = {
        "embedding.position": spec.positions == "learned",
        "embedding.token_type": spec.token_types > 0,
        "embedding.type_sum": spec.token_types > 0,
        "embedding.norm": spec.embedding_norm,
        "embedding.dropout": spec.dropout > 0,
        "layers.*.attention.norm_after": spec.norm_order == "both",
        "layers.*.mlp.norm_after": spec.norm_order == "both",
        "bridge.*.position": spec.decoder_layers > 0 and spec.positions == "learned",
        "bridge.*.target_dropout": spec.decoder_layers > 0 and spec.dropout > 0,
    }
    return [path for path, present in after.items() if present]


def _recompute_nodes(plan: Plan, spec: Model) -> list[Node]:
    """Recompute for all layers, or for the first `layers` of every virtual stage."""
    mode, count = plan.recompute.word, plan.recompute.layers
    if mode == "none":
        return []
    if count is None:
        return [Node(pattern=pattern, recompute=mode) for pattern in stack_names(spec)]
    if not isinstance(spec, ModelSpec):
        return []
    paths = [
        f"{block}.{i}"
        for block in stack_names(spec)
        for i in range(spec.decoder_layers if block == "decoder" else spec.layers)
    ]
    nodes: list[Node] = []
    start = 0
    for layers in build_schedule(plan, spec.depth, 1).stages:
        chosen = paths[start : start + min(count, layers)]
        nodes += [Node(pattern=path, recompute=mode) for path in chosen]
        start += layers
    return nodes


def _runtime(plan: Plan, stack: Stack, mesh: Mesh) -> Runtime:
    """The overlap and bucket defaults of the preset, unless the plan states them."""
    unsharded = stack.whole_gradients and not plan.zero
    overlapping = unsharded or plan.preset in ("ddp", "dlrm", "fsdp", "deepspeed")

    def choose(value: bool | None, default: bool) -> bool:
        return default if value is None else value

    bucket = plan.bucket_mib
    first = None
    if bucket is None and plan.preset in ("ddp", "dlrm"):
        bucket, first = DDP_BUCKET_MIB, DDP_FIRST_BUCKET_MIB
    elif bucket is None and plan.preset == "deepspeed":
        bucket = 5e8 * 2 / MIB
    elif bucket is None and plan.preset == "megatron":
        dp = mesh.size(DATA_AXES)
        usual = max(40e6, 1e6 * dp) * 4 / MIB
        bucket = float(stack.defaults.get("bucket_mib", usual))
        if stack.whole_gradients and plan.zero:
            bucket = None  # one all-reduce of the whole buffer
    return Runtime(
        bucket_bytes=None if bucket is None else bucket * MIB,
        first_bucket_bytes=None if first is None else first * MIB,
        prefetch=plan.prefetch,
        overlap_grad=choose(plan.overlap.grad, overlapping),
        overlap_param=choose(plan.overlap.param, plan.preset == "fsdp" or (plan.zero or 0) >= 3),
        overlap_tp=choose(plan.overlap.tp, stack.overlap_tp),
        overlap_p2p=choose(plan.overlap.p2p, stack.overlap_p2p and plan.interleave > 1),
        offload=plan.offload,
        offload_fraction=plan.optimizer_offload_fraction,
        offload_layers=plan.cpu_offloading_num_layers,
        staged_buckets=_staged_buckets(plan, stack),
        overlap_tables=choose(plan.overlap.tables, default=True),
    )


def _staged_buckets(plan: Plan, stack: Stack) -> float:
    """DDP keeps its buckets beside the gradients; DeepSpeed and apex copy to one at a time."""
    if stack.ddp_buckets and not plan.zero:
        return ALL_BUCKETS
    if stack.flat_buckets:
        return 1.0
    return {"ddp": ALL_BUCKETS, "deepspeed": 1.0}.get(plan.preset, 0.0)


_SplitForm = dict[str, str | list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeForm:
    """The settings of a node as they stand in a file."""

    computation: _SplitForm = field(default_factory=_SplitForm)
    memory: dict[str, _SplitForm] = field(default_factory=dict[str, _SplitForm])
    recompute: str | None = None
    keep_gathered: bool | None = None
    reshard: bool | None = None
    owner: int | None = None
    sparse: bool | None = None


_NODE_KEYS = (
    "computation", "memory", "recompute", "keep_gathered", "reshard", "owner", "sparse",
)  # fmt: skip


def node_from_mapping(pattern: str, value: Mapping[str, Any]) -> Node:
    """Returns a Node from the mapping form used by `overrides` and by `explain plan`.

    {computation: {dim: axis or [axes]}, memory: {role: {dim: [axes]}}, recompute: mode, ...}
    Raises PlanError for unknown keys and values of the wrong form.
    """
    unknown = [key for key in value if key not in _NODE_KEYS]
    if unknown:
        raise PlanError(
            [
                Problem(
                    what="unknown setting of a strategy node",
                    where=f"plan.overrides[{pattern!r}].{key}",
                    value=key,
                    allowed=", ".join(_NODE_KEYS),
                )
                for key in unknown
            ]
        )
    where = f"plan.overrides[{pattern!r}]"
    form = convert_form(value, _NodeForm, where, way_out="{computation: {dim: [axes]}, ...}")
    return Node(
        pattern=pattern,
        computation=_splits(form.computation),
        memory={role: _splits(split) for role, split in form.memory.items()},
        recompute=form.recompute,
        keep_gathered=form.keep_gathered,
        reshard=form.reshard,
        owner=form.owner,
        sparse=form.sparse,
    )


def convert_form(value: object, form: type[T], where: str, *, way_out: str) -> T:
    """Returns `value` as `form`, types checked; PlanError that names the place of a wrong value."""
    try:
        return msgspec.convert(value, form)
    except msgspec.ValidationError as error:
        raise PlanError(Problem(what=str(error), where=where, way_out=way_out)) from None


def _splits(form: _SplitForm) -> dict[str, tuple[str, ...]]:
    """One axis may be written without a list."""
    return {dim: (axes,) if isinstance(axes, str) else tuple(axes) for dim, axes in form.items()}
