"""Messages over a distance: a way of 50 ms delays a pipeline once, not every micro-batch."""

from __future__ import annotations

import pytest

from foretrain.predict import predict
from foretrain.report.json_form import to_json
from foretrain.run.load import load_run

STAGES, MICROBATCHES, WAY_S = 4, 16, 0.05


def run(latency: str = ""):
    return load_run(
        {
            "model": {"family": "gpt", "layers": 8, "hidden": 512, "heads": 8, "vocab": 8000,
                      "tied": False},
            "training": {"sequence": 512, "microbatch": 1, "global_batch": MICROBATCHES,
                         "precision": "fp16"},
            "plan": {"preset": "ddp", "pp": STAGES, "schedule": "gpipe", "overlap": {"p2p": True}},
            "cluster": f"{STAGES}x1 v100-sxm-16gb, 1x1G ethernet{latency}",
            "stack": "pytorch-eager",
        }
    )  # fmt: skip


def test_a_way_delays_the_pipeline_once_each_direction():
    near, far = predict(run()), predict(run(" [latency 50ms]"))
    delay = far.step_time_s.value - near.step_time_s.value
    ways = 2 * (STAGES - 1) * WAY_S  # there and back
    norm = far.step_time_s.value * 0.35  # the gradient norm is reduced over the stages, too
    assert ways * 0.9 < delay < ways + norm
    assert delay < 0.5 * 2 * MICROBATCHES * WAY_S  # not a way for every micro-batch


def test_flat_equals_folded_and_the_parts_add_up():
    far = run(" [latency 50ms]")
    folded, flat = predict(far, timeline=True), predict(far, flat=True)
    assert flat.step_time_s.value == pytest.approx(folded.step_time_s.value, rel=1e-9)
    form = to_json(folded, far)  # raises where parts do not sum to the step
    parts = form["time_parts_s"]
    assert parts["exposed_communication"]["pp"] >= WAY_S
