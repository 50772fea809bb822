"""What a plan must satisfy: pure functions from model, plan and batch to a list of problems.

Each problem names the values in conflict, the allowed values and the nearest valid choice. Nothing
here stops at the first problem, and nothing here changes a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretrain.errors import Problem
from foretrain.frontends.spec import ConvSpec, Model, ModelSpec, RecSpec, num_layers
from foretrain.strategy.check_sync import check_no_sync
from foretrain.strategy.choices import (
    choice_of,
    divisors,
    even_stages,
    multiple_of,
    with_way_out,
)
from foretrain.strategy.context import check_context
from foretrain.strategy.plan import Plan
from foretrain.strategy.tables import check_no_tables, check_rec_plan

#: More micro-batches than any real step has; a typing error would keep the simulator busy for long.
MAX_MICROBATCHES = 100_000
#: The same for micro-batches x stages x chunks, each of which is simulated.
MAX_SLOTS = 250_000

#: ZeRO stages that each preset's framework offers.
ZERO_STAGES: dict[str, tuple[int, ...]] = {
    "megatron": (0, 1, 2, 3),
    "fsdp": (0, 2, 3),
    "deepspeed": (0, 1, 2, 3),
    "ddp": (0, 1),
    "dlrm": (0,),
    "plain": (0,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What a plan is checked against besides the model: batch, length and number of devices."""

    num_devices: int
    sequence: int | None
    global_batch: int
    microbatch: int
    target_sequence: int | None = None

    def microbatches(self, dp: int) -> int:
        """Returns the whole micro-batches of one data-parallel rank and optimizer step."""
        return self.global_batch // (self.microbatch * dp)


def check_plan(spec: Model, plan: Plan, numbers: Numbers) -> list[Problem]:
    """Returns everything that is wrong with a plan, empty when it is valid."""
    problems = check_degrees(spec, plan, numbers.num_devices)
    if isinstance(spec, ConvSpec):
        problems += check_conv_plan(spec, plan)
    elif isinstance(spec, RecSpec):
        problems += check_rec_plan(spec, plan, numbers.num_devices)
    if not isinstance(spec, RecSpec):
        problems += check_no_tables(spec, plan)
        problems += check_context(spec, plan, numbers.sequence)
    if isinstance(spec, ModelSpec):
        problems += [
            *check_tensor_parallel(spec, plan, numbers),
            *check_stages(spec, plan),
            *check_sequence(spec, numbers.sequence, "sequence"),
            *check_sequence(spec, numbers.target_sequence, "target_sequence"),
        ]
    dp = data_parallel(plan, numbers.num_devices)
    if dp is not None:
        problems += [
            *check_batch(numbers, dp),
            *check_schedule(plan, numbers, dp),
            *check_sharding(plan, dp),
            *check_no_sync(plan, numbers.microbatches(dp)),
            *check_offload(plan),
            *check_activation_offload(spec, plan),
        ]
    return problems


def check_offload(plan: Plan) -> list[Problem]:
    """Returns what is wrong with the offload to the host: weights need shards to come from."""
    if plan.offload != "parameters" or (plan.zero or 0) >= 3:
        return []
    return [
        Problem(
            what="parameters are offloaded as shards, which ZeRO stage 3 makes",
            where="plan.offload",
            value=plan.offload,
            allowed="none, optimizer",
            way_out="use zero 3 (preset fsdp or deepspeed), or offload: optimizer",
        )
    ]


def check_activation_offload(spec: Model, plan: Plan) -> list[Problem]:
    """Returns what does not go with activations on the host (as Megatron refuses it)."""
    count, where = plan.cpu_offloading_num_layers, "plan.cpu_offloading_num_layers"
    if not count:
        return []
    problems: list[Problem] = []
    if not isinstance(spec, ModelSpec):
        what = f"{spec.name} has no equal layers to offload"
        problems.append(Problem(what=what, where=where, value=count, allowed="0"))
    elif count >= spec.depth:
        what = f"the last of the {spec.depth} layers is needed at once"
        problems.append(
            Problem(what=what, where=where, value=count, allowed=f"0 to {spec.depth - 1}")
        )
    if plan.pp > 1:
        what = "activations on the host do not go with pipeline stages"
        problems.append(Problem(what=what, where=where, value=count, way_out="use pp 1"))
    words = (plan.recompute.mode, *(node.get("recompute") for node in plan.overrides.values()))
    if any(word not in (None, "none") for word in words):
        what = "activations on the host do not go with recompute"
        way_out = "use recompute: none, or leave cpu_offloading_num_layers out"
        problems.append(Problem(what=what, where=where, value=count, way_out=way_out))
    return problems


