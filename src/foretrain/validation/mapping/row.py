"""One row becomes a run: model, device, cluster, stack, plan and training, put together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from foretrain.run.stacks import load_stack
from foretrain.validation.mapping.apart import is_apart, map_apart
from foretrain.validation.mapping.cluster import map_cluster
from foretrain.validation.mapping.device import map_device
from foretrain.validation.mapping.encoder import (
    BINNED,
    SQUAD_TOKENS,
    is_bert,
    is_binned,
    is_squad,
    map_bert,
    map_bert_optimizer,
    map_bert_stack,
)
from foretrain.validation.mapping.encoder_decoder import is_t5, map_t5, map_target
from foretrain.validation.mapping.model import map_model
from foretrain.validation.mapping.plan import map_plan
from foretrain.validation.mapping.recipes import (
    container_context,
    flash_settings,
    loss_chunks,
    recipe_plan,
    recipe_roles,
    row_scales,
)
from foretrain.validation.mapping.recsys import (
    is_recsys,
    map_rec_model,
    map_rec_plan,
    map_rec_precision,
    map_rec_stack,
    map_rec_training,
)
from foretrain.validation.mapping.stack import (
    map_attention,
    map_blocking,
    map_checks,
    map_kernel,
    map_scatter,
    map_stack,
)
from foretrain.validation.mapping.training import map_training
from foretrain.validation.mapping.vision import (
    is_convnet,
    map_convnet,
    map_vision_plan,
    map_vision_precision,
    map_vision_stack,
    map_vision_training,
)
from foretrain.validation.mapping.vision_transformer import (
    is_vit,
    map_vit,
    map_vit_optimizer,
    map_vit_plan,
    map_vit_stack,
)
from foretrain.validation.mapping.words import Assumed, Unsupported, has_word
from foretrain.validation.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """A run file's content, and what it does not hold: how the source used the software.

    `stack` has the values of the stack that differ for this run, e.g. the attention kernel as the
    source says. `padded`: whether the vocabulary is, as the preset does. `assumed` lists what the
    source does not state.
    """

    run: Mapping[str, Any]
    assumed: tuple[str, ...]
    stack: Mapping[str, Any] = field(default_factory=dict[str, Any])
    padded: bool = True

    @property
    def key(self) -> str:
        """Returns a text that is equal for equal runs."""
        return json.dumps([self.run, self.stack, self.padded], sort_keys=True)


def map_row(row: Row) -> Mapped:
    """Returns the run that a row describes.

    Raises:
        Unsupported: with the reason.
    """
    if is_vit(row):
        return _map_vit(row)
    if is_convnet(row):
        return _map_convnet(row)
    if is_recsys(row):
        return _map_recsys(row)
    assumed = Assumed()
    bert, t5 = is_bert(row), is_t5(row)
    if bert and not row.seq_len and is_squad(row):
        row = replace(row, seq_len=SQUAD_TOKENS)
        assumed.add(f"sequence = {SQUAD_TOKENS} (SQuAD; not stated)")
    mapper = map_bert if bert else map_t5 if t5 else map_model
    model = mapper(row, assumed)
    if row.unreadable:
        raise Unsupported(f"no number in {', '.join(row.unreadable)}")
    device = map_device(row, assumed)
    cluster = map_cluster(row, device, assumed)
    stack = load_stack((map_bert_stack if bert else map_stack)(row, assumed))
    plan = map_plan(row, stack, assumed)
    training = map_training(row, stack, assumed)
    _apply_recipe(row, plan, training, assumed)
    if bert:
        training["optimizer"] = map_bert_optimizer(row)
        if is_binned(row):
            training["sequence"] = BINNED
    if t5:
        training["target_sequence"] = map_target(assumed)
    run = {
        "model": model,
        "training": training,
        "plan": plan,
        "cluster": cluster,
        "stack": stack.name,
    }
    apart = is_apart(row)
    if apart:
        plan["recompute"] = map_apart(assumed)
    used = {
        "attention": map_attention(row) or ("unfused" if bert else None),
        "attention_kernel": map_kernel(row, stack),
        "optimizer": "fused" if has_word(row.optimizer, "fused") else None,
        "checked_collectives": map_checks(row, assumed) or None,
        "sync_blocks": apart or None,
        "scatter_gather": map_scatter(row, assumed),
        "launch_blocking": map_blocking(row, assumed) or None,
        "loss_chunks": loss_chunks(row, assumed),
        "context_gib": container_context(row, assumed),
        **row_scales(row, assumed),
    }
    return Mapped(
        run=run,
        assumed=tuple(assumed.lines),
        stack={key: value for key, value in used.items() if value is not None},
        padded=not apart,
    )


def _apply_recipe(
    row: Row, plan: dict[str, Any], training: dict[str, Any], assumed: Assumed
) -> None:
    """Adds what the published recipe of a row sets beyond its columns."""
    batch, sharding = flash_settings(row, assumed)
    training |= batch
    plan |= sharding
    given = training["precision"]
    precision = {"compute": given} if isinstance(given, str) else dict(given)
    word = precision["compute"]
    plan |= recipe_plan(row, plan, word, assumed)
    roles = recipe_roles(row, word, assumed)
    if roles:
        training["precision"] = {**precision, **roles}


def _map_vit(row: Row) -> Mapped:
    assumed = Assumed()
    model = map_vit(row, assumed)
    if row.unreadable:
        raise Unsupported(f"no number in {', '.join(row.unreadable)}")
    device = map_device(row, assumed)
    cluster = map_cluster(row, device, assumed)
    stack = map_vit_stack(row, assumed)
    training = map_vision_training(row, map_vision_precision(row, device, assumed), assumed)
    run = {
        "model": model,
        "training": {**_without_image(training), "optimizer": map_vit_optimizer(row)},
        "plan": map_vit_plan(row, stack),
        "cluster": cluster,
        "stack": stack,
    }
    # none of the sources calls a fused kernel
    return Mapped(run=run, assumed=tuple(assumed.lines), stack={"attention": "unfused"})


def _without_image(training: Mapping[str, Any]) -> dict[str, Any]:
    """The size of the images is a part of the model, because its positions depend on it."""
    return {key: value for key, value in training.items() if key != "image"}


def _map_convnet(row: Row) -> Mapped:
    assumed = Assumed()
    model = map_convnet(row)
    if row.unreadable:
        raise Unsupported(f"no number in {', '.join(row.unreadable)}")
    device = map_device(row, assumed)
    cluster = map_cluster(row, device, assumed)
    precision = map_vision_precision(row, device, assumed)
    run = {
        "model": model,
        "training": map_vision_training(row, precision, assumed),
        "plan": map_vision_plan(row),
        "cluster": cluster,
        "stack": map_vision_stack(row, precision, assumed),
    }
    return Mapped(run=run, assumed=tuple(assumed.lines))


def _map_recsys(row: Row) -> Mapped:
    assumed = Assumed()
    model = map_rec_model(row, assumed)
    if row.unreadable:
        raise Unsupported(f"no number in {', '.join(row.unreadable)}")
    device = map_device(row, assumed)
    cluster = map_cluster(row, device, assumed)
    precision = map_rec_precision(row, device, assumed)
    run = {
        "model": model,
        "training": map_rec_training(row, model, precision, assumed),
        "plan": map_rec_plan(row, assumed),
        "cluster": cluster,
        "stack": map_rec_stack(row, assumed),
    }
    return Mapped(run=run, assumed=tuple(assumed.lines))
