"""The words of sources: interconnects, precision, recompute, frameworks, devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretrain.errors import InputError
from foretrain.hardware import find_device, parse_cluster
from foretrain.run.stacks import list_stacks, load_stack
from foretrain.validation.mapping import Unsupported, map_row
from foretrain.validation.mapping.cluster import map_cluster
from foretrain.validation.mapping.device import map_device
from foretrain.validation.mapping.model import CLASSES
from foretrain.validation.mapping.plan import map_overlap, map_plan, map_recompute
from foretrain.validation.mapping.stack import STACKS, map_attention, map_stack
from foretrain.validation.mapping.training import map_optimizer, map_precision, map_training
from foretrain.validation.mapping.words import Assumed
from foretrain.validation.rows import Row

ROW = Row(
    id="made-1",
    family="made",
    model="Llama 3 8B",
    model_class="llm_dense",
    n_layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn=14336,
    vocab=128256,
    seq_len=8192,
    precision="bf16",
    gpu="H100-SXM",
    gpu_norm="H100-SXM",
    n_gpus=16,
    gpus_per_node=8,
    interconnect="8x HDR200 IB",
    tp=2,
    pp=1,
    dp=8,
    sp="yes",
    zero_stage="1",
    mbs=1,
    gbs=64,
    recompute="none",
    framework="Megatron-LM",
    framework_version="core_v0.6.0",
    task="pretrain",
    quality="A",
)


def test_chunks_that_nemo_does_not_state_are_those_of_its_configuration() -> None:
    nemo = replace(
        ROW, framework="NeMo/Megatron-Core", n_layers=96, hidden=18432, heads=96, ffn=73728,
        n_gpus=256, tp=8, pp=8, dp=4, vocab=256000,
    )  # fmt: skip
    mapped = map_row(nemo)
    assert mapped.run["plan"]["interleave"] == 12
    assert any(line.startswith("vpp = 12") for line in mapped.assumed)
    assert map_row(replace(nemo, vpp=6)).run["plan"]["interleave"] == 6
    assert "interleave" not in map_row(replace(nemo, vpp=1)).run["plan"]
    assert "interleave" not in map_row(replace(nemo, framework="Megatron-LM")).run["plan"]


def test_pipelines_of_the_playbook_over_nodes_ran_with_checked_collectives() -> None:
    row = replace(ROW, family="ultrascale_playbook", framework="nanotron", n_gpus=16, tp=2, dp=4)
    checked = map_row(replace(row, pp=2))
    assert checked.stack["checked_collectives"]
    assert any(line.startswith("collectives checked") for line in checked.assumed)
    plain = map_row(replace(row, pp=1, dp=8))
    assert "checked_collectives" not in plain.stack
    assert "checked_collectives" not in map_row(replace(row, pp=2, n_gpus=8, dp=2)).stack
    assert "checked_collectives" not in map_row(replace(row, pp=2, family="made")).stack
    assert checked.key != replace(checked, stack={}).key


def test_large_jobs_of_bloom_ran_with_blocking_launches() -> None:
    row = replace(
        ROW, family="bigscience_bloom", framework="Megatron-DeepSpeed", gpu_norm="A100-SXM"
    )
    large = map_row(replace(row, n_gpus=384, tp=8, pp=6, dp=8))
    assert large.stack["launch_blocking"]
    assert any("CUDA_LAUNCH_BLOCKING" in line for line in large.assumed)
    small = replace(row, n_gpus=8, tp=8, pp=1, dp=1)
    assert "launch_blocking" not in map_row(small).stack
    assert "launch_blocking" not in map_row(replace(row, n_gpus=384, family="made")).stack


def test_an_attention_kernel_that_a_row_names_goes_before_the_stacks() -> None:
    assert load_stack("megatron-te").attention_kernel != "flash2"
    named = map_row(replace(ROW, attention_impl="FlashAttention-2"))
    assert named.stack["attention_kernel"] == "flash2"
    assert "attention_kernel" not in map_row(ROW).stack
    titan = replace(ROW, framework="torchtitan", attention_impl="SDPA flash v2")
    assert "attention_kernel" not in map_row(titan).stack  # it is the stack's own


def test_composer_reduces_gradients_as_its_mixed_precision_says() -> None:
    row = replace(
        ROW, framework="llm-foundry/Composer FSDP", precision="amp_bf16 (FSDP MP DEFAULT)"
    )
    roles = map_training(row, load_stack("llm-foundry"), Assumed())["precision"]
    assert roles == {"compute": "bf16", "grad_reduce": "fp32"}
    pure = replace(row, precision="bf16 (FSDP MP PURE)")
    assert map_training(pure, load_stack("llm-foundry"), Assumed())["precision"] == "bf16"


def test_software_without_scattered_boundaries_sends_them_whole() -> None:
    row = replace(ROW, family="oneflow_dlperf", framework="OneFlow-GPT", tp=4, pp=4, dp=1)
    assert map_row(row).stack["scatter_gather"] is False
    megatron = replace(row, framework="Megatron-LM", framework_version="2021-05")
    assert "scatter_gather" not in map_row(megatron).stack  # the stack decides
    assert "scatter_gather" not in map_row(replace(row, pp=1, dp=4)).stack


def test_flagperf_runs_what_its_pages_and_scripts_say() -> None:
    row = replace(ROW, family="flagperf", framework="deepspeed", tp=1, dp=16)
    assert map_stack(row, Assumed()) == "hf-deepspeed"
    assert map_stack(replace(row, family="made"), Assumed()) == "deepspeed"
    assert map_attention(replace(row, model="chatglm3_6b")) == "fused"
    page = replace(row, model="llama3_8B", gpu="A100-SXM", gpu_norm="A100-SXM")
    assert map_device(page, Assumed()).name == "a800-sxm-80gb"
    assert map_device(replace(page, gpu_mem_gb=80.0, family="made"), Assumed()).name.startswith(
        "a100-sxm"
    )
    assert map_device(replace(page, gpu="H100-SXM", gpu_norm="H100-SXM"), Assumed()).name == (
        "h100-sxm"
    )


def test_a_row_that_states_everything_needs_no_assumption() -> None:
    mapped = map_row(ROW)
    assert mapped.assumed == ()
    assert mapped.run["cluster"] == "2x8 h100-sxm, 8x200G ib"
    assert mapped.run["stack"] == "megatron-te"


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("NVLink; 4x100Gb RoCE per node", "4x100G roce"),
        ("Jean Zay: NVLink3; 4x Omni-Path (OPA) 100Gb/s per node", "4x100G opa"),
        ("Jean Zay: NVLink; 4x OPA 100Gb/s", "4x100G opa"),
        ("NVLink4; InfiniBand 8x50 GB/s", "8x400G ib"),
        ("Selene: NVLink/NVSwitch; 8x HDR IB 200Gb/s per node", "8x200G ib"),
        ("NVLink; InfiniBand 100 Gb/s (Mellanox)", "1x100G ib"),
        ("NVLink; RDMA 400 Gb/s per GPU (Grand Teton)", "8x400G roce"),
        ("HF hopper-prod cluster: 8xH100 NVLink; EFA inter-node", "32x100G efa"),
        ("A3 (GPUDirect-TCPX) H100", "4x200G tcpx"),
        ("1600 Gbps node-node RoCE", "8x200G roce"),
        ("8x p3.16xlarge: NVLink intra-node, 25 Gb/s network", "1x25G ethernet"),
        ("delay 50ms  bandwidth 1Gbps", "1x1G ethernet [latency 50ms]"),
        ("AWS p3.2xlarge ~0.1 ms, up to 10 Gb/s", "1x10G ethernet [latency 0.1ms]"),
        ("InfiniBand，200Gb/s", "8x200G ib"),  # the comma of the source
    ],
)
def test_interconnects_become_cluster_texts(text: str, network: str) -> None:
    row = replace(ROW, interconnect=text)
    cluster = map_cluster(row, find_device("h100-sxm"), Assumed())
    assert cluster == f"2x8 h100-sxm, {network}"
    assert parse_cluster(cluster).world_size == 16


@pytest.mark.parametrize(("text", "lines"), [("", 1), ("NVLink", 1), ("DGX-H100", 0)])
def test_a_network_that_is_not_stated_is_the_usual_one(text: str, lines: int) -> None:
    assumed = Assumed()
    row = replace(ROW, interconnect=text)
    assert map_cluster(row, find_device("h100-sxm"), assumed) == "2x8 h100-sxm"
    assert len(assumed.lines) == lines


@pytest.mark.parametrize(
    ("n_gpus", "per_node", "shape"),
    [(4, 8, "1x4"), (20, 4, "5x4"), (2, None, "1x2"), (64, None, "8x8"), (1, 8, "1x1")],
)
def test_gpus_are_spread_over_nodes(n_gpus: int, per_node: int | None, shape: str) -> None:
    row = replace(ROW, n_gpus=n_gpus, gpus_per_node=per_node, interconnect="DGX-H100")
    assert map_cluster(row, find_device("h100-sxm"), Assumed()) == f"{shape} h100-sxm"


@pytest.mark.parametrize("n_gpus", [None, 0, -8, 12])
def test_a_gpu_count_that_makes_no_cluster_is_refused(n_gpus: int | None) -> None:
    with pytest.raises(Unsupported):
        map_cluster(replace(ROW, n_gpus=n_gpus), find_device("h100-sxm"), Assumed())


@pytest.mark.parametrize(
    ("gpu", "norm", "memory", "name"),
    [
        ("A100-SXM", "A100-SXM", 40.0, "a100-sxm-40gb"),
        ("A100-SXM", "A100-SXM", None, "a100-sxm-80gb"),
        ("V100-SXM3-32GB (DGX-2)", "V100", None, "v100-sxm-32gb"),
        ("V100-SXM2", "V100", 16.0, "v100-sxm-16gb"),
        ("V100-PCIE-16GB", "V100", None, "v100-pcie-16gb"),
        ("H100-96GB-HBM2e-500W", "H100-SXM", 96.0, "h100-sxm-96gb-500w"),
        ("RTX 3090 Ti", "RTX3090Ti", 24.0, "rtx-3090-ti"),
        ("RTX4090", "RTX4090", 24.0, "rtx-4090"),
        ("A800-SXM", "A800", 80.0, "a800-sxm-80gb"),
        ("B200 (power limited)", "B200", None, "b200-sxm"),
        ("GB300", "GB300", None, "gb300"),
        ("AMD-Instinct-MI100", "AMD-MI1xx/2xx", None, "mi100"),
        ("AMD-Instinct-MI250", "AMD-MI1xx/2xx", None, "mi250x"),
        ("TPU7x Ironwood", "TPU", None, "tpu-v7x"),
        ("TPU v5e", "TPU", None, "tpu-v5e"),
    ],
)
def test_gpu_names_become_devices(gpu: str, norm: str, memory: float | None, name: str) -> None:
    row = replace(ROW, gpu=gpu, gpu_norm=norm, gpu_mem_gb=memory)
    assert map_device(row, Assumed()).name == name


@pytest.mark.parametrize(
    ("gpu", "norm"),
    [
        ("not stated", "not stated"),
        ("A100/H100 unspecified", "H100-SXM"),
        ("", ""),
        ("Voodoo 5", "Voodoo 5"),
    ],
)
def test_an_unknown_gpu_is_refused(gpu: str, norm: str) -> None:
    with pytest.raises(Unsupported):
        map_device(replace(ROW, gpu=gpu, gpu_norm=norm), Assumed())


def test_a_memory_size_that_no_variant_has_is_refused() -> None:
    with pytest.raises(Unsupported, match="60 GB"):
        map_device(replace(ROW, gpu_mem_gb=60.0), Assumed())


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("bf16 (fp32 grad accumulation)", "bf16"),
        ("amp_bf16 (FSDP MP DEFAULT)", "bf16"),
        ("bf16 (FSDP MP PURE)", "bf16"),
        ("bf16-true", "pure-bf16"),
        ('fp16, level="O2"', "fp16"),
        ("fp16 mixed", "fp16"),
        ("fp32 (see paper; half flags not set in collect script)", "fp32"),
        ("TF32", "tf32"),
        ("TE FP8", "fp8"),
        ("float8 (tensorwise, linear only)", "fp8"),
        ("amp_fp8 (FSDP MP DEFAULT)", "fp8"),
        ("FP8-MX", "mxfp8"),
        ("FP8 MX 32x32", "mxfp8"),
        ("mxfp8_cublas_rceil", "mxfp8"),
        ("NVFP4 (bf16 tail)", "nvfp4"),
    ],
)
def test_precision_words(text: str, word: str) -> None:
    assumed = Assumed()
    assert map_precision(replace(ROW, precision=text), load_stack("nemo"), assumed) == word
    assert assumed.lines == []


@pytest.mark.parametrize(
    ("text", "stack", "gpu", "word"),
    [
        ("", "deepspeed", "A100-SXM", "fp16"),
        ("", "nemo", "H100-SXM", "bf16"),
        ("amp", "megatron", "H800", "bf16"),
        ("bf16/fp16 amp (unstated column)", "megatron", "A800", "bf16"),
        ("", "nemo", "V100", "fp16"),
    ],
)
def test_a_precision_that_is_open_is_the_stacks(text: str, stack: str, gpu: str, word: str) -> None:
    assumed = Assumed()
    row = replace(ROW, precision=text, gpu_norm=gpu)
    assert map_precision(row, load_stack(stack), assumed) == word
    assert len(assumed.lines) == 1


def test_fp32_beside_flash_attention_is_tf32() -> None:
    row = replace(ROW, precision="fp32", attention_impl="FlashAttention-2")
    assumed = Assumed()
    assert map_precision(row, load_stack("nemo"), assumed) == "tf32"
    assert len(assumed.lines) == 1


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("none", "none"),
        ("full (uniform, every layer)", "full"),
        ("full uniform 1", "full"),
        ("selective (core attention)", "selective"),
        ("selective + SP", "selective"),
        ("activation recompute (recompute-activations flag = selective)", "selective"),
        ("selective layer", {"mode": "full", "layers": 16}),
    ],
)
def test_recompute_words(text: str, setting: object) -> None:
    row = replace(ROW, recompute=text)
    assert map_recompute(row, load_stack("torchtitan"), Assumed()) == setting


def test_recompute_in_words_that_nobody_knows_is_refused() -> None:
    with pytest.raises(Unsupported, match="norm, act"):
        map_recompute(replace(ROW, recompute="norm, act"), load_stack("nemo"), Assumed())


@pytest.mark.parametrize(
    ("zero", "sharding", "expected"),
    [
        ("1 (shard group 8)", "", {"zero": 1, "shard": 8}),
        ("1 (shard group all DP)", "", {"zero": 1}),
        ("3(FSDP)", "", {"zero": 3}),
        ("", "FSDP SHARD_GRAD_OP", {"zero": 2}),
        ("", "ZeRO-3", {"zero": 3}),
        ("", "DP", {"zero": 0}),
        ("", "distributed optimizer", {"zero": 1}),
        ("", "FSDP=4", {"zero": 3, "shard": 4}),
        ("", "FSDP dcn_FSDP=2 ici_FSDP=2 dcn_DP=2", {"zero": 3, "shard": 4}),
        ("", "Megatron-FSDP optim_grads_params", {"zero": 3}),
        ("", "DDP (table FSDP=0)", {"zero": 1}),  # the distributed optimizer of the stack
    ],
)
def test_sharding_words(zero: str, sharding: str, expected: dict[str, int]) -> None:
    row = replace(ROW, zero_stage=zero, sharding=sharding)
    plan = map_plan(row, load_stack("nemo"), Assumed())
    assert {key: plan[key] for key in ("zero", "shard") if key in plan} == expected


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "stages"),
    [
        (32, 4, None, None),
        (126, 8, 8, [1, *[2] * 62, 1]),
        (126, 8, None, [15, *[16] * 6, 15]),
        (126, 16, 8, [0, *[1] * 126, 0]),  # embedding and loss have a virtual stage each
        (28, 16, None, [*[2] * 12, *[1] * 4]),
        (30, 2, 2, [7, 8, 8, 7]),
        (3, 4, None, None),  # more stages than layers: the check refuses it
    ],
)
def test_layers_that_do_not_come_out_even(
    layers: int, pp: int, vpp: int | None, stages: list[int] | None
) -> None:
    row = replace(ROW, n_layers=layers, pp=pp, vpp=vpp, n_gpus=16 * pp)
    assert map_plan(row, load_stack("nemo"), Assumed()).get("stages") == stages


def test_a_degree_follows_from_the_others() -> None:
    row = replace(ROW, tp=4, pp=None, dp=2, n_gpus=16)
    assert map_plan(row, load_stack("nemo"), Assumed())["pp"] == 2


def test_degrees_that_nobody_states_are_refused_where_they_matter() -> None:
    row = replace(ROW, tp=None, pp=None)
    with pytest.raises(Unsupported, match="degrees"):
        map_plan(row, load_stack("nemo"), Assumed())
    assert map_plan(row, load_stack("torchtitan"), Assumed())["tp"] == 1


@pytest.mark.parametrize(
    ("notes", "overlap"),
    [
        ("comm overlap OFF; CE fusion on", dict.fromkeys(("grad", "param", "tp", "p2p"), False)),
        ("torch.compile; async TP", {"grad": True, "param": True, "tp": True}),
        ("torch.compile; vanilla TP", {"grad": True, "param": True, "tp": False}),
        ('opts={"overlap-grad-reduce":true}', {"grad": True, "param": False}),
        ("", {"grad": True, "param": True}),
    ],
)
def test_overlap_is_what_notes_and_stack_say(notes: str, overlap: dict[str, bool]) -> None:
    assert map_overlap(replace(ROW, notes=notes), load_stack("nemo")) == overlap


@pytest.mark.parametrize(
    ("framework", "version", "stack"),
    [
        ("Megatron-LM", "2021-04", "megatron"),
        ("Megatron-LM", "core_v0.6.0", "megatron-te"),
        ("megatron", "Megatron-LM-240405", "megatron-te"),
        ("Megatron-DeepSpeed", "2022-02", "deepspeed"),
        ("NeMo/Megatron-Core", "NeMo24.07", "nemo"),
        ("torchtitan", "", "torchtitan"),
        ("InternEvo", "", "internevo"),
        ("llm-foundry/Composer FSDP", "", "llm-foundry"),
        ("MaxText (JAX)", "", "jax-xla"),
        ("HF transformers (single GPU) / Megatron (distributed)", "", "pytorch-eager"),
        ("torchtune (compile)", "", "pytorch-compile"),
        ("KempnerForge (PyTorch FSDP2 and DTensor)", "", "torchtitan"),
    ],
)
def test_frameworks_become_stacks(framework: str, version: str, stack: str) -> None:
    row = replace(ROW, framework=framework, framework_version=version)
    assert map_stack(row, Assumed()) == stack


@pytest.mark.parametrize("sharding", ["FSDP", "HSDP", "HSDP (one node)"])
def test_pytorch_that_shards_is_fsdp(sharding: str) -> None:
    row = replace(ROW, framework="PyTorch", tp=1, sharding=sharding, zero_stage="3")
    assert map_stack(row, Assumed()) == "fsdp"
    assert map_row(row).run["plan"]["preset"] == "fsdp"


def test_torchtune_trains_in_16_bits_with_checkpoints_and_shards_over_several_gpus() -> None:
    """Facts of its recipes: dtype, enable_activation_checkpointing, full_finetune_distributed."""
    row = replace(
        ROW, framework="torchtune (compile)", recompute="", tp=1, sp="", zero_stage="",
        offload="CPU offload + fused optimizer",
    )  # fmt: skip
    run = map_row(row).run
    assert run["training"]["precision"] == "pure-bf16"
    assert (run["plan"]["preset"], run["plan"]["recompute"]) == ("fsdp", "full")
    assert run["plan"]["offload"] == "parameters"
    one = map_row(
        replace(row, n_gpus=1, dp=1, offload="", notes="technique cumulative: packed")
    ).run
    assert (one["plan"]["preset"], one["plan"]["recompute"]) == ("plain", "none")


def test_gradients_kept_whole_until_the_last_micro_batch_are_a_layout() -> None:
    row = replace(
        ROW, framework="PyTorch", tp=1, zero_stage="3", sharding="FSDP2 8, no_sync",
        precision="bf16-true, fp32 gradient reduction",
    )  # fmt: skip
    run = map_row(row).run
    assert run["plan"]["overrides"] == {"": {"memory": {"grad_accumulator": {}}}}
    assert run["training"]["precision"]["grad_accumulate"] == "fp32"
    assert run["training"]["precision"]["moments"] == "bf16"


@pytest.mark.parametrize(
    ("model", "positions"),
    [("Baichuan2-7B", None), ("baichuan-7b", None), ("baichuan2_13b", "alibi")],
)
def test_baichuan_has_rotary_positions_in_its_7b(model: str, positions: str | None) -> None:
    assert map_row(replace(ROW, model=model)).run["model"].get("positions") == positions


def test_context_parallelism_is_passed_on() -> None:
    assert map_row(replace(ROW, cp=2, dp=4)).run["plan"]["cp"] == 2


def test_all_stacks_of_the_table_exist() -> None:
    assert {stack for _, stack, _ in STACKS} <= set(list_stacks())


def test_the_gpipe_prototype_is_what_its_source_says() -> None:
    row = replace(
        ROW, model="GPT-3", framework="DeDLOC/GPipe", recompute="", vocab=None, precision="fp16"
    )
    made = map_row(row)
    plan, training = made.run["plan"], made.run["training"]
    assert plan["recompute"] == "full"
    assert plan["overlap"] == {"p2p": True, "grad": False}
    model = {key: made.run["model"][key] for key in ("vocab", "head", "activation", "causal")}
    assert model == {
        "vocab": 28996, "head": "classification", "activation": "relu", "causal": False
    }  # fmt: skip
    assert training["optimizer"] == "sgd"
    assert {key: training["precision"][key] for key in ("weight", "grad_reduce", "master")} == {
        "weight": "fp16", "grad_reduce": "fp16", "master": "fp32"
    }  # fmt: skip
    assert sum("prototype" in line or "first stage" in line for line in made.assumed) == 3


def test_a_stack_that_stands_in_for_another_is_said() -> None:
    assumed = Assumed()
    map_stack(replace(ROW, framework="OneFlow-GPT"), assumed)
    assert assumed.lines == ["stack: OneFlow as megatron"]


@pytest.mark.parametrize("framework", ["", "my own trainer"])
def test_a_framework_that_is_not_known_is_refused(framework: str) -> None:
    with pytest.raises(Unsupported):
        map_stack(replace(ROW, framework=framework), Assumed())


@pytest.mark.parametrize(
    ("text", "attention"),
    [
        ("unfused (scale-mask-softmax fused kernels, no FlashAttention)", "unfused"),
        ("FlashAttention-2", "fused"),
        ("SDPA flash v2", "fused"),
        ("", None),
    ],
)
def test_attention_is_honoured(text: str, attention: str | None) -> None:
    assert map_attention(replace(ROW, attention_impl=text)) == attention


def test_pax_had_no_flash_attention_before_april_2024() -> None:
    pax = replace(ROW, framework="PaxML (rosetta)", attention_impl="")
    assert map_attention(replace(pax, framework_version="JAX-Toolbox db437900")) == "unfused"
    assert map_attention(replace(pax, framework_version="JAX-Toolbox 28603900")) is None
    other = replace(pax, framework="T5X (rosetta)", framework_version="JAX-Toolbox db437900")
    assert map_attention(other) is None


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_other_classes_of_models_are_refused_by_name(name: str) -> None:
    with pytest.raises(Unsupported) as caught:
        map_row(replace(ROW, model_class=name))
    assert caught.value.reason == CLASSES[name]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"seq_len": None}, "sequence length"),
        ({"gbs": None, "mbs": None}, "neither global batch nor micro-batch"),
        ({"task": "lora"}, "LoRA"),
        ({"task": "finetune qlora"}, "QLoRA"),
        ({"precision": "bf16-true + nf4 (qlora)"}, "QLoRA"),
        ({"n_experts": 8}, "mixture of experts"),
        ({"model": "Mamba 8B"}, "architecture"),
        ({"n_layers": None, "model": "Quux 8B"}, "shape is not stated"),
        ({"unreadable": ("tp 'x'",)}, "no number in tp 'x'"),
    ],
)
def test_what_is_missing_is_said(change: dict[str, object], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        map_row(replace(ROW, **change))  # pyright: ignore[reportArgumentType]


def test_a_model_without_a_shape_is_looked_up_in_the_catalog() -> None:
    mapped = map_row(replace(ROW, n_layers=None, hidden=None, model="Llama-3.1-8B-Instruct"))
    assert mapped.run["model"] == "llama-3.1-8b"
    assert mapped.assumed == ("shape: that of the catalog's llama-3.1-8b",)


@pytest.mark.parametrize(
    ("change", "family"),
    [
        ({}, "llama"),  # an MLP that is not four times as wide
        ({"ffn": 16384}, "llama"),  # fewer key-value heads
        ({"ffn": 16384, "kv_heads": 32}, "gpt"),
        ({"ffn": 16384, "kv_heads": None}, "gpt"),
    ],
)
def test_a_name_that_says_nothing_is_read_off_the_shape(
    change: dict[str, object], family: str
) -> None:
    row = replace(ROW, model="Quux 8B", **change)  # pyright: ignore[reportArgumentType]
    mapped = map_row(row)
    assert mapped.run["model"]["family"] == family
    assert any(line.startswith(f"architecture: like {family}") for line in mapped.assumed)


BERT = replace(
    ROW,
    model="BERT-large",
    model_class="bert",
    n_layers=None,
    hidden=None,
    heads=None,
    kv_heads=None,
    ffn=None,
    vocab=None,
    seq_len=512,
    framework="PyTorch",
    tp=1,
    dp=16,
)


def test_bert_of_any_source_is_mapped() -> None:
    mapped = map_row(BERT)
    model = mapped.run["model"]
    assert (model["family"], model["layers"], model["hidden"], model["masked"]) == (
        "bert", 24, 1024, 80,
    )  # fmt: skip
    assert mapped.stack["attention"] == "unfused"
    assert mapped.run["stack"] == "pytorch-eager"
    with pytest.raises(Unsupported, match="relatives"):
        map_row(replace(BERT, model="RoBERTa-large"))
    with pytest.raises(Unsupported, match="shape is not stated"):
        map_row(replace(BERT, model="BERT"))


def test_bert_on_questions_has_no_head_of_words() -> None:
    mapped = map_row(replace(BERT, model="BERT-base SQuAD finetune", seq_len=None))
    assert mapped.run["training"]["sequence"] == 384
    assert mapped.run["model"]["head"] == "none"
    assert mapped.run["training"]["optimizer"] == "adamw"


def test_t5_is_built_as_its_framework_builds_it() -> None:
    row = replace(ROW, model="T5 220M", model_class="t5", heads=12, kv_heads=12, seq_len=512)
    megatron = map_row(row).run
    assert megatron["model"]["norm"] == "layernorm"
    assert megatron["training"]["target_sequence"] == 128
    released = map_row(replace(row, framework="HF transformers")).run["model"]
    assert "norm" not in released
    assert "activation" not in released
    gated = map_row(replace(row, model="flan-t5", framework="HF transformers")).run["model"]
    assert gated["activation"] == "geglu"


def test_runs_without_an_optimizer_get_none() -> None:
    assert map_optimizer(replace(ROW, task="forward+backward (no optimizer)")) == "none"
    assert map_optimizer(ROW) == "adamw"


def test_a_missing_batch_word_is_an_assumption() -> None:
    assumed = Assumed()
    words = map_training(replace(ROW, mbs=None), load_stack("megatron-te"), assumed)
    assert "microbatch" not in words
    assert assumed.lines == ["microbatch (not stated)"]


def test_the_key_is_equal_for_equal_runs_only() -> None:
    assert map_row(ROW).key == map_row(replace(ROW, id="made-2", quality="C")).key
    assert map_row(ROW).key != map_row(replace(ROW, mbs=2)).key
    assert map_row(ROW).key != map_row(replace(ROW, attention_impl="unfused")).key


def test_input_errors_are_no_part_of_the_mapping() -> None:
    try:
        map_row(replace(ROW, tp=3))
    except InputError:
        pytest.fail("a plan is checked when the run is loaded, not here")


def test_gradients_are_as_wide_as_published_recipes_of_the_software_keep_them() -> None:
    assumed = Assumed()
    words = map_training(ROW, load_stack("nemo"), assumed)
    assert words["precision"] == {
        "compute": "bf16",
        "grad_accumulate": "bf16",
        "grad_reduce": "bf16",
    }
    assert assumed.lines == ["gradients in bf16 (not stated; stack nemo)"]
    assert map_training(ROW, load_stack("megatron-te"), assumed)["precision"] == "bf16"


@pytest.mark.parametrize(("params", "shard"), [(7.0, 8), (175.0, None)])
def test_a_shard_group_holds_the_states(params: float, shard: int | None) -> None:
    row = replace(ROW, zero_stage="", sharding="FSDP+DP", params_b=params, gpu_mem_gb=80.0)
    assert map_plan(row, load_stack("jax-xla"), Assumed()).get("shard") == shard


def test_flagscale_shards_its_optimizer_as_its_script_says() -> None:
    mapped = map_row(replace(ROW, framework="flagscale", zero_stage="", recompute=""))
    assert mapped.run["plan"]["zero"] == 1
    assert mapped.run["plan"]["recompute"] == "none"
    assert sum("script of the source" in line for line in mapped.assumed) == 2
