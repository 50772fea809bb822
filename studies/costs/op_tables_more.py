"""Writes attention, convolution and memory-bound tables in the format of `foretrain validate ops`.

    python studies/costs/op_tables_more.py DATA/ops OUT [NAME...]

As op_tables.py, which holds those of GEMMs and experts. Rows whose kernel is not certain are left
out: bf16 attention over an fp8 cache may compute in fp8, and fewer than 16 tokens are decoding.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from convolution import called_us, position
from op_tables import AIC, DEEPBENCH, DTYPES, NEUSIGHT, SERVING, finish, read, write

PREFILL = 16
#: Kernel of a table -> name under which the catalog has it.
MLA = {"default": "torch_flow", "trtllm_mla": "trtllm_mha", "flash_attention": "fa3"}
VECTOR = {"ln": "layernorm", "relu": "relu", "gelu": "gelu", "softmax": "softmax"}
BINARY = ("add", "mul", "div", "pow")
LIGER_GPU = {"NVIDIA A100-SXM4-80GB": "a100-sxm-80gb", "NVIDIA GeForce RTX 3090": "rtx-3090"}
STREAMS = {"a100_80": "a100-sxm-80gb", "a40": "a40", "l40": "l40"}
#: model -> hidden, ffn, heads, KV heads, head_dim
SERVED = {
    "meta-llama/Llama-3.1-70B": (8192, 28672, 64, 8, 128),
    "meta-llama/Llama-3.1-8B": (4096, 14336, 32, 8, 128),
    "microsoft/Phi-mini-MoE-instruct": (4096, 960, 32, 8, 128),
    "mistralai/Mixtral-8x7B-v0.1": (4096, 14336, 32, 8, 128),
    "Qwen/Qwen3-32B": (5120, 25600, 64, 8, 128),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (2048, 768, 32, 4, 128),
}


def forward(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows as those of a forward pass."""
    return frame.assign(**{"pass": "forward"})


def _aic(frame: pd.DataFrame, name: str, **fixed: object) -> pd.DataFrame:
    frame = frame.rename(columns={"isl": "seq_q", "num_heads": "heads", "batch_size": "batch"})
    frame = frame.assign(device=frame.system.map(AIC))
    made = finish(frame, name, "attention", 1e3 * frame.latency_ms, launch_included=False, **fixed)
    return forward(made)


def aic_attention_context(folder: Path) -> pd.DataFrame:
    """Causal prefill attention; window_size 0 is none, no KV heads are as many as heads."""
    frame = read(folder, "aic_attention_context")
    sure = frame.attn_dtype.eq("fp8") | frame.kv_cache_dtype.eq("bfloat16")
    frame = frame[sure & (frame.isl >= PREFILL)].rename(columns={"num_key_value_heads": "kv_heads"})
    frame = frame.assign(
        kv_heads=frame.kv_heads.where(frame.kv_heads > 0, frame.num_heads),
        window=frame.window_size.fillna(0.0),
        dtype=frame.attn_dtype.map(DTYPES),
        stack=frame.kernel_source,
    )
    return _aic(frame, "aic_attention_context", causal=1)


def aic_attention_encoder(folder: Path) -> pd.DataFrame:
    """Attention without a mask."""
    frame = read(folder, "aic_attention_encoder")
    frame = frame[frame.isl >= PREFILL]
    frame = frame.assign(stack=frame.kernel_source, kv_heads=frame.num_heads)
    return _aic(frame, "aic_attention_encoder", causal=0, dtype="bf16")


def aic_mla_context(folder: Path) -> pd.DataFrame:
    """Prefill of latent attention: 128 + 64 for queries and keys, 128 for values.

    Two kernels run absorbed, on the latent (512 + 64, one KV head): as expanded attention they
    would reach a third of what the same kernels do elsewhere.
    """
    frame = read(folder, "aic_mla_context")
    frame = frame[(frame.isl >= PREFILL) & frame.kv_cache_dtype.eq("bfloat16")]
    absorbed = frame.kernel_source.isin(("flash_attention", "triton"))
    frame = frame.drop(columns="tp_size").assign(
        kv_heads=frame.num_heads.where(~absorbed, 1),
        stack=frame.kernel_source.map(lambda name: MLA.get(name, name)),
        head_dim=np.where(absorbed, 576, 192),
        head_dim_v=np.where(absorbed, 512, 128),
    )
    return _aic(frame, "aic_mla_context", causal=1, dtype="bf16")


