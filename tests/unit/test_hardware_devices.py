"""Device files, names and aliases."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest

from foretrain.catalog import names, read_toml
from foretrain.errors import CatalogError, FileFormatError, InputError
from foretrain.hardware import Device, device_from_mapping, find_device, find_devices, list_devices
from foretrain.hardware.names import normal_name
from foretrain.units import GIB

DEVICES = list_devices()


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_every_device_is_physically_sensible(device: Device) -> None:
    assert device.name == device.name.lower()
    # the driver shows less than binary gigabytes of the printed size, but not much less
    assert 0.86 < device.memory_bytes / (device.memory_gb * GIB) <= 1.01
    assert 100e9 < device.memory_bandwidth < 10e12
    assert device.peak_flops["bf16" if device.supports("bf16") else "fp32"] > 1e12
    for narrow, wide in (("fp16", "tf32"), ("fp8", "fp16"), ("nvfp4", "fp8")):
        if device.supports(narrow) and device.supports(wide):
            assert device.peak(narrow) >= device.peak(wide)
    assert device.scaleup_bandwidth < device.memory_bandwidth
    assert device.node.domain >= 1
    assert all(":" in source for source in device.sources.values())


def test_every_file_is_named_after_its_device() -> None:
    assert [device.name for device in DEVICES] == list(names("devices"))


def test_the_catalog_holds_the_devices_that_the_documents_name() -> None:
    named = """a100-sxm-80gb a100-pcie-80gb v100-sxm-16gb h100-sxm h100-pcie h100-sxm-96gb-500w
    h200-sxm b200-sxm b300-sxm gb200 gb300 l40s a10 a10g rtx-4090 rtx-pro-6000 mi300x rtx-3090-ti
    rtx-a5000 mi250x"""
    assert set(named.split()) <= set(names("devices"))


def test_peaks_are_dense_not_sparse() -> None:
    assert find_device("h100-sxm").peak("bf16") == pytest.approx(989.4e12)
    assert find_device("h100-sxm").peak("fp8") == pytest.approx(1978.9e12)
    assert find_device("b200-sxm").peak("bf16") == pytest.approx(2250e12)


def test_the_500_w_part_is_not_the_data_sheet_part() -> None:
    full, limited = find_device("h100-sxm"), find_device("h100-sxm-96gb-500w")
    for dtype in full.peak_flops:
        ratio = limited.peak(dtype) / full.peak(dtype)
        assert ratio == pytest.approx(math.sqrt(500 / 700), rel=2e-3)
    assert limited.memory_bandwidth < full.memory_bandwidth
    assert limited.sources["peak_tflops"].startswith("guess:")


def test_memory_is_what_the_driver_shows() -> None:
    # device properties of public profiler traces, in bytes
    for name, seen in (
        ("a100-sxm-80gb", 84990623744),
        ("a100-sxm-40gb", 42297524224),
        ("v100-sxm-32gb", 34079637504),
        ("h100-sxm", 85018279936),
        ("mi300x", 205571227648),
    ):
        assert find_device(name).memory_bytes == pytest.approx(seen, rel=2e-4)


def test_one_mi250x_is_half_a_package() -> None:
    device = find_device("mi250x")
    assert device.memory_gb == 64
    assert device.peak("bf16") == pytest.approx(191.5e12)
    assert device.node.devices == 8


def test_peak_of_block_formats_and_of_what_is_not_supported() -> None:
    assert find_device("h100-sxm").peak("mxfp8") == find_device("h100-sxm").peak("fp8")
    v100 = find_device("v100-sxm-16gb")
    assert not v100.supports("bf16")
    with pytest.raises(InputError, match=r"bf16.*allowed: fp32, fp16") as caught:
        v100.peak("bf16")
    assert caught.value.exit_code == 1
    # the fp4 units of AMD compute another format
    assert not find_device("mi355x").supports("nvfp4")


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("H100", "h100-sxm"),
        ("H100-SXM5-80GB", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("H100-SXM", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("A100-80GB", "a100-sxm-80gb"),
        ("A100 SXM4 80GB", "a100-sxm-80gb"),
        ("a100_sxm4_80gb", "a100-sxm-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("A100 80 GB", "a100-sxm-80gb"),
        ("V100-32GB", "v100-sxm-32gb"),
        ("Tesla V100-SXM2-16GB", "v100-sxm-16gb"),
        ("MI300X", "mi300x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("RTX3090Ti", "rtx-3090-ti"),
        ("RTX3090", "rtx-3090"),
        ("RTX6000Ada", "rtx-6000-ada"),
        ("A6000", "rtx-a6000"),
        ("L40", "l40"),
        ("H200 141GB", "h200-sxm"),
        ("B200", "b200-sxm"),
        ("TPU v5e", "tpu-v5e"),
        ("  h100-sxm ", "h100-sxm"),
    ],
)
def test_names_as_people_type_them(typed: str, name: str) -> None:
    assert find_device(typed).name == name


@pytest.mark.parametrize(
    ("typed", "candidates"),
    [
        ("A100", {"a100-pcie-40gb", "a100-pcie-80gb", "a100-sxm-40gb", "a100-sxm-80gb"}),
        ("V100", {"v100-pcie-16gb", "v100-pcie-32gb", "v100-sxm-16gb", "v100-sxm-32gb"}),
        ("A100-SXM4", {"a100-sxm-40gb", "a100-sxm-80gb"}),
    ],
)
def test_ambiguous_names_are_refused_with_the_candidates(typed: str, candidates: set[str]) -> None:
    assert {device.name for device in find_devices(typed)} == candidates
    with pytest.raises(CatalogError, match="ambiguous") as caught:
        find_device(typed)
    assert all(name in str(caught.value) for name in candidates)


def test_unknown_names_get_the_nearest_one() -> None:
    with pytest.raises(CatalogError, match="did you mean 'h100-sxm'"):
        find_device("h100-sxmm")
    with pytest.raises(CatalogError, match="foretrain catalog devices"):
        find_device("zzzzzzzz")
    assert find_devices("h10") == ()  # a part of a word is no name


@pytest.mark.parametrize(
    ("typed", "memory_gb", "name"),
    [
        ("A100", 80, "a100-sxm-80gb"),
        ("A100-PCIe", 40, "a100-pcie-40gb"),
        ("V100", 16, "v100-sxm-16gb"),
        ("H100-SXM", 96, "h100-sxm-96gb-500w"),
        ("H100", 80, "h100-sxm"),
        ("H100", 94, "h100-nvl"),
        ("B200", 192, "b200-sxm"),
        ("H200", 140, "h200-sxm"),
    ],
)
def test_memory_chooses_the_variant(typed: str, memory_gb: float, name: str) -> None:
    assert find_device(typed, memory_gb=memory_gb).name == name


def test_a_memory_that_no_variant_has_is_refused() -> None:
    with pytest.raises(CatalogError, match=r"no A100 has this memory .*a100-sxm-80gb \(80 GB\)"):
        find_device("A100", memory_gb=16)


def test_no_alias_hides_a_device() -> None:
    for device in DEVICES:
        for alias in (device.name, *device.aliases):
            assert find_device(alias).name == device.name, alias
            assert normal_name(normal_name(alias)) == normal_name(alias)


def good() -> dict[str, Any]:
    return deepcopy(dict(read_toml("devices", "h100-sxm")))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tdp_w", -700, "'tdp_w': out of range"),
        ("tdp_w", float("nan"), "'tdp_w': not a finite number"),
        ("tdp_w", float("inf"), "'tdp_w': not a finite number"),
        ("tdp_w", "700 W", "'tdp_w': not a finite number"),
        ("tdp_w", True, "'tdp_w': not a finite number"),
        ("sm_count", 0, "'sm_count': not a valid count"),
        ("sm_count", 13.5, "'sm_count': not a valid count"),
        ("vendor", "nvida", "'vendor': unknown word"),
        ("pcie_gen", 2, "'pcie_gen': unknown generation"),
        ("scaleup_link", "none", "contradict"),
        ("peak_tflops", {}, "'peak_tflops': no peak given"),
        ("peak_tflops", {"fp12": 3}, "'peak_tflops.fp12': unknown key"),
        ("peak_tflops", 989, "'peak_tflops': not a table"),
        ("tdp_watt", 700, r"'tdp_watt': unknown key.*did you mean 'tdp_w'\?"),
        ("sources", {"tdp_w": "somewhere"}, "what kind of source"),
    ],
)
def test_bad_device_files_name_file_key_and_value(key: str, value: object, message: str) -> None:
    data = good() | {key: value}
    with pytest.raises(FileFormatError, match=message) as caught:
        device_from_mapping(data, where="my.toml", sources_required=True)
    assert "my.toml" in str(caught.value)


@pytest.mark.parametrize("key", ["name", "capacity_gib", "peak_tflops", "node", "memory_type"])
def test_missing_values_are_named(key: str) -> None:
    data = good()
    del data[key]
    with pytest.raises(FileFormatError, match=key):
        device_from_mapping(data, where="my.toml")


def test_all_problems_come_together() -> None:
    data = good() | {"tdp_w": -1, "sm_count": "many", "colour": "green"}
    with pytest.raises(FileFormatError) as caught:
        device_from_mapping(data, where="my.toml")
    assert len(caught.value.problems) == 3


def test_values_of_the_catalog_need_a_source_those_of_a_user_do_not() -> None:
    data = good()
    del data["sources"]["tdp_w"]
    assert device_from_mapping(data, where="my.toml").tdp_w == 700
    with pytest.raises(FileFormatError, match=r"sources\.tdp_w"):
        device_from_mapping(data, where="my.toml", sources_required=True)