def check_conv_plan(spec: ConvSpec, plan: Plan) -> list[Problem]:
    """Returns what a plan asks of a convolutional network that is not modelled."""
    problems: list[Problem] = []

    def refuse(key: str, what: str, value: object, allowed: str, way_out: str = "") -> None:
        problems.append(
            Problem(what=what, where=f"plan.{key}", value=value, allowed=allowed, way_out=way_out)
        )

    if plan.pp > 1:
        refuse("pp", f"pipeline stages of {spec.name} are not modelled", plan.pp, "1")
    if plan.tp > 1 and not plan.overrides and plan.tree is None:
        refuse("tp", f"no operator of {spec.name} is split over tp", plan.tp, "1",
               "split some with plan.overrides: {head.fc: {computation: {out: tp}}}")  # fmt: skip
    if plan.recompute.mode == "selective" or plan.recompute.layers is not None:
        refuse("recompute", f"{spec.name} has no attention core and no equal layers",
               plan.recompute.mode, "none, full")  # fmt: skip
    return problems


def data_parallel(plan: Plan, num_devices: int) -> int | None:
    """Returns devices / (tp x pp x cp), None when that is not whole or not the given dp."""
    dp, rest = divmod(num_devices, plan.tp * plan.pp * plan.cp)
    if rest or dp == 0 or (plan.dp is not None and plan.dp != dp):
        return None
    return dp


def check_degrees(spec: Model, plan: Plan, num_devices: int) -> list[Problem]:
    """Returns the problem of degrees whose product is not the number of devices."""
    if data_parallel(plan, num_devices) is not None:
        return []
    model_parallel = plan.tp * plan.pp * plan.cp
    terms = f"tp {plan.tp} x pp {plan.pp}" + (f" x cp {plan.cp}" if plan.cp > 1 else "")
    if num_devices % model_parallel == 0:
        dp = num_devices // model_parallel
        what = f"{terms} x dp {plan.dp} = {model_parallel * (plan.dp or 1)}"
        return [
            Problem(
                what=f"{what}, but the cluster has {num_devices} devices",
                where="plan.dp",
                value=plan.dp,
                allowed=f"{dp}",
                way_out=f"leave dp out, or use a cluster of {model_parallel * (plan.dp or 1)}",
            )
        ]
    key, allowed = _degree_to_change(spec, plan, num_devices)
    value = {"tp": plan.tp, "pp": plan.pp, "cp": plan.cp}[key]
    what = f"{terms} = {model_parallel} does not divide the {num_devices} devices of the cluster"
    return [choice_of(what, f"plan.{key}", value, allowed, key)]


