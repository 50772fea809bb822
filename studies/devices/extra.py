"""What the spec table does not hold: names, capacities, usual servers, and devices of our own.

Every figure carries its source. `measured` means read from a running device, `spec` a data sheet,
`guess` a rule that is stated in the text.
"""

from __future__ import annotations

PROFILER = "measured: total memory in the device properties of a public PyTorch profiler trace"
SMI = "measured: nvidia-smi total as public submissions list it, less the 0.45 % that a program "
SMI += "does not see (H100: 81,559 MiB listed, 79.18 GiB seen)"
OOM = "measured: total capacity that PyTorch prints when memory runs out, in public logs that "
OOM += "name the device"
SEEN = "guess: total capacity in public PyTorch out-of-memory messages of a device of this size; "
SEEN += "they do not name it"
SAME = "guess: as the SXM part, the same memory"
XLA = "measured: HBM limit that XLA prints when memory runs out, public logs"

#: name in the table -> (our name, form, memory as the driver shows it in GiB, its source, aliases)
NAMES: dict[str, tuple[str, str, float, str, tuple[str, ...]]] = {
    "K80 (per GK210 die)": (
        "k80",
        "pcie",
        11.17,
        SEEN,
        ("tesla k80", "k80 12gb"),
    ),
    "Tesla P4": ("p4", "pcie", 7.43, SEEN, ()),
    "P100 PCIe 16GB": ("p100-pcie-16gb", "pcie", 15.90, SEEN, ("p100-pcie",)),
    "P100 SXM2 16GB": ("p100-sxm-16gb", "sxm", 15.90, SEEN, ("p100-sxm",)),
    "GTX 1080 Ti": ("gtx-1080-ti", "pcie", 10.92, SEEN, ("1080ti", "1080 ti", "gtx 1080ti")),
    "Titan Xp": ("titan-xp", "pcie", 11.91, SEEN, ("titanxp",)),
    "V100 PCIe 16GB": ("v100-pcie-16gb", "pcie", 15.78, SEEN, ("v100-pcie 16g",)),
    "V100 PCIe 32GB": ("v100-pcie-32gb", "pcie", 31.74, SAME, ()),
    "V100 SXM2 16GB": ("v100-sxm-16gb", "sxm", 15.78, SEEN, ("v100 16gb",)),
    "V100 SXM2 32GB": (
        "v100-sxm-32gb",
        "sxm",
        31.74,
        f"{PROFILER} (34,079,637,504 bytes)",
        ("v100 32gb",),
    ),
    "T4": ("t4", "pcie", 14.75, OOM, ("t4 16gb",)),
    "RTX 2080 Ti": ("rtx-2080-ti", "pcie", 10.76, SEEN, ("2080ti", "2080 ti", "rtx 2080ti")),
    "RTX 3090": ("rtx-3090", "pcie", 23.69, SEEN, ("3090", "rtx 3090 24gb")),
    "RTX 4090": ("rtx-4090", "pcie", 23.64, OOM, ("4090", "rtx 4090 24gb")),
    "RTX 5090": ("rtx-5090", "pcie", 31.37, OOM, ("5090", "rtx 5090 32gb")),
    "A10": ("a10", "pcie", 22.06, SEEN, ("a10 24gb",)),
    "A10G": ("a10g", "pcie", 22.06, OOM, ("a10g 24gb",)),
    "A30": ("a30", "pcie", 23.53, OOM, ("a30 24gb", "a30 pcie")),
    "A40": ("a40", "pcie", 44.40, SEEN, ("a40 48gb",)),
    "RTX A6000": ("rtx-a6000", "pcie", 47.53, SEEN, ("a6000", "a6000 48gb", "rtxa6000")),
    "L4": ("l4", "pcie", 22.03, SEEN, ("l4 24gb",)),
    "L40S": ("l40s", "pcie", 44.40, OOM, ("l40s 48gb",)),
    "RTX 6000 Ada": (
        "rtx-6000-ada",
        "pcie",
        47.40,
        SEEN,
        ("6000 ada", "rtx6000ada", "rtx 6000 ada generation"),
    ),
    "RTX PRO 6000 Blackwell Server": (
        "rtx-pro-6000",
        "pcie",
        94.97,
        SEEN,
        (
            "pro 6000",
            "rtx pro6000",
            "rtx pro 6000 blackwell server edition",
            "rtx pro 6000 blackwell server",
            "rtx pro 6000 blackwell",
        ),
    ),
    "A100 PCIe 40GB": ("a100-pcie-40gb", "pcie", 39.39, SAME, ("a100 40gb pcie",)),
    "A100 PCIe 80GB": ("a100-pcie-80gb", "pcie", 79.15, SAME, ("a100 80gb pcie",)),
    "A100 SXM4 40GB": (
        "a100-sxm-40gb",
        "sxm",
        39.39,
        f"{PROFILER} (42,297,524,224 bytes)",
        ("a100 40gb", "a100 40gb sxm"),
    ),
    "A100 SXM4 80GB": (
        "a100-sxm-80gb",
        "sxm",
        79.15,
        f"{PROFILER} (84,990,623,744 bytes)",
        ("a100 80gb", "a100 80gb sxm"),
    ),
    "A800 SXM4 80GB": (
        "a800-sxm-80gb",
        "sxm",
        79.15,
        "guess: as the A100 SXM 80 GB, the same memory",
        ("a800", "a800 80gb", "a800 sxm"),
    ),
    "H100 PCIe 80GB": (
        "h100-pcie",
        "pcie",
        79.18,
        SAME,
        ("h100 pcie 80gb", "h100 80gb pcie"),
    ),
    "H100 SXM5 80GB": (
        "h100-sxm",
        "sxm",
        79.18,
        f"{PROFILER} (85,018,279,936 bytes)",
        ("h100", "h100 80gb", "h100 sxm 80gb", "h100 80gb hbm3", "h100 80gb sxm"),
    ),
    "H100 NVL 94GB": (
        "h100-nvl",
        "pcie",
        93.10,
        OOM,
        ("h100 nvl 94gb", "h100 pcie 94gb"),
    ),
    "H800 SXM5": (
        "h800-sxm",
        "sxm",
        79.18,
        "guess: as the H100 SXM, the same memory",
        ("h800", "h800 80gb", "h800 sxm 80gb"),
    ),
    "H20": ("h20", "sxm", 95.15, f"{SMI}: 97,871 MiB", ("h20 96gb", "h20 sxm")),
    "H200 SXM 141GB": (
        "h200-sxm",
        "sxm",
        139.80,
        OOM,
        ("h200", "h200 141gb", "h200 sxm 141gb", "h200 141gb hbm3e"),
    ),
    "GH200 96GB": (
        "gh200",
        "superchip",
        95.00,
        SEEN,
        ("gh200 96gb", "gh200 480gb", "gh200 120gb"),
    ),
    "B200 SXM": (
        "b200-sxm",
        "sxm",
        178.35,
        OOM,
        ("b200", "b200 180gb", "b200 192gb", "b200 sxm 180gb"),
    ),
    "GB200 (per GPU)": (
        "gb200",
        "nvl72",
        184.31,
        OOM,
        ("gb200 186gb", "gb200 nvl72"),
    ),
    "B300 SXM": ("b300-sxm", "sxm", 267.69, OOM, ("b300", "b300 270gb")),
    "GB300 (per GPU)": (
        "gb300",
        "nvl72",
        276.50,
        OOM,
        ("gb300 279gb", "gb300 nvl72"),
    ),
    "MI100": ("mi100", "pcie", 31.98, "guess: 32 GiB less what the driver keeps on MI250X", ()),
    "MI210": ("mi210", "pcie", 63.98, "guess: as one half of an MI250X, the same memory", ()),
    "MI250X (per package, 2 GCD)": (
        "mi250x",
        "oam",
        63.98,
        f"{PROFILER} (68,702,699,520 bytes, one half of a package)",
        ("mi250x gcd", "mi250"),
    ),
    "MI300X": (
        "mi300x",
        "oam",
        191.45,
        f"{PROFILER} (205,571,227,648 bytes)",
        ("mi300x 192gb", "mi300x oam"),
    ),
    "MI325X": ("mi325x", "oam", 255.98, SEEN, ()),
    "MI355X": ("mi355x", "oam", 287.98, SEEN, ()),
    "TPU v3 (chip)": (
        "tpu-v3",
        "pod",
        30.96,
        "measured: XLA limit of 15.48 GiB per core, public logs",
        (),
    ),
    "TPU v4 (chip)": ("tpu-v4", "pod", 30.75, XLA, ("tpu v4p",)),
    "TPU v5e (chip)": (
        "tpu-v5e",
        "pod",
        15.75,
        "guess: 16 GiB less the 0.25 GiB XLA keeps on v5p",
        ("tpu v5 lite", "v5e"),
    ),
    "TPU v5p (chip)": ("tpu-v5p", "pod", 95.74, XLA, ("v5p",)),
    "TPU v6e (chip)": (
        "tpu-v6e",
        "pod",
        31.25,
        "measured: memory per device in a public vLLM usage record (33,550,237,696 bytes)",
        ("v6e", "trillium"),
    ),
    "TPU v7x (chip)": (
        "tpu-v7x",
        "pod",
        189.0,
        "guess: 192 GiB less the 1.6 % that XLA keeps on other TPUs",
        ("tpu7x", "tpu v7", "ironwood"),
    ),
    "Trainium1 (chip)": (
        "trainium1",
        "node",
        32.0,
        "spec: 32 GiB per chip, nothing taken off",
        ("trn1",),
    ),
    "Trainium2 (chip)": (
        "trainium2",
        "node",
        96.0,
        "spec: 96 GiB per chip, nothing taken off",
        ("trn2",),
    ),
    "Gaudi2": ("gaudi2", "oam", 94.6, "guess: 96 GiB less 1.5 % for the system", ()),
    "Gaudi3": ("gaudi3", "oam", 126.1, "guess: 128 GiB less 1.5 % for the system", ()),
    "Ascend 910B (B2-class)": (
        "ascend-910b",
        "module",
        61.0,
        "guess: 64 GiB less 3 GiB for the system",
        ("910b",),
    ),
}

