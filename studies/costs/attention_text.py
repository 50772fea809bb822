"""The text of attention_fitted.toml: entries of kernels, their cases and head dims."""

from __future__ import annotations

#: Head dims that a table lacks -> efficiency over that of 128: from the FlashAttention-2 paper
#: (A100), from the kernels of the inference engines on the same device (cuDNN on Blackwell).
OTHER_DIMS = {
    "ampere": {"32": 0.68, "64": 0.88, "256": 0.91},
    "cudnn": {"64": 0.60},
}
#: The constants but e, and the interval factors.
NAMES = ("e_b", "t0_us", "k0", "q", "g", "p", "a")
BANDS = ("band_long", "band")


def entry(
    kernel: str, names: list[str], patterns: list[str], generation: str, cases: dict, source: str
) -> str:
    """Returns one [[entry]] of the file; the first case gives the entry's own constants."""
    rho = {"ampere": 0.86, "hopper": 0.80}.get(generation, 0.79)
    lines = ["[[entry]]", f"devices = {_list(patterns)}"]
    if generation:
        lines.append(f"generations = {_list([generation])}")
    lines += [f'kernel = "{kernel}"', *([f"names = {_list(names)}"] if names else [])]
    lines += [f"rho = {rho}", 'mark = "fitted"', f'source = "{source}"']
    key = "cudnn" if kernel.startswith("cudnn") else generation
    for values in cases.values():
        known = values["e"]
        more = {d: r * known["128"] for d, r in OTHER_DIMS.get(key, {}).items() if d not in known}
        values["e"] = dict(sorted((known | more).items(), key=lambda item: int(item[0])))
    first, *others = cases
    lines += [*_constants(cases[first]), "[entry.e]", *_efficiency(cases[first])]
    lines += _dims("entry", cases[first])
    for case in cases if first != "causal" else others:
        lines += [f"[entry.{case}]", *_constants(cases[case])]
        lines += [f"[entry.{case}.e]", *_efficiency(cases[case])]
        lines += _dims(f"entry.{case}", cases[case])
    return "\n".join(lines) + "\n"


def _dims(place: str, values: dict) -> list[str]:
    lines = []
    for head, own in values.get("dim", {}).items():
        lines += [f"[{place}.dim.{head}]", *_constants(own)]
        lines += [f"[{place}.dim.{head}.e]", *_efficiency(own)]
    return lines


def _list(words: list[str]) -> str:
    return "[" + ", ".join(f'"{word}"' for word in words) + "]"


def _constants(values: dict) -> list[str]:
    numbers = [
        f"{name} = {float(f'{values[name]:.3g}')}"
        for name in (*NAMES, "tile", "token_bytes", *BANDS)
        if name in values
    ]
    numbers += [f"heads = {values['heads']}"] if "heads" in values else []
    return numbers + ([] if values.get("skips", True) else ["skips = false"])


def _efficiency(values: dict) -> list[str]:
    return [f"{dim} = {value:.3f}" for dim, value in values["e"].items()]
