"""What `calibrate ops` prints: every refitted entry, its error before and after, what moved."""

from __future__ import annotations

from foretrain.report.tables import table
from foretrain.validation.ops.calibrate import Calibrated, Refit


def render_calibrated(result: Calibrated, output: str | None) -> str:
    """Returns the text for a terminal."""
    rows = [["operators", "rows", "error before", "after", "constants that moved"]]
    for refit in result.refits:
        name = " ".join(word for word in (refit.kind, refit.dtype, refit.kernel) if word)
        rows.append(
            [name, f"{refit.rows:,}", f"{refit.before:.1%}", f"{refit.after:.1%}", _changes(refit)]
        )
    total = sum(refit.rows for refit in result.refits if not refit.kernel) or sum(
        refit.rows for refit in result.refits
    )
    lines = [f"{result.device.name}: constants refitted to {total:,} rows", ""]
    lines += table(rows, left=(0, 4))
    if result.unused:
        lines += ["", "Not used:"]
        lines += [f"  {count:6,d}  {reason}" for reason, count in result.unused.items()]
    if output is None:
        lines += ["", "Nothing written: give --output FILE, then predict with --calibration FILE."]
    elif output != "-":
        lines += ["", f"Written to {output}; use it with --calibration {output}."]
    return "\n".join(lines)


def _changes(refit: Refit) -> str:
    moved = [
        f"{name} {old:.3g} -> {new:.3g}"
        for name, (old, new) in refit.changes.items()
        if abs(new - old) > 0.01 * abs(old)
    ]
    return ", ".join(moved) or "none by more than 1 %"