#: our name -> (devices, NICs, Gb/s, fabric, scale-up kind, domain, p2p, source); what the table
#: leaves out. A domain of 0 means the node.
HGX = "HGX board, one NIC per GPU"
GEFORCE = "guess: a workstation of 2 cards; GeForce drivers switch P2P off since 2020"
SMALL = "guess: a server of 4 cards and one 25 Gb/s port"
INFERENCE = "guess: a server of 8 cards and one 100 Gb/s port"
C2C = "spec: NVLink-C2C carries 900 GB/s in both directions together"
PCIE = "guess: a server of 8 cards and two 200 Gb/s ports"
Node = tuple[int, int, float, str, str, int, bool, str]
NODES: dict[str, Node] = {
    "k80": (8, 1, 10, "ethernet", "none", 0, True, "spec: AWS p2.8xlarge"),
    "p4": (4, 1, 25, "ethernet", "none", 0, True, SMALL),
    "p100-pcie-16gb": (4, 1, 100, "ib", "none", 0, True, INFERENCE),
    "p100-sxm-16gb": (8, 4, 100, "ib", "mesh", 0, True, "spec: DGX-1 (Pascal), hybrid cube mesh"),
    "gtx-1080-ti": (4, 1, 10, "ethernet", "none", 0, True, "guess: a workstation of 4 cards"),
    "titan-xp": (4, 1, 10, "ethernet", "none", 0, True, "guess: a workstation of 4 cards"),
    "v100-pcie-16gb": (4, 1, 100, "ib", "none", 0, True, INFERENCE),
    "v100-pcie-32gb": (4, 1, 100, "ib", "none", 0, True, INFERENCE),
    "v100-sxm-16gb": (8, 4, 100, "ib", "mesh", 0, True, "spec: DGX-1V, hybrid cube mesh"),
    "v100-sxm-32gb": (8, 4, 100, "ib", "mesh", 0, True, "spec: DGX-1V, hybrid cube mesh"),
    "t4": (4, 1, 50, "ethernet", "none", 0, True, "spec: AWS g4dn.12xlarge, 4 cards, 50 Gb/s"),
    "rtx-2080-ti": (4, 1, 10, "ethernet", "none", 0, False, GEFORCE),
    "rtx-3090": (2, 1, 10, "ethernet", "none", 0, False, GEFORCE),
    "rtx-3090-ti": (2, 1, 10, "ethernet", "none", 0, False, GEFORCE),
    "rtx-4090": (2, 1, 10, "ethernet", "none", 0, False, GEFORCE),
    "rtx-5090": (2, 1, 10, "ethernet", "none", 0, False, GEFORCE),
    "a10": (4, 1, 100, "ethernet", "none", 0, True, INFERENCE),
    "a10g": (8, 1, 100, "ethernet", "none", 0, True, "spec: AWS g5.48xlarge, 8 cards, 100 Gb/s"),
    "a30": (8, 1, 100, "ethernet", "none", 0, True, INFERENCE),
    "a40": (8, 1, 100, "ib", "none", 0, True, INFERENCE),
    "rtx-a6000": (4, 1, 100, "ethernet", "none", 0, True, INFERENCE),
    "rtx-a5000": (4, 1, 100, "ethernet", "none", 0, True, INFERENCE),
    "rtx-8000": (4, 1, 100, "ethernet", "none", 0, True, INFERENCE),
    "l4": (8, 1, 100, "ethernet", "none", 0, True, INFERENCE),
    "l40": (8, 1, 100, "ethernet", "none", 0, True, INFERENCE),
    "l40s": (8, 2, 200, "ethernet", "none", 0, True, PCIE),
    "rtx-6000-ada": (4, 1, 100, "ethernet", "none", 0, True, INFERENCE),
    "rtx-pro-6000": (8, 2, 400, "roce", "none", 0, True, "guess: a server of 8 cards, 2 x 400G"),
    "a100-pcie-40gb": (8, 2, 200, "ib", "none", 0, True, PCIE),
    "a100-pcie-80gb": (8, 2, 200, "ib", "none", 0, True, PCIE),
    "a100-sxm-40gb": (8, 8, 200, "ib", "nvswitch", 0, True, "spec: DGX A100 320 GB"),
    "a100-sxm-80gb": (8, 8, 200, "ib", "nvswitch", 0, True, "spec: DGX A100 640 GB"),
    "a800-sxm-80gb": (8, 8, 200, "ib", "nvswitch", 0, True, f"spec: {HGX}"),
    "h100-pcie": (8, 2, 200, "ib", "none", 0, True, PCIE),
    "h100-nvl": (8, 2, 400, "ib", "pairs", 2, True, "guess: a server of 8 cards, bridged in pairs"),
    "h100-sxm": (8, 8, 400, "ib", "nvswitch", 0, True, "spec: DGX H100"),
    "h100-sxm-96gb-500w": (8, 8, 400, "roce", "nvswitch", 0, True, f"spec: {HGX}"),
    "h800-sxm": (8, 8, 400, "ib", "nvswitch", 0, True, f"spec: {HGX}"),
    "h20": (8, 8, 400, "ib", "nvswitch", 0, True, f"spec: {HGX}"),
    "h200-sxm": (8, 8, 400, "ib", "nvswitch", 0, True, "spec: DGX H200"),
    "gh200": (1, 1, 400, "ib", "mesh", 0, True, "spec: one superchip per node"),
    "b200-sxm": (8, 8, 400, "ib", "nvswitch", 0, True, "spec: DGX B200"),
    "gb200": (4, 4, 400, "ib", "nvswitch", 72, True, "spec: GB200 NVL72, trays of 4 GPUs"),
    "b300-sxm": (8, 8, 800, "ib", "nvswitch", 0, True, "spec: DGX B300"),
    "gb300": (4, 4, 800, "ib", "nvswitch", 72, True, "spec: GB300 NVL72, trays of 4 GPUs"),
    "mi100": (8, 1, 200, "ib", "mesh", 4, True, "guess: two hives of 4 cards and one port"),
    "mi210": (8, 1, 200, "ib", "mesh", 4, True, "guess: two hives of 4 cards and one port"),
    "mi250x": (8, 4, 200, "slingshot", "mesh", 0, True, "spec: Frontier node, 4 packages"),
    "mi300x": (8, 8, 400, "roce", "mesh", 0, True, "spec: 8-device OAM board, full mesh"),
    "mi325x": (8, 8, 400, "roce", "mesh", 0, True, "spec: 8-device OAM board, full mesh"),
    "mi355x": (8, 8, 400, "roce", "mesh", 0, True, "spec: 8-device OAM board, full mesh"),
    "tpu-v3": (4, 1, 100, "ethernet", "mesh", 1024, True, "spec: pod of 1,024 chips; NIC guessed"),
    "tpu-v4": (4, 1, 200, "ethernet", "mesh", 4096, True, "spec: pod of 4,096 chips; NIC guessed"),
    "tpu-v5e": (8, 1, 200, "ethernet", "mesh", 256, True, "spec: pod of 256 chips; NIC guessed"),
    "tpu-v5p": (4, 1, 200, "ethernet", "mesh", 8960, True, "spec: pod of 8,960 chips; NIC guessed"),
    "tpu-v6e": (8, 2, 200, "ethernet", "mesh", 256, True, "spec: pod of 256 chips; NIC guessed"),
    "tpu-v7x": (4, 2, 200, "ethernet", "mesh", 9216, True, "spec: pod of 9,216 chips; NIC guessed"),
    "trainium1": (16, 8, 100, "efa", "mesh", 0, True, "spec: AWS trn1.32xlarge, 800 Gb/s"),
    "trainium2": (16, 16, 200, "efa", "mesh", 0, True, "spec: AWS trn2.48xlarge, 3.2 Tb/s"),
    "gaudi2": (8, 24, 100, "roce", "mesh", 0, True, "spec: HLS-Gaudi2, 3 x 100 GbE per device out"),
    "gaudi3": (8, 24, 200, "roce", "mesh", 0, True, "spec: HLS-Gaudi3, 3 x 200 GbE per device out"),
    "ascend-910b": (8, 8, 200, "roce", "mesh", 0, True, "spec: Atlas 800T A2"),
}

