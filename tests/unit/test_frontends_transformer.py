"""The transformer graph: structure, sizes, parameters and FLOP against hand numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretrain.errors import InputError
from foretrain.frontends.catalog import find_model
from foretrain.frontends.families import ENCODER_DECODERS, FAMILIES, model_from_mapping
from foretrain.frontends.flops import model_flops_per_sample
from foretrain.frontends.spec import ModelSpec
from foretrain.frontends.transformer import build_graph
from foretrain.graph.ir import Graph
from foretrain.graph.text import graph_text


def count_parameters(spec: ModelSpec) -> int:
    """The closed form, written apart from the graph."""
    h, q, kv = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    norm = h * (2 if spec.norm == "layernorm" and spec.norm_bias else 1)
    wide = 2 if spec.gated else 1
    num_norms = 1 if spec.parallel and spec.shared_norm else 2
    num_norms = 4 if spec.norm_order == "both" and not spec.parallel else num_norms
    layer = num_norms * norm + h * (q + 2 * kv) + q * h + (wide + 1) * h * spec.ffn
    layer += (q + 2 * kv) * spec.qkv_bias + h * spec.out_bias
    layer += (wide * spec.ffn + h) * spec.mlp_bias
    per_head = 2 if spec.norm == "layernorm" and spec.norm_bias else 1
    layer += 2 * per_head * spec.head_dim * spec.qk_norm
    ends = norm * spec.final_norm + norm * spec.embedding_norm + spec.token_types * h
    if spec.image is None:
        ends += spec.vocab * (spec.projection or h) + h * (spec.projection or 0)
    else:
        ends += h * (spec.channels * (spec.patch or 0) ** 2 + 1) + h * spec.class_token
    rows = (spec.image_sequence or spec.max_positions or 0) + spec.position_padding
    ends += rows * h if spec.positions == "learned" else 0
    return spec.layers * layer + ends + count_head(spec, norm)


def count_head(spec: ModelSpec, norm: int) -> int:
    h, count = spec.hidden, 0
    if spec.head in ("lm", "mlm", "pretraining"):
        count += 0 if spec.tied else spec.vocab * (spec.projection or h)
        count += h * (spec.projection or 0)
    if spec.head == "lm":
        count += spec.vocab * spec.head_bias
    if spec.head in ("mlm", "pretraining"):
        count += h * h + h + norm + spec.vocab
    if spec.pooler and spec.head in ("pretraining", "classification", "none"):
        count += h * h + h
    if spec.head in ("pretraining", "classification"):
        count += (h + 1) * spec.classes
    return count


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    family = draw(st.sampled_from(sorted(set(FAMILIES) - set(ENCODER_DECODERS))))
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    heads = kv_heads * group
    flags = {name: draw(st.booleans()) for name in ("qkv_bias", "out_bias", "mlp_bias")}
    images = family == "vit"
    extra: dict[str, object] = {"vocab": draw(st.integers(1, 100)), "max_positions": 64}
    if images:
        extra = {"image": 8 * draw(st.integers(1, 4)), "patch": draw(st.sampled_from([4, 8]))}
        extra["class_token"] = draw(st.booleans())
    elif draw(st.booleans()):
        extra["masked"] = draw(st.integers(1, 80))
        extra["projection"] = draw(st.none() | st.integers(1, 40))
    heads_of = ("classification", "none") if images else ("lm", "mlm", "pretraining", "none")
    for name in ("causal", "parallel", "shared_norm", "qk_norm", "embedding_norm", "pooler"):
        flags[name] = draw(st.booleans())
    return model_from_mapping(
        {
            "family": family,
            "head": draw(st.sampled_from(heads_of)),
            "norm_order": draw(st.sampled_from(["pre", "post", "both"])),
            **extra,
            "layers": draw(st.integers(1, 5)),
            "hidden": heads * draw(st.integers(1, 8)),
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": draw(st.none() | st.integers(1, 9)),
            "ffn": draw(st.none() | st.integers(1, 50)),
            "tied": draw(st.booleans()),
            "head_bias": draw(st.booleans()),
            "final_norm": draw(st.booleans()),
            "window": draw(st.none() | st.integers(1, 80)),
            "dropout": draw(st.sampled_from([0.0, 0.1])),
            "attention_dropout": draw(st.sampled_from([0.0, 0.1])),
            **flags,
        }
    )


@given(specs(), st.integers(1, 3), st.integers(1, 64), st.sampled_from(["fused", "unfused"]))
def test_every_operand_fits_its_tensor(spec: ModelSpec, batch: int, seq: int, kind: str) -> None:
    graph = build_graph(spec, batch=batch, sequence=spec.image_sequence or seq, attention=kind)
    for block in graph.blocks:
        tensors = block.by_name()
        assert len(tensors) == len(block.tensors), "a tensor is defined twice"
        ready = {t.name for t in block.tensors if t.role in ("weight", "input", "buffer")}
        ready |= set(block.arrivals)
        for op in block.ops:
            sizes = {dim.name: dim.size for dim in op.dims}
            reductions = {dim.name for dim in op.dims if dim.reduction}
            for operand in (*op.inputs, *op.outputs):
                tensor = tensors[operand.tensor]
                assert len(operand.dims) == len(tensor.dims)
                for dim, own, size in zip(operand.dims, tensor.dims, tensor.shape, strict=True):
                    assert sizes[dim] == size or (own == "position" and sizes[dim] <= size)
            assert all(i.tensor in ready for i in op.inputs), f"{op.name} reads too early"
            ready |= {o.tensor for o in op.outputs}
            assert not any(reductions & set(o.dims) for o in op.outputs)
            assert all(name in ready for name in op.saved)
            assert all(dim in sizes for parts in op.groups.values() for dim in parts)
            assert all(0 <= i < len(op.inputs) for i in op.linear)
            written = set().union(*(o.dims for o in op.outputs))
            assert written == set(sizes) - reductions
        assert block.output is None or block.output in ready
        used = {o.tensor for op in block.ops for o in (*op.inputs, *op.outputs)}
        assert used == set(tensors), "a tensor that nothing touches"


@given(specs(), st.integers(1, 3), st.integers(1, 64))
def test_parameters_and_flops_equal_the_closed_forms(spec: ModelSpec, batch: int, seq: int) -> None:
    seq = spec.image_sequence or seq
    graph = build_graph(spec, batch=batch, sequence=seq)
    assert graph.num_parameters == count_parameters(spec)
    expected = model_flops_per_sample(spec, seq) * batch / 3
    assert graph.forward_flops() == pytest.approx(expected, rel=1e-12)
    square = build_graph(spec, batch=batch, sequence=seq, attention="unfused")
    expected = model_flops_per_sample(spec, seq, causal_half=False) * batch / 3
    assert square.forward_flops() == pytest.approx(expected, rel=1e-12)


def names(graph: Graph, block: str) -> list[str]:
    return [op.name for op in graph.block(block).ops]


def test_llama_layer_in_order() -> None:
    graph = build_graph(find_model("llama-3-70b"), batch=2, sequence=16)
    assert names(graph, "embedding") == ["embedding.word"]
    assert names(graph, "layers") == [
        "attention.norm",
        "attention.q",
        "attention.k",
        "attention.v",
        "attention.rotary_q",
        "attention.rotary_k",
        "attention.core",
        "attention.out",
        "attention.residual",
        "mlp.norm",
        "mlp.up",
        "mlp.gate",
        "mlp.act",
        "mlp.down",
        "mlp.residual",
    ]
    assert names(graph, "head") == [
        "head.norm",
        "head.logits",
        "loss.max",
        "loss.sum_exp",
        "loss.target",
        "loss.loss",
    ]
    layers = graph.block("layers")
    assert (layers.repeat, layers.input, layers.output, layers.recompute) == (
        80,
        "x_in",
        "x_out",
        True,
    )
    query = next(op for op in layers.ops if op.name == "attention.q")
    assert [(d.name, d.size) for d in query.dims if d.reduction] == [("in", 8192)]
    assert query.groups["heads"] == ("kv_head", "group")
    assert layers.tensor("attention.q.weight").shape == (8, 8, 128, 8192)
    assert layers.tensor("attention.k.weight").shape == (8, 128, 8192)
    act = next(op for op in layers.ops if op.name == "mlp.act")
    assert [operand.tensor for operand in act.inputs] == ["mlp.gate.out", "mlp.up.out"]
    assert not any(t.name.endswith(("bias", "mask")) for t in layers.tensors)


def test_gpt_layer_keeps_masks_and_adds_row_biases_in_the_residual() -> None:
    graph = build_graph(find_model("gpt-22b"), batch=1, sequence=2048, attention="unfused")
    assert names(graph, "embedding") == [
        "embedding.word",
        "embedding.position",
        "embedding.dropout",
    ]
    ops = {op.name: op for op in graph.block("layers").ops}
    core = ["attention.scores", "attention.softmax", "attention.dropout", "attention.context"]
    assert [name for name, op in ops.items() if op.attributes.get("selective")] == core
    assert [o.tensor for o in ops["attention.residual"].inputs] == [
        "attention.out.out",
        "attention.out.bias",
        "x_in",
    ]
    assert ops["attention.residual"].cost == "bias_dropout_add"
    assert ops["attention.residual"].saved == ("attention.residual.mask",)
    assert [o.tensor for o in ops["mlp.up"].inputs][-1] == "mlp.up.bias"
    assert len(ops["mlp.down"].inputs) == 2
    masks = [t for t in graph.block("layers").tensors if t.name.endswith("mask")]
    assert {t.dtype for t in masks} == {"uint8"}
    assert len(masks) == 3


def test_activation_bytes_of_a_gpt_layer_are_those_of_korthikanti() -> None:
    """s b h (34 + 5 a s / h) with fp16 activations and one-byte masks, arXiv 2205.05198 eq. 1."""
    spec = find_model("gpt-22b")
    b, s, h, a = 2, 1024, spec.hidden, spec.heads
    block = build_graph(spec, batch=b, sequence=s, attention="unfused").block("layers")
    tensors = block.by_name()
    saved = {name for op in block.ops for name in op.saved if tensors[name].role != "weight"}
    width = {"compute": 2, "uint8": 1, "fp32": 4}
    total = sum(tensors[name].size * width[tensors[name].dtype] for name in saved)
    assert total == s * b * h * 34 + 5 * a * s * s * b


def test_no_dropout_builds_no_masks() -> None:
    graph = build_graph(
        find_model("gpt-22b"), batch=1, sequence=64, attention="unfused", dropout=False
    )
    assert not [t for block in graph.blocks for t in block.tensors if "mask" in t.name]
    assert "attention.dropout" not in names(graph, "layers")
    ops = {op.name: op for op in graph.block("layers").ops}
    assert ops["mlp.residual"].cost == "bias_dropout_add"  # the bias remains
    fused = build_graph(find_model("gpt-22b"), batch=1, sequence=64, dropout=False)
    core = next(op for op in fused.block("layers").ops if op.name == "attention.core")
    assert core.attributes["dropout"] == 0.0


def test_block_ends_join() -> None:
    for name in ("gpt2", "llama-2-7b", "qwen2.5-0.5b"):
        graph = build_graph(find_model(name), batch=1, sequence=8)
        embedding, layers, head = graph.blocks
        assert (embedding.input, embedding.output) == (None, "x")
        assert (head.input, head.output) == ("x_in", None)
        shapes = {
            embedding.tensor("x").shape,
            layers.tensor("x_in").shape,
            layers.tensor("x_out").shape,
            head.tensor("x_in").shape,
        }
        assert len(shapes) == 1


def test_tied_logits_count_once() -> None:
    tied = build_graph(find_model("gpt2"), batch=1, sequence=8)
    assert tied.block("head").tensor("head.logits.weight").tied_to == (
        "embedding/embedding.word.weight"
    )
    untied = build_graph(replace(find_model("gpt2"), tied=False), batch=1, sequence=8)
    assert untied.num_parameters - tied.num_parameters == 50257 * 768


def test_flops_of_llama_2_7b_by_hand() -> None:
    """Per token 2 N of the matrices, plus 4 s h / 2 of attention in each layer."""
    spec = find_model("llama-2-7b")
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    expected = 4096 * (2 * matrices + 32 * 4 * 4096 * 4096 / 2)
    assert model_flops_per_sample(spec, 4096) == 3 * expected


def test_flops_of_gpt_match_the_formula_of_the_megatron_paper() -> None:
    """72 B s l h^2 (1 + s/(6 h) + V/(12 l h)) without recompute, full attention."""
    spec = find_model("gpt3-175b")
    s, n, h, v = 2048, 96, 12288, 51200
    expected = 72 * s * n * h**2 * (1 + s / (6 * h) + v / (12 * n * h))
    assert model_flops_per_sample(spec, s, causal_half=False) == pytest.approx(expected, rel=1e-12)


def test_a_window_counts_the_pairs_that_see_each_other() -> None:
    spec = replace(find_model("mistral-7b"), window=1000)
    s = 4000
    exact = sum(min(i + 1, 1000) for i in range(s)) / s**2
    core = build_graph(spec, batch=1, sequence=s).block("layers").ops[6]
    assert core.name == "attention.core"
    assert core.density == pytest.approx(exact, rel=1e-3)
    assert build_graph(spec, batch=1, sequence=1000).block("layers").ops[6].density == 0.5


def test_vocabulary_padding() -> None:
    graph = build_graph(find_model("gpt2"), batch=1, sequence=8, vocab_multiple=1024)
    assert graph.facts["vocab"] == 51200
    assert graph.block("head").tensor("logits").shape == (1, 8, 51200)


def test_facts_name_what_reports_need() -> None:
    facts = build_graph(find_model("mistral-7b"), batch=1, sequence=8).facts
    wanted = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128}
    wanted |= {"ffn": 14336, "vocab": 32000, "gated": True, "causal": True, "window": 4096}
    assert {key: facts[key] for key in wanted} == wanted


def test_all_problems_of_a_call_come_together() -> None:
    with pytest.raises(InputError) as caught:
        build_graph(find_model("gpt2"), batch=0, sequence=2048, attention="flash", vocab_multiple=0)
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    assert "fused, unfused" in text
    assert "1024 learned positions" in text


def test_text_form_names_everything_and_is_stable() -> None:
    graph = build_graph(find_model("gpt2"), batch=2, sequence=128, attention="unfused")
    text = graph_text(graph)
    for block in graph.blocks:
        for item in (*block.tensors, *block.ops):
            assert f" {item.name}" in text
    assert "parameters 124,439,808" in text
    assert "block layers x 12: x_in -> x_out" in text
    assert "[batch 2, seq 128, vocab 50257 | in 768]" in text
    assert "tied to embedding/embedding.word.weight" in text
    again = build_graph(find_model("gpt2"), batch=2, sequence=128, attention="unfused")
    assert graph_text(again) == text
    other = graph_text(build_graph(find_model("gpt2"), batch=2, sequence=64, attention="unfused"))
    assert len(other.splitlines()) == len(text.splitlines())


def test_flops_of_the_worked_numbers() -> None:
    """docs/explain/flops.md: Llama-3-70B at 8192, 149.7 GFLOP per token forward."""
    spec = find_model("llama-3-70b")
    assert model_flops_per_sample(spec, 8192) / 3 / 8192 == pytest.approx(149.74e9, rel=1e-4)
    step = 128 * model_flops_per_sample(spec, 8192)
    assert step == pytest.approx(4.71e17, rel=1e-3)
    assert 128 * model_flops_per_sample(spec, 8192, causal_half=False) == pytest.approx(
        5.05e17, rel=1e-3
    )
