"""Finding events, launches and rank classes by what a user calls them."""

from __future__ import annotations

from fnmatch import fnmatchcase


def matches(label: str, what: str, *, path: str = "") -> bool:
    """Returns whether `what` names the label: its text, a pattern of it, or a path above it.

    `path` is the block that the label stands in ("layers.0"). Equal layers share one template, so
    a layer number in `what` stands for any layer. A label of fused operators ("a.q+a.k") has the
    name of each of them; a gradient ("d.a.q") also that of its operator.
    """
    pattern = ".".join("*" if part.isdigit() else part for part in what.split("."))
    return any(
        fnmatchcase(name, wanted)
        for name in label_names(label, path)
        for wanted in (what, pattern, f"{pattern}.*")
    )


def label_names(label: str, path: str = "") -> list[str]:
    """Returns every name a label goes by, the whole text first."""
    names = [label]
    prefix = f"{path}." if path else ""
    for piece in label.split(" ")[0].split("+"):
        parts = piece.split(".")
        if not path and len(parts) > 2 and (parts[1] == "*" or parts[1].isdigit()):
            prefix = f"{parts[0]}.{parts[1]}."  # only the first of fused names has its block
        rest = piece.removeprefix(prefix).removeprefix("d.")
        names += [piece, f"{prefix}{rest}"]
    return names