#: Values that the table leaves empty: our name -> key -> (value, source).
FILLED: dict[str, dict[str, tuple[float, str]]] = {
    # rocBLAS multiplies fp32 in the matrix units; the table prints the vector rate
    "mi100": {"fp32": (46.1, "spec: AMD MI100 datasheet, fp32 matrix")},
    "mi210": {"fp32": (45.3, "spec: AMD MI210 datasheet, fp32 matrix")},
    "mi250x": {"fp32": (47.85, "spec: AMD MI250X datasheet, fp32 matrix; half of the package")},
    "gh200": {"host_gb_s": (450, f"{C2C} (NVIDIA GH200 datasheet)")},
    "gb200": {
        "host_gb_s": (225, f"{C2C} (NVIDIA GB200 NVL72 datasheet); one Grace serves two GPUs")
    },
    "gb300": {
        "host_gb_s": (225, f"{C2C} (NVIDIA GB300 NVL72 datasheet); one Grace serves two GPUs")
    },
    "tpu-v3": {"l2_mib": (32.0, "spec: 16 MiB of vector memory per core")},
    "tpu-v4": {"l2_mib": (128.0, "spec: common memory of the chip")},
    "tpu-v5e": {
        "l2_mib": (128.0, "spec: vector memory of the core"),
        "tdp_w": (220.0, "guess: not published; the power of a TPU v3"),
        "pcie_gen": (4, "guess: not published"),
    },
    "tpu-v5p": {
        "l2_mib": (128.0, "guess: as on v4"),
        "tdp_w": (450.0, "guess: not published"),
        "pcie_gen": (4, "guess: not published"),
    },
    "tpu-v6e": {
        "l2_mib": (128.0, "spec: vector memory of the core"),
        "tdp_w": (300.0, "guess: not published"),
        "pcie_gen": (4, "guess: not published"),
    },
    "tpu-v7x": {
        "l2_mib": (128.0, "guess: as on v5p"),
        "tdp_w": (960.0, "guess: not published"),
        "pcie_gen": (5, "guess: not published"),
    },
    "trainium1": {
        "l2_mib": (48.0, "spec: 24 MiB of state buffer per core"),
        "tdp_w": (300.0, "guess: not published"),
    },
    "trainium2": {"l2_mib": (192.0, "spec: 24 MiB of state buffer per core")},
    "rtx-pro-6000": {
        "tf32": (233.9, "guess: half of the bf16 rate, as on all NVIDIA devices of this kind")
    },
}

