"""What published recipes add to rows that name only the software."""

from __future__ import annotations

from dataclasses import replace

from foretrain.validation.mapping.row import map_row
from foretrain.validation.rows import Row

BRIDGE = Row(
    id="bridge-1",
    family="nemo_megatron_bridge",
    model="LLAMA3_70B",
    model_class="llm_dense",
    n_layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=128256,
    seq_len=8192, gpu="GB200", gpu_norm="GB200", n_gpus=64, precision="FP8",
    tp=1, pp=1, dp=64, cp=1, sharding="FSDP(shard group 64)", mbs=2, gbs=256, task="pretrain",
    framework="Megatron-Bridge/Megatron-Core (NeMo container)", framework_version="NeMo 26.04",
)  # fmt: skip
LARGE = replace(
    BRIDGE, model="LLAMA3.1_405B", n_layers=126, hidden=16384, heads=128, ffn=53248,
    tp=4, pp=16, vpp=8, dp=4, n_gpus=256, sharding="DDP (table FSDP=0)", mbs=1, gbs=1536,
)  # fmt: skip
SFT = replace(
    BRIDGE, framework="NeMo/Megatron-Core", framework_version="NeMo24.07", task="sft",
    gpu="H100-SXM", gpu_norm="H100-SXM", n_gpus=16, tp=4, pp=4, dp=None, sharding="", mbs=1, gbs=32,
)  # fmt: skip


def test_activations_of_the_recipe_s_layers_go_to_the_host() -> None:
    mapped = map_row(BRIDGE)
    assert mapped.run["plan"]["cpu_offloading_num_layers"] == 40
    assert any("on the host" in line for line in mapped.assumed)
    for other in (
        replace(BRIDGE, framework_version="NeMo 25.07"),
        replace(BRIDGE, sharding="DDP (table FSDP=0)"),
        replace(BRIDGE, gpu="H100-SXM", gpu_norm="H100-SXM"),
    ):
        assert "cpu_offloading_num_layers" not in map_row(other).run["plan"]
    assert map_row(replace(BRIDGE, precision="BF16")).run["plan"]["cpu_offloading_num_layers"] == 20


def test_the_allocator_of_the_largest_model() -> None:
    assert map_row(LARGE).run["plan"]["expandable_segments"] is True
    assert "expandable_segments" not in map_row(replace(LARGE, precision="BF16")).run["plan"]
    assert "expandable_segments" not in map_row(BRIDGE).run["plan"]


def test_the_optimizer_of_recipes() -> None:
    wide = map_row(replace(LARGE, precision="BF16")).run["training"]["precision"]
    assert wide["master"] == "remainder"
    assert "master" not in map_row(LARGE).run["training"]["precision"]
    assert "master" not in map_row(replace(BRIDGE, precision="BF16")).run["training"]["precision"]
    half = map_row(SFT).run["training"]["precision"]
    assert (half["master"], half["moments"]) == ("bf16", "bf16")
    bf16 = map_row(replace(SFT, precision="BF16")).run["training"]["precision"]
    assert (bf16["master"], bf16["moments"]) == ("none", "bf16")
    assert "moments" not in map_row(replace(SFT, task="pretrain")).run["training"]["precision"]


def test_fp8_weights_where_the_options_name_them() -> None:
    megatron = replace(
        BRIDGE, framework="Megatron-LM", framework_version="core 2025", sharding="", mbs=1,
        family="megatron_ci_golden",
    )  # fmt: skip
    assert map_row(megatron).run["training"]["precision"] == "fp8"
    named = replace(megatron, notes='opts={"fp8-param-gather":true}')
    assert map_row(named).run["training"]["precision"] == {"compute": "fp8", "weight": "fp8"}
    example = map_row(replace(megatron, family="nemo_megatron_bridge")).run["training"]["precision"]
    assert (example["weight"], example["grad_reduce"]) == ("fp8", "bf16")


def test_flash_attention_s_micro_batches() -> None:
    row = Row(
        id="flash-1", family="flash_attention_gpt3", model="GPT3-2.7B", model_class="llm_dense",
        n_layers=32, hidden=2560, heads=20, vocab=50257, seq_len=2048, precision="bf16",
        gpu="A100-SXM", gpu_norm="A100-SXM", gpu_mem_gb=80, n_gpus=8, gpus_per_node=8, tp=1, pp=1,
        dp=8, gbs=512, framework="flash-attention training repo (fused MLP, fused LN)",
    )  # fmt: skip
    mapped = map_row(row).run
    assert (mapped["training"]["microbatch"], mapped["plan"]["zero"]) == (4, 1)
    assert map_row(replace(row, mbs=2)).run["training"]["microbatch"] == 2


def test_the_container_of_lambda_s_benchmark() -> None:
    row = Row(
        id="lambda-1", family="lambda_gpu_benchmark", model="BERT-large SQuAD finetune",
        model_class="bert", n_layers=24, hidden=1024, heads=16, ffn=4096, vocab=30522, seq_len=384,
        precision="fp16 AMP", gpu="RTX 3090", gpu_norm="RTX3090", n_gpus=1, mbs=28, gbs=28,
        framework="NGC PyTorch DeepLearningExamples (Lambda fork)",
    )  # fmt: skip
    assert map_row(row).stack["context_gib"] == 0.85
    assert "context_gib" not in map_row(replace(row, family="other")).stack


def test_torchtitan_s_configurations() -> None:
    row = replace(
        BRIDGE, family="torchtitan_extra", n_layers=32, hidden=4096, heads=32, ffn=14336,
        precision="BF16", n_gpus=4, dp=4, sharding="FSDP 4", zero_stage="3",
        framework="torchtitan eager+compile", framework_version="PyTorch 2.14.0a0", mbs=32, gbs=128,
    )  # fmt: skip
    mapped = map_row(row)
    assert mapped.run["plan"]["recompute"] == "selective"
    assert mapped.stack["loss_chunks"] == 8
    assert "loss_chunks" not in map_row(replace(row, framework_version="PyTorch 2.9.0")).stack
    assert map_row(replace(row, recompute="none")).run["plan"]["recompute"] == "none"


def test_scales_per_row_are_kernels_of_their_own() -> None:
    tensor = replace(BRIDGE, framework="torchtitan", family="torchtitan", sharding="FSDP2", mbs=1)
    rows = map_row(replace(tensor, precision="float8 rowwise")).stack
    assert rows["low_gather"] is False
    assert "CutlassFP8" in rows["low_kernels"]["fp8"]
    assert "low_kernels" not in map_row(replace(tensor, precision="float8 tensorwise")).stack
