"""What the suggested plans can tell, in words."""

from __future__ import annotations

from foretrain.analysis.fit_suggest import Suggestion
from foretrain.report.suggest_text import render_suggestion


def first_lines(**named: float) -> str:
    suggestion = Suggestion(plans=(), steps_s=(), named=named, noise=0.02, tried=30)
    return " ".join(render_suggestion(suggestion, "tp8").split("\n\n")[0].split())


def test_constants_that_are_mostly_named_come_first_and_the_others_less_surely() -> None:
    text = first_lines(compute=0.91, scaleup=0.78, nic=0.99, host=0.1)
    assert text == (
        "Three plans of tp8 that tell apart what could be off: efficiency of operators, bandwidth "
        "of the NICs; less surely: bandwidth inside a node."
    )


def test_nothing_is_promised_where_no_constant_is_mostly_named() -> None:
    assert first_lines(compute=0.5).startswith("No three plans of tp8 tell the constants")