DERATED = "guess: peak of the 700 W part x (500/700)^0.5, the power limit"
#: Devices that the table does not hold: a row of the table with changes, or all of its columns.
#: our name -> (row to start from, changed columns, form, GiB, source of it, aliases, sources)
Extra = tuple[str, dict[str, str], str, float, str, tuple[str, ...], dict[str, str]]
EXTRA: dict[str, Extra] = {
    "rtx-3090-ti": (
        "RTX 3090",
        {
            "sm_count": "84", "fp32_tflops": "40.0", "tf32_tflops_dense": "40.0",
            "fp16_tflops_dense": "80.0", "bf16_tflops_dense": "80.0", "mem_bw_GBs": "1008.0",
            "tdp_W": "450.0", "source": "NVIDIA product page; rates as the RTX 3090 x SM x clock",
        },
        "pcie", 23.69, SEEN, ("3090 ti", "3090ti", "rtx 3090ti"), {},
    ),
    "rtx-a5000": (
        "RTX A6000",
        {
            "sm_count": "64", "fp32_tflops": "27.8", "tf32_tflops_dense": "55.6",
            "fp16_tflops_dense": "111.1", "bf16_tflops_dense": "111.1", "mem_gb": "24",
            "tdp_W": "230.0", "source": "NVIDIA RTX A5000 datasheet (dense = half of sparse)",
        },
        "pcie", 23.68, OOM, ("a5000", "a5000 24gb", "rtxa5000"), {},
    ),
    "l40": (
        "L40S",
        {
            "fp32_tflops": "90.5", "tf32_tflops_dense": "90.5", "fp16_tflops_dense": "181.05",
            "bf16_tflops_dense": "181.05", "fp8_tflops_dense": "362.0", "tdp_W": "300.0",
            "source": "NVIDIA L40 datasheet",
        },
        "pcie", 44.40, "guess: as the L40S, the same memory", ("l40 48gb",), {},
    ),
    "rtx-8000": (
        "RTX 2080 Ti",
        {
            "sm_count": "72", "fp32_tflops": "16.3", "fp16_tflops_dense": "130.5",
            "mem_gb": "48", "mem_bw_GBs": "672.0", "l2_mb": "6.0", "tdp_W": "260.0",
            "source": "NVIDIA Quadro RTX 8000 datasheet",
        },
        "pcie", 47.5, "guess: 48 GiB less 1 %, as on the RTX A6000",
        ("quadro rtx 8000", "rtx8000"), {},
    ),
    "h100-sxm-96gb-500w": (
        "H100 SXM5 80GB",
        {
            "fp32_tflops": "56.6", "tf32_tflops_dense": "418.1", "fp16_tflops_dense": "836.2",
            "bf16_tflops_dense": "836.2", "fp8_tflops_dense": "1672.5", "mem_gb": "96",
            "mem_type": "HBM2e", "mem_bw_GBs": "2400.0", "tdp_W": "500.0",
            "source": "NVIDIA H100 datasheet with HBM2e and a power limit of 500 W",
        },
        "sxm", 95.04, "guess: 96 GiB less 1 %, as on the 80 GB part", ("h100 96gb", "h100 500w"),
        {
            "peak_tflops": DERATED,
            "memory_bandwidth_gb_s": "spec: 2.4 TB/s, as published runs on this part state it",
        },
    ),
}  # fmt: skip