def _degree_to_change(spec: Model, plan: Plan, num_devices: int) -> tuple[str, list[int]]:
    """The degree that is wrong by itself (else cp, else pp), and the values that would do."""
    rest = num_devices // (plan.tp * plan.pp)
    if plan.cp > 1 and rest and num_devices % (plan.tp * plan.pp) == 0:
        return "cp", divisors(rest)
    pipeline = [
        p
        for p in divisors(num_devices // plan.tp or 1)
        if num_devices % (plan.tp * p) == 0 and num_layers(spec) % (p * plan.interleave) == 0
    ]
    if plan.pp == 1 or num_devices % plan.tp or not pipeline:
        return "tp", tensor_degrees(spec, num_devices)
    return "pp", pipeline


def tensor_degrees(spec: Model, num_devices: int) -> list[int]:
    """Returns the tensor-parallel degrees that suit heads, MLP width and the devices."""
    if not isinstance(spec, ModelSpec):
        return [1]
    return [
        t
        for t in divisors(num_devices)
        if spec.heads % t == 0 and _kv_fits(spec, t) and spec.ffn % t == 0
    ]


def _kv_fits(spec: ModelSpec, tp: int) -> bool:
    # fewer key-value heads than ranks: each head is kept by tp / kv_heads ranks
    return spec.kv_heads % tp == 0 or tp % spec.kv_heads == 0


def check_tensor_parallel(spec: ModelSpec, plan: Plan, numbers: Numbers) -> list[Problem]:
    """Returns the dims of the model that tensor parallelism cannot split evenly."""
    tp = plan.tp
    if tp == 1:
        return []
    allowed = tensor_degrees(spec, numbers.num_devices)
    problems: list[Problem] = []

    def refuse(what: str) -> None:
        problems.append(choice_of(what, "plan.tp", tp, allowed, "tp"))

    if spec.heads % tp:
        refuse(f"tp {tp} does not divide the {spec.heads} attention heads")
    elif not _kv_fits(spec, tp):
        refuse(f"tp {tp} is no divisor or multiple of the {spec.kv_heads} key-value heads")
    if spec.ffn % tp:
        refuse(f"tp {tp} does not divide the MLP width {spec.ffn}")
    if spec.vocab % tp:
        what = f"tp {tp} does not divide the vocabulary of {spec.vocab}"
        up = -(-spec.vocab // tp) * tp
        way_out = f"pad it (--set model.vocab={up}); the presets megatron and deepspeed do"
        problems.append(Problem(what=what, where="plan.tp", value=tp, way_out=way_out))
    if plan.sequence_parallel and not problems:
        lengths = {"sequence": numbers.sequence, "target_sequence": numbers.target_sequence}
        problems += [
            multiple_of(
                f"{key} {length} is not a multiple of tp {tp}, which sequence_parallel needs",
                f"training.{key}",
                length,
                tp,
            )
            for key, length in lengths.items()
            if length and length % tp
        ]
    return problems


def check_stages(spec: ModelSpec, plan: Plan) -> list[Problem]:
    """Returns what is wrong with the division of the layers over virtual stages."""
    chunks = plan.pp * plan.interleave
    terms = f"pp {plan.pp}" + (f" x interleave {plan.interleave}" if plan.interleave > 1 else "")
    if plan.stages is not None:
        problems: list[Problem] = []
        if len(plan.stages) != chunks:
            what = f"stages has {len(plan.stages)} entries, {terms} needs {chunks}"
            problems.append(Problem(what=what, where="plan.stages", value=list(plan.stages)))
        if sum(plan.stages) != spec.depth:
            what = f"stages add up to {sum(plan.stages)} layers, {spec.name} has {spec.depth}"
            way_out = f"e.g. {even_stages(spec.depth, chunks)}" if chunks <= spec.depth else ""
            value = list(plan.stages)
            problems.append(Problem(what=what, where="plan.stages", value=value, way_out=way_out))
        return problems
    if spec.depth % chunks == 0:
        return []
    what = f"{terms} = {chunks} virtual stages do not divide the {spec.depth} layers evenly"
    key = "interleave" if plan.interleave > 1 and spec.depth % plan.pp == 0 else "pp"
    if key == "interleave":
        allowed = divisors(spec.depth // plan.pp)
    else:
        allowed = [p for p in divisors(spec.depth) if spec.depth % (p * plan.interleave) == 0]
    value = plan.interleave if key == "interleave" else plan.pp
    problem = choice_of(what, f"plan.{key}", value, allowed, key)
    if chunks > spec.depth:
        return [problem]
    stages = ", ".join(str(n) for n in even_stages(spec.depth, chunks))
    return [with_way_out(problem, f"or give stages: [{stages}]")]


def check_schedule(plan: Plan, numbers: Numbers, dp: int) -> list[Problem]:
    """Returns what is wrong between schedule, interleaving, in-flight limit and micro-batches."""
    problems: list[Problem] = []
    count = numbers.microbatches(dp)
    if plan.schedule == "interleaved" and plan.interleave == 1 and plan.pp > 1:
        what = "the interleaved schedule needs several chunks per rank"
        problems.append(Problem(what=what, where="plan.interleave", value=1, allowed="2 or more"))
    if plan.schedule in ("1f1b", "gpipe") and plan.interleave > 1 and plan.pp > 1:
        what = f"schedule {plan.schedule} has one chunk per rank, interleave is {plan.interleave}"
        way_out = "use schedule interleaved, or interleave 1"
        problems.append(Problem(what=what, where="plan.schedule", way_out=way_out))
    if plan.interleave > 1 and plan.pp > 1 and count % plan.pp:
        unit = numbers.microbatch * dp * plan.pp
        what = (
            f"{count} micro-batches are not a multiple of pp {plan.pp}, which the interleaved "
            "schedule needs"
        )
        value = numbers.global_batch
        problems.append(multiple_of(what, "training.global_batch", value, unit))
    if count > MAX_MICROBATCHES:
        what = f"{count} micro-batches per step"
        problems.append(
            Problem(what=what, where="training.global_batch", allowed=f"<= {MAX_MICROBATCHES}")
        )
    slots = count * plan.pp * plan.interleave
    if count <= MAX_MICROBATCHES and slots > MAX_SLOTS and plan.pp > 1:
        what = f"{count} micro-batches on {plan.pp * plan.interleave} stages and chunks: {slots}"
        problems.append(
            Problem(what=what, where="training.global_batch", allowed=f"a product <= {MAX_SLOTS}")
        )
    return problems + _check_in_flight(plan, count)


def _check_in_flight(plan: Plan, count: int) -> list[Problem]:
    if plan.in_flight is None:
        return []
    if plan.interleave > 1:
        return [
            Problem(
                what="a limit of micro-batches in flight does not go with interleaving",
                where="plan.in_flight",
                value=plan.in_flight,
                way_out="leave in_flight or interleave out",
            )
        ]
    limits = (plan.in_flight,) if isinstance(plan.in_flight, int) else plan.in_flight
    value = plan.in_flight if isinstance(plan.in_flight, int) else list(plan.in_flight)
    problems: list[Problem] = []
    if not isinstance(plan.in_flight, int) and len(limits) != plan.pp:
        what = f"in_flight has {len(limits)} entries, pp is {plan.pp}"
        problems.append(Problem(what=what, where="plan.in_flight", value=value))
    most = count
    if count >= 1 and not all(1 <= limit <= most for limit in limits):
        what = f"out of range: a step has {count} micro-batches"
        problems.append(
            Problem(what=what, where="plan.in_flight", value=value, allowed=f"1 to {most}")
        )
    return problems


def check_batch(numbers: Numbers, dp: int) -> list[Problem]:
    """Returns the problem of a global batch that is not whole micro-batches on every rank."""
    unit = numbers.microbatch * dp
    if numbers.global_batch % unit == 0:
        return []
    what = (
        f"global_batch {numbers.global_batch} is not a multiple of microbatch x dp = "
        f"{numbers.microbatch} x {dp} = {unit}"
    )
    return [multiple_of(what, "training.global_batch", numbers.global_batch, unit)]


def check_sequence(spec: ModelSpec, sequence: int | None, key: str) -> list[Problem]:
    """Returns the problem of a length beyond a learned table of positions."""
    limit = spec.max_positions
    if sequence is None or limit is None or sequence <= limit or spec.positions != "learned":
        return []
    what = f"longer than the {limit} learned positions of {spec.name}"
    return [
        Problem(
            what=what,
            where=f"training.{key}",
            value=sequence,
            allowed=f"1 to {limit}",
            way_out="a longer table is another model: --set model.max_positions=" + str(sequence),
        )
    ]


def check_sharding(plan: Plan, dp: int) -> list[Problem]:
    """Returns what is wrong with ZeRO stage and sharding group."""
    problems: list[Problem] = []
    stages = ZERO_STAGES.get(plan.preset, (0, 1, 2, 3))
    if plan.preset == "deepspeed" and plan.pp > 1:
        stages = (0, 1)  # its pipeline engine refuses to shard gradients and weights
    if plan.zero is not None and plan.zero not in stages:
        what = f"preset {plan.preset}" + (" with pipeline stages" if plan.pp > 1 else "")
        allowed = ", ".join(str(stage) for stage in stages)
        what = f"{what} has no ZeRO stage {plan.zero}"
        problems.append(Problem(what=what, where="plan.zero", value=plan.zero, allowed=allowed))
    if plan.shard is not None and (plan.shard > dp or dp % plan.shard):
        what = f"shard {plan.shard} does not divide the {dp} data-parallel ranks"
        problems.append(choice_of(what, "plan.shard", plan.shard, divisors(dp), "shard"))
    return problems