def cudnn_sdpa(folder: Path) -> pd.DataFrame:
    """Forward and backward of cuDNN; FP8 with a window runs the whole square in backward."""
    frame = read(folder, "cudnn_sdpa_fwd_bwd").rename(
        columns={"batch_size": "batch", "q_seqlen": "seq_q", "kv_seqlen": "seq_kv",
                 "num_q_heads": "heads", "num_kv_heads": "kv_heads", "head_dim_qk": "head_dim",
                 "head_dim_vo": "head_dim_v"}
    )  # fmt: skip
    sure = frame.deterministic_bwd.astype(str).eq("True")
    frame = frame.assign(
        device="gb200",
        dtype=frame.data_type.replace({"bfloat16": "bf16"}),
        causal=frame.attn_mask.eq("top_left").astype(int),
        window=frame.sliding_window_size.fillna(0.0),
        stack=np.where(sure, "cudnn-deterministic", "cudnn"),
    )
    latency = 1e3 * frame.latency_ms
    frame = finish(frame, "cudnn_sdpa", "attention", latency, launch_included=False)
    return frame.assign(**{"pass": frame.profile_pass.map({"fwd": "forward", "bwd": "backward"})})


def llmservingsim(folder: Path) -> pd.DataFrame:
    """Layers of serving engines: attention, norms, activations, rotary, kernel times.

    They run one after the other, so that cards with a large L2 find their operands there.
    """
    frame = read(folder, "llmservingsim_layers")
    sizes = np.array([SERVED[name] for name in frame.model], dtype=float)
    hidden, ffn, heads, kv_heads, dim = sizes.T
    tp, layer = frame.tp.astype(float).to_numpy(), frame.layer
    old = frame.profiler.eq("v0").to_numpy()  # modules of transformers; else of vLLM
    ops = {
        "attn": "attention", "act_fn": "swiglu", "rope": "rotary", "rotary_emb": "rotary",
        "input_layernorm": "rmsnorm", "post_layernorm": "rmsnorm", "final_layernorm": "rmsnorm",
        "layernorm": "rmsnorm",
    }  # fmt: skip
    width = np.select(
        [layer.eq("act_fn"), layer.isin(("rope", "rotary_emb"))],
        [ffn / tp, (heads + kv_heads) / tp * dim],
        hidden,
    )
    frame = frame.assign(
        device=frame.gpu.map(SERVING), kernel=layer.map(ops), rows=frame.tokens, cols=width,
        batch=1, seq_q=frame.tokens, heads=heads / tp, kv_heads=kv_heads / tp, head_dim=dim,
        stack=np.where(old, "pytorch-eager", "megatron-te"),
    )  # fmt: skip
    phi = frame.model.str.contains("Phi") & frame.kernel.eq("rmsnorm")
    frame["kernel"] = np.where(phi, "layernorm", frame.kernel)
    # PyTorch's silu alone: the product is another module there
    frame["kernel"] = np.where(old & layer.eq("act_fn"), "silu", frame.kernel)
    frame = frame[frame.kernel.notna() & (frame.latency_us > 0)]
    name, dtype = "llmservingsim", "bf16"
    made = finish(frame, name, "", frame.latency_us, launch_included=False, dtype=dtype, causal=1)
    return forward(made.assign(op=made.kernel))


