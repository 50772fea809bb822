"""Reading a run: a YAML or JSON file, a mapping, or flags alone, settled into a RunSpec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foretrain.errors import PlanError, Problem
from foretrain.frontends.spec import ConvSpec, Model, ModelSpec, RecSpec
from foretrain.hardware.cluster import Cluster
from foretrain.run.aliases import OPTIMIZER_SYNONYMS, OPTIMIZERS
from foretrain.run.batch import Batch, settle_batch
from foretrain.run.defaults import (
    drop_foreign_settings,
    drop_idle_settings,
    pad_vocabulary,
    plan_warnings,
    settle_plan,
    stack_lines,
    usual_optimizer,
)
from foretrain.run.fields import Fields, collect_fields
from foretrain.run.given_tree import adopt_tree, check_tree
from foretrain.run.idle_keys import idle_keys
from foretrain.run.idle_roles import idle_roles
from foretrain.run.lookups import read_table_optimizer, with_lookups
from foretrain.run.parts import read_cluster, read_model, read_stack
from foretrain.run.plan_keys import read_plan, read_preset, refused_overrides
from foretrain.run.precision import (
    PURE,
    check_precision,
    expand_precision,
    odd_roles,
    read_precision,
)
from foretrain.run.spec import RunSpec, Training
from foretrain.run.stacks import USUAL_STACK, load_stack, usual_stack
from foretrain.run.values import Section
from foretrain.run.yaml_file import Document, read_document
from foretrain.stack import Stack
from foretrain.strategy.checks import Numbers, check_plan, data_parallel
from foretrain.strategy.plan import Plan
from foretrain.strategy.stages import stages_by_cost


def load_run(
    source: str | Path | Mapping[str, Any] | None = None,
    *,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> RunSpec:
    """Returns the resolved run of a file, a mapping or flags.

    Args:
        source: path of a YAML or JSON run file, the same content as a mapping, or None when the
            flags say everything.
        overrides: `plan.tp=4` texts, or a mapping of such paths; laid over file and flags.
        flags: fields by bare name (`tp`) or path (`plan.tp`); None values are absent.

    Raises:
        InputError: with every problem found in the file, the names, the plan and the batch.
    """
    document = _document(source)
    fields = collect_fields(document, flags, overrides)
    run = _settle(fields, Path(document.name).parent if document.name else None)
    if run is None or fields.problems:
        raise fields.error()
    return run


def _document(source: str | Path | Mapping[str, Any] | None) -> Document:
    if source is None:
        return Document(values={})
    if isinstance(source, Mapping):
        return Document(values={str(key): value for key, value in source.items()})
    return read_document(Path(source))


def _settle(fields: Fields, folder: Path | None) -> RunSpec | None:
    """Returns the run, None when too much is wrong to go on; problems end in `fields`."""
    lines: list[str] = []
    model = read_model(fields, folder)
    cluster = read_cluster(fields, folder)
    section = Section(path="plan", values=fields.section("plan"), problems=fields.problems)
    preset, stack = _preset_and_stack(fields, folder, section, cluster, lines, model=model)
    plan = read_plan(section, preset=preset)
    fields.refuse(refused_overrides(plan), PlanError)
    words = _read_words(fields, model, cluster, lines)
    model = with_lookups(fields, model, folder, lines)
    if model is None or cluster is None or stack is None:
        return None
    given = {key for key in section.values if section.has(key)}
    plan, foreign = drop_foreign_settings(model, plan)
    fields.refuse(foreign, PlanError)
    plan, tree = adopt_tree(fields, plan, given)
    plan, warnings = drop_idle_settings(plan, given)
    usual = (USUAL_STACK[preset], "pytorch-vision", "pytorch-vision-nhwc")
    if stack.preset != preset and "stack" in fields.values and stack.name not in usual:
        warnings.append(f"stack {stack.name} is usual with preset {stack.preset}, not {preset}")
    plan, taken = settle_plan(plan, given)
    plan = _divide_layers(plan, model, stack, lines)
    if plan.expandable_segments is not None:
        stack = replace(stack, expandable_segments=plan.expandable_segments)
    model, padded = pad_vocabulary(model, plan)
    training = _training(fields, words, model, plan, stack, cluster, lines)
    if training is None:
        return None
    if tree is None:
        plan = _without_idle(plan, training, cluster, warnings)
    lines += stack_lines(model, stack, training.roles, words.roles)
    if training.roles.weight != "fp32":  # nothing to cast: every operator runs in that type
        stack = replace(stack, autocast_bytes={})
    dp = data_parallel(plan, cluster.world_size)
    if dp is not None:
        count = training.accumulation(dp)
        if tree is not None:
            size = cluster.world_size
            fields.refuse(check_tree(tree, num_devices=size, accumulation=count), PlanError)
        stated = given | {"table_optimizer"} & fields.section("training").keys()
        warnings += idle_keys(stated, plan, model, dp=dp, steps=count)
        warnings += _late_warnings(words.roles, plan, model, stack, training, dp)
    return RunSpec(
        model=model,
        training=training,
        plan=replace(plan, dp=dp),
        cluster=cluster,
        stack=stack,
        assumptions=(*model.assumed, *cluster.notes, *lines, *taken, *padded),
        warnings=tuple(warnings),
        source={key: value for key, value in fields.values.items() if value},
    )


def _late_warnings(
    roles: Mapping[str, str], plan: Plan, model: Model, stack: Stack, training: Training, dp: int
) -> list[str]:
    """Warnings that need the batch: roles that do not act, and what is rarely wanted."""
    count, sequence = training.accumulation(dp), training.sequence or 0
    idle = idle_roles(roles, plan, stack, optimizer=training.optimizer, data=dp * plan.cp)
    return idle + plan_warnings(model, plan, stack, sequence=sequence, microbatches=count)


def _without_idle(plan: Plan, training: Training, cluster: Cluster, warnings: list[str]) -> Plan:
    """The plan without sums over one micro-batch and an offload that has nothing to move."""
    dp = data_parallel(plan, cluster.world_size)
    single = dp is not None and training.accumulation(dp) == 1
    if plan.no_sync and (single or dp == plan.cp == 1):
        plan = replace(plan, no_sync=None)
        why = "the step has one micro-batch" if single else "one rank holds each weight"
        warnings.append(f"plan.no_sync has no effect: {why}")
    if training.optimizer == "none" and plan.offload == "optimizer":
        plan = replace(plan, offload="none", optimizer_offload_fraction=1.0)
        warnings.append("plan.offload has no effect: the optimizer is none")
    return plan


def _divide_layers(plan: Plan, model: Model, stack: Stack, lines: list[str]) -> Plan:
    """The layers of each stage where the stack does not divide them evenly."""
    divides = stack.stage_split == "by_cost" and plan.interleave == 1
    if not divides or plan.stages is not None or not isinstance(model, ModelSpec):
        return plan
    if not 1 < plan.pp <= model.layers:
        return plan
    stages = stages_by_cost(model, plan.pp)
    lines.append(f"stages = {list(stages)} (stack {stack.name} divides layers by their cost)")
    return replace(plan, stages=stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """The training section as given; None where a word is absent or wrong."""

    sequence: int | None
    target_sequence: int | None
    image: int | None
    global_batch: int | None
    microbatch: int | None
    accumulation: int | None
    precision: str
    roles: Mapping[str, str]
    optimizer: str
    table_optimizer: str


def _read_words(
    fields: Fields, model: Model | None, cluster: Cluster | None, lines: list[str]
) -> _Words:
    section = Section(path="training", values=fields.section("training"), problems=fields.problems)
    sequence, image = _read_size(fields, section, model, lines)
    target = _read_target(section, model, sequence, lines)
    has_bf16 = cluster is None or cluster.device.supports("bf16")
    default = "bf16" if has_bf16 else "fp16"
    precision, roles = read_precision(section, default)
    if not section.has("precision") or (roles and "compute" not in roles):
        why = "not given" if has_bf16 else "not given; the device has no bf16"
        lines.append(f"precision = {precision} ({why})")
    optimizer = section.choice("optimizer", OPTIMIZERS, OPTIMIZER_SYNONYMS)
    optimizer = optimizer or usual_optimizer(model)
    if not section.has("optimizer"):
        lines.append(f"optimizer = {optimizer} (not given)")
    return _Words(
        sequence=sequence,
        target_sequence=target,
        image=image,
        global_batch=section.integer("global_batch"),
        microbatch=section.integer("microbatch"),
        accumulation=section.integer("accumulation"),
        precision=precision,
        roles=roles,
        optimizer=optimizer,
        table_optimizer=read_table_optimizer(section, model, optimizer, lines),
    )


def _read_size(
    fields: Fields, section: Section, model: Model | None, lines: list[str]
) -> tuple[int | None, int | None]:
    """The size of a sample: (tokens, None) or (None, pixels); its tables size a DLRM's."""
    if isinstance(model, RecSpec):
        for key in ("sequence", "image"):
            if section.has(key):
                what = f"{model.name} reads dense features and table rows"
                section.refuse(key, what, section.values[key], way_out=f"leave {key} out")
        return None, None
    images = isinstance(model, ConvSpec)
    other, way_out = ("sequence", "image: 224") if images else ("image", "sequence: 4096")
    if model is not None and section.has(other):
        what = f"{model.name} is trained on {'images' if images else 'tokens'}"
        section.refuse(other, what, section.values[other], way_out=f"e.g. {way_out}")
    if images:
        if not section.has("image"):
            lines.append(f"image = {model.image} (usual for {model.name})")
        return None, section.integer("image") or model.image
    fixed = model.image_sequence if model is not None else None
    if model is not None and fixed is None and not section.has("sequence"):
        what, way_out = "missing: the training length in tokens", "e.g. sequence: 4096"
        fields.refuse([Problem(what=what, where="training.sequence", way_out=way_out)], PlanError)
    return section.integer("sequence") or fixed, None


