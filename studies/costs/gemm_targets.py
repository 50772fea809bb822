"""Which tables stand for which devices, what is known of their kernels, and priors of the fit."""

from __future__ import annotations

from dataclasses import dataclass

HALF = ("bf16", "fp16", "tf32")


@dataclass(frozen=True)
class Target:
    """Which devices an entry of a table's device holds for."""

    devices: tuple[str, ...]
    generations: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    tiles: str = "basic"


TARGETS = {
    "a100-sxm-80gb": Target(("a100-sxm*", "a800-sxm*"), ("ampere",), ("sxm",)),
    "h100-sxm": Target(("h100-sxm*", "h200-sxm*", "gh200*", "h800*", "h20"), ("hopper",)),
    "b200-sxm": Target(("b200*",), ("blackwell",), ("sxm",), "fine"),
    "b300-sxm": Target(("b300*",), tiles="fine"),
    "gb200": Target(("gb200*", "gb300*"), tiles="fine"),
    "rtx-pro-6000": Target(("rtx-pro-6000*",), ("blackwell",), ("pcie",)),
    "mi300x": Target(("mi300x", "mi325x"), ("cdna3", "cdna4")),
    "v100-sxm-16gb": Target(("v100-sxm*",), ("volta",)),
    "v100-pcie-32gb": Target(("v100-pcie*",)),
    "a100-pcie-40gb": Target(("a100-*", "a800-*"), ("ampere",)),
    "t4": Target(("t4",), ("turing",)),
    "p4": Target(("p4",)),
    "p100-pcie-16gb": Target(("p100*",), ("pascal", "maxwell", "kepler")),
    "gtx-1080-ti": Target(("gtx-1080-ti", "titan-xp", "titan-x*")),
    "a40": Target(("a40",)),
}
SOURCES = {
    "aic_gemm": "NVIDIA aiconfigurator 0.12.0",
    "xla_gemm": "OpenXLA GemmPerfTable",
    "deepbench_gemm": "baidu-research/DeepBench",
    "neusight_gemm": "NeuSight",
    "vidur_gemm": "microsoft/vidur",
}
#: Kernels that a table calls one by one from the host, outside CUDA graphs.
HOST_BOUND = (
    "deepgemmfp8blockscaledmmkernel", "cutlassfp8blockscaledmmkernel",
    "flashinferfp8blockscaledmmkernel",
)  # fmt: skip
#: Kernels whose times hold launches of their own: no default is made of them.
ODD = ("torch_bmm", *HOST_BOUND)
#: Kernels that choose one tile by a rule of their source (gemm_tiles.toml): (device, kernel).
RULES = {
    ("h100-sxm", "cutlassfp8scaledmmlinearkernel"): "vllm-sm90-fp8",
    ("h100-sxm", "sglang_sgl_kernel_fp8_scaled_mm"): "sgl-sm90-fp8",
    ("rtx-pro-6000", "cutlassfp8scaledmmlinearkernel"): "vllm-sm120-fp8",
    **{
        (device, kernel): rule
        for device in ("b200-sxm", "b300-sxm", "gb200")
        for kernel, rule in (
            ("cutlassfp8scaledmmlinearkernel", "vllm-sm100-fp8"),
            ("sglang_sgl_kernel_fp8_scaled_mm", "sgl-sm100-fp8"),
        )
    },
}
#: Tables whose kernels run on other units than the dtype's own: XLA multiplies fp32 in xf32 on
#: MI300X (up to 252 TFLOP/s, of 163 in fp32), so the table says nothing of an unknown kernel.
UNITS = {("mi300x", "fp32"): "tf32"}
#: Devices whose constants stand in for each other: a family is left out as a whole.
FAMILIES = {
    "a100-sxm-80gb": "ampere", "h100-sxm": "hopper", "b200-sxm": "blackwell",
    "b300-sxm": "blackwell", "gb200": "blackwell", "rtx-pro-6000": "blackwell gddr",
}  # fmt: skip
#: Constants: where a fit starts, the width of its prior, bounds.
PRIORS: dict[str, tuple[float, float, float, float]] = {
    "e_c": (0.85, 0.3, 0.02, 1.1),
    "e_b": (0.80, 0.3, 0.05, 1.1),
    "t0_us": (2.5, 0.6, 0.2, 200.0),
    "k0": (120.0, 0.6, 1.0, 3000.0),
    "c": (0.5, 1.0, 0.001, 10.0),
    "sigma_us": (2.0, 0.7, 0.01, 60.0),
    "beta": (0.5, 1.0, 0.01, 20.0),
    "q": (0.7, 0.5, 0.01, 1.0),
    "clock": (0.12, 0.7, 0.001, 0.6),
    "clock_ms": (1.0, 1.5, 0.01, 300.0),
    # low precision: the cast of the activation that a table counts
    "cast_bytes": (4.0, 0.7, 0.01, 60.0),
    # named kernels of low precision: a cast that works row by row
    "row_ns": (0.5, 2.0, 0.001, 50.0),
    # kernels with one tile by rule: what a last row of tiles costs that is not full
    "ragged": (0.3, 1.5, 0.001, 2.0),
    # calls that are launched one by one: the host's time, and more for rows that need padding
    "host_us": (100.0, 0.7, 1.0, 1000.0),
    "host_odd_us": (20.0, 2.0, 0.1, 1000.0),
}
BASE = tuple(PRIORS)[:10]
#: A second start: hard waves of tiles that lose nothing by being small. The cost has two basins.
SECOND = {"q": 0.9, "c": 0.1}
LOW_PRECISION = ("fp8", "fp8_block", "nvfp4")