def vidur_vector(folder: Path) -> pd.DataFrame:
    """Norms, activations, rotary and residuals of an inference engine in fp16.

    All but the residual are kernels of 2023 that load one number per thread.
    """
    frame = read(folder, "vidur_layers_fp16")
    tp = frame.num_tensor_parallel_workers
    ops = {
        "input_layernorm": "rmsnorm", "post_attention_layernorm": "rmsnorm", "add": "residual",
        "mlp_act": "swiglu", "attn_rope": "rotary",
    }  # fmt: skip
    qk = (frame.n_head + frame.n_kv_head) * (frame.n_embd // frame.n_head) // tp
    width = np.select(
        [frame.op.eq("mlp_act"), frame.op.eq("attn_rope")],
        [frame.n_expanded_embd // tp, qk], frame.n_embd,
    )  # fmt: skip
    frame = frame.assign(
        device=frame.gpu.map({"a100": "a100-sxm-80gb", "a40": "a40"}),
        kernel=frame.op.map(ops), rows=frame.num_tokens, cols=width,
    )  # fmt: skip
    frame = frame[frame.kernel.notna() & (frame.latency_ms > 0)]
    latency = 1e3 * frame.latency_ms
    fixed = {"launch_included": False, "dtype": "fp16", "stack": "megatron-te"}
    made = finish(frame, "vidur_vector", "", latency, **fixed)
    return forward(made.assign(op=made.kernel))


def neusight_vector(folder: Path) -> pd.DataFrame:
    """Vector operators of PyTorch in fp32; each call is timed alone, launch included."""
    frame = read(folder, "neusight_vector_fp32").rename(columns={"B": "rows", "H": "cols"})
    frame = frame.assign(
        device=frame.gpu.map(NEUSIGHT),
        kernel=frame.op.map(lambda op: VECTOR.get(op, "elementwise")),
        operands=np.where(frame.op.isin(BINARY), 3, 2),
        stack="torch_vector",
    )
    latency = 1e3 * frame.latency_ms
    made = finish(frame, "neusight_vector", "", latency, launch_included=True, dtype="fp32")
    return forward(made.assign(op=made.kernel))


def cudnn_norms(folder: Path) -> pd.DataFrame:
    """Norms of cuDNN, PyTorch and torch.compile, one kernel each, forward and backward."""
    frame = read(folder, "cudnn_norms_fwd_bwd").rename(columns={"N": "rows", "C": "cols"})
    # the PyTorch of this table has RMSNorm as one operator, unlike the modules of older models
    stacks = {"cudnn": "megatron-te", "pytorch": "torch_norm", "torch_compile": "pytorch-compile"}
    frame = frame.assign(
        device="gb200", stack=frame.backend.map(stacks), kernel=frame.norm_type.str.replace("_", "")
    )
    ways = {"forward": frame.fwd_time_ms, "backward": frame.bwd_time_ms}
    both = pd.concat([frame.assign(**{"pass": way, "ms": time}) for way, time in ways.items()])
    made = finish(both, "cudnn_norms", "", 1e3 * both.ms, launch_included=False, dtype="bf16")
    return made.assign(op=made.kernel)


def liger(folder: Path) -> pd.DataFrame:
    """Norms, softmax and losses in training, of modules of transformers and of fused kernels."""
    frame = read(folder, "liger_fwd_bwd")
    names = {"rms_norm": "rmsnorm", "layer_norm": "layernorm", "softmax": "softmax",
             "cross_entropy": "cross_entropy"}  # fmt: skip
    frame = frame[frame.kernel_name.isin(names) & frame.gpu_name.isin(LIGER_GPU)]
    config = [json.loads(text) for text in frame.extra_benchmark_config_str]
    fused = frame.kernel_provider.eq("liger")
    eager = frame.kernel_name.isin(("rms_norm", "cross_entropy"))
    frame = frame.assign(
        device=frame.gpu_name.map(LIGER_GPU), kernel=frame.kernel_name.map(names),
        rows=[c["M"] if "M" in c else c["B"] * c["T"] for c in config], cols=frame.x_value,
        dtype=["bf16" if "bfloat16" in c.get("dtype", "") else "fp32" for c in config],
        stack=np.select([fused, eager], ["megatron-te", "pytorch-eager"], "torch_norm"),
    ).assign(**{"pass": frame.kernel_operation_mode})  # fmt: skip
    made = finish(frame, "liger", "", 1e3 * frame.latency_ms, launch_included=False)
    return made.assign(op=made.kernel)


def small_kernels(folder: Path) -> pd.DataFrame:
    """Repeated small kernels in a stream: 16 bytes per element."""
    frame = read(folder, "gpu_benches_small_kernels")
    frame = frame[frame["mode"].eq("stream") & frame.gpu.isin(STREAMS)]
    frame = frame.assign(device=frame.gpu.map(STREAMS), rows=frame.elems, cols=1, operands=4)
    fixed = {"launch_included": False, "dtype": "fp32", "stack": "stream"}
    return forward(finish(frame, "small_kernels", "elementwise", frame.t_us, **fixed))


def _convolution(frame: pd.DataFrame, name: str, **fixed: object) -> pd.DataFrame:
    frame = frame[frame.ms > 0]
    return finish(frame, name, "conv2d", 1e3 * frame.ms, groups=1, **fixed)


def deepbench_conv(folder: Path) -> pd.DataFrame:
    """Convolutions of 2016-2020 in all three directions; S is the width of a filter, R its height.

    cuDNN measures its algorithms first and takes the fastest.
    """
    frame = read(folder, "deepbench_conv").rename(
        columns={"N": "n", "C": "c", "K": "k", "R": "r", "S": "s", "H": "h", "W": "w"}
    )
    mixed = frame.sheet.str.contains("Mixed")
    frame = frame.assign(
        device=frame.gpu.map(DEEPBENCH), dtype=np.where(mixed, "fp16", "fp32"), stack="deepbench",
        padding=frame.pad_h, stride=frame.stride_h,
        oh=(frame.h + 2 * frame.pad_h - frame.r) // frame.stride_h + 1,
        ow=(frame.w + 2 * frame.pad_w - frame.s) // frame.stride_w + 1,
    )  # fmt: skip
    ways = {
        "fwd_ms": "forward",
        "bwd_data_ms": "backward_input",
        "bwd_weight_ms": "backward_weight",
    }
    parts = [frame.assign(**{"ms": frame[c], "pass": way}) for c, way in ways.items()]
    return _convolution(pd.concat(parts), "deepbench_conv", launch_included=False)


def neusight_conv(folder: Path) -> pd.DataFrame:
    """3x3 convolutions of PyTorch in fp32; each call is timed alone, launch included.

    `host_us`: the host of this collection grew slower with every call (convolution.py).
    """
    frame = read(folder, "neusight_conv2d_fp32").rename(
        columns={"B": "n", "Input_Channel": "c", "Output_Channel": "k", "Input_Size": "h",
                 "Kernel_Size": "r", "Stride": "stride", "Padding": "padding", "latency_ms": "ms"}
    )  # fmt: skip
    frame = frame.assign(
        w=frame.h, s=frame.r, device=frame.gpu.map(NEUSIGHT), stack="torch_conv2d",
        host_us=called_us(frame.gpu.map(NEUSIGHT).astype(str), position(frame.gpu)),
    )  # fmt: skip
    return forward(_convolution(frame, "neusight_conv", launch_included=True, dtype="fp32"))


#: Name of the output -> adapter.
TABLES: dict[str, Callable[[Path], pd.DataFrame]] = {
    "aic_attention_context": aic_attention_context,
    "aic_attention_encoder": aic_attention_encoder,
    "aic_mla_context": aic_mla_context,
    "cudnn_sdpa": cudnn_sdpa,
    "llmservingsim": llmservingsim,
    "vidur_vector": vidur_vector,
    "neusight_vector": neusight_vector,
    "cudnn_norms": cudnn_norms,
    "liger": liger,
    "small_kernels": small_kernels,
    "deepbench_conv": deepbench_conv,
    "neusight_conv": neusight_conv,
}


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:], TABLES)