def _read_target(
    section: Section, model: Model | None, sequence: int | None, lines: list[str]
) -> int | None:
    """The decoder's length: as long as the encoder's unless given, None without a decoder."""
    if not isinstance(model, ModelSpec) or not model.decoder_layers:
        if model is not None and section.has("target_sequence"):
            value = section.values["target_sequence"]
            what = f"{model.name} has no decoder beside an encoder"
            section.refuse("target_sequence", what, value, way_out="leave it out")
        return None
    if not section.has("target_sequence"):
        lines.append(f"target_sequence = {sequence} (not given: as long as sequence)")
    return section.integer("target_sequence") or sequence


def _training(
    fields: Fields,
    words: _Words,
    model: Model,
    plan: Plan,
    stack: Stack,
    cluster: Cluster,
    lines: list[str],
) -> Training | None:
    """The settled training section; also checks the plan against model, batch and cluster."""
    dp = data_parallel(plan, cluster.world_size)
    batch = Batch(global_batch=words.global_batch or 1, microbatch=words.microbatch or 1)
    if dp is not None:
        batch = settle_batch(
            words.global_batch,
            words.microbatch,
            words.accumulation,
            dp=dp,
            pp=plan.pp,
            problems=fields.problems,
        )
        lines += batch.assumptions
    numbers = Numbers(
        num_devices=cluster.world_size,
        sequence=words.sequence,
        target_sequence=words.target_sequence,
        global_batch=batch.global_batch,
        microbatch=batch.microbatch,
    )
    fields.refuse(check_plan(model, plan, numbers), PlanError)
    fields.refuse(check_precision(words.precision, words.roles, cluster.device), PlanError)
    roles = expand_precision(words.precision, words.roles, preset=plan.preset, stack=stack)
    if roles is None:
        what = f"not modelled yet with stack {stack.name}"
        where, value = "training.precision", words.precision
        fields.refuse([Problem(what=what, where=where, value=value)], PlanError)
        return None
    fields.refuse(odd_roles(roles), PlanError)
    several = dp is not None and batch.global_batch > batch.microbatch * dp and dp * plan.cp > 1
    if plan.no_sync and several and "grad_accumulate" not in words.roles:
        # FSDP2 sums unsharded gradients in the dtype that it reduces them in
        roles = replace(roles, grad_accumulate=roles.grad_reduce)
        lines.append(f"gradients summed in {roles.grad_reduce} (no_sync, as they are reduced)")
    return Training(
        sequence=words.sequence,
        target_sequence=words.target_sequence,
        image=words.image,
        global_batch=batch.global_batch,
        microbatch=batch.microbatch,
        precision=PURE.get(words.precision, words.precision),
        roles=roles,
        optimizer=words.optimizer,
        table_optimizer=words.table_optimizer,
    )


def _preset_and_stack(
    fields: Fields,
    folder: Path | None,
    section: Section,
    cluster: Cluster | None,
    lines: list[str],
    *,
    model: Model | None,
) -> tuple[str, Stack | None]:
    """The preset given, else the stack's, else what suits the cluster; and its usual stack."""
    stack = read_stack(fields, folder)
    preset = read_preset(section)
    images = isinstance(model, ConvSpec)
    if preset is None:
        preset, why = ("ddp" if images else "megatron"), "not given"
        if stack is not None:
            preset, why = stack.preset, f"usual with stack {stack.name}"
        elif isinstance(model, RecSpec):
            preset = "dlrm"
        elif cluster is not None and cluster.world_size == 1:
            preset, why = "plain", "one device"
        lines.append(f"preset = {preset} ({why})")
    if stack is None and "stack" not in fields.values:
        generation = "" if cluster is None else cluster.device.generation
        stack = load_stack(usual_stack(preset, generation=generation, images=images))
        lines.append(f"stack = {stack.name} (usual with preset {preset} on {generation})")
    return preset, stack
