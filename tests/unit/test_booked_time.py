"""Where the time went: queued collectives, copies to the host, the stage that others wait for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretrain.predict import predict
from foretrain.report.text import render
from foretrain.run.load import load_run


def parts(**words):
    run = {
        "model": "gpt2-345m",
        "training": {"sequence": 1024, "global_batch": 32, "microbatch": 1, "precision": "bf16"},
        "plan": {"preset": "ddp"},
        "cluster": "8x4 a100-sxm-80gb, 4x200G slingshot-tcp",
        "stack": "megatron",
        **words,
    }
    return predict(load_run(run)).time_parts


def test_collectives_that_queue_behind_each_other_are_exposed_not_waiting():
    queued = parts()
    assert queued.exposed_communication["dp"] > 0.7 * queued.total
    assert queued.wait < 0.02 * queued.total
    one_by_one = parts(plan={"preset": "ddp", "overlap": False})
    assert queued.exposed_communication["dp"] < one_by_one.exposed_communication["dp"]


@pytest.mark.parametrize("stage", [0, 3])
def test_the_sum_of_tied_embeddings_does_not_turn_reductions_into_a_bubble(stage):
    def stage_parts(tied: bool):
        run = {
            "model": {
                "family": "gpt", "layers": 48, "hidden": 12288, "heads": 96, "vocab": 51200,
                "max_positions": 2048, "tied": tied,
            },
            "training": {
                "sequence": 2048, "global_batch": 256, "microbatch": 2, "precision": "bf16",
            },
            "plan": {
                "preset": "megatron", "tp": 8, "pp": 4, "interleave": 3, "zero": 1,
                "sequence_parallel": True,
            },
            "cluster": "16x8 h100-sxm, 8x400G ib",
            "stack": "megatron-te",
        }  # fmt: skip
        result = predict(load_run(run))
        return next(c.parts for c in result.classes if c.stage == stage)

    tied, apart = stage_parts(True), stage_parts(False)
    assert tied.bubble == pytest.approx(apart.bubble, rel=0.05)
    assert tied.exposed_communication["dp"] >= 0.95 * apart.exposed_communication["dp"]


def test_copies_to_the_host_have_a_name_of_their_own():
    plan = {"preset": "megatron", "cpu_offloading_num_layers": 16}
    offloaded = parts(plan=plan, cluster="1x8 h100-sxm", model="llama-3-8b")
    assert offloaded.exposed_communication["copy"] > 0.05 * offloaded.total
    assert offloaded.other < 0.02 * offloaded.total


def test_the_report_names_the_stage_that_all_others_wait_for():
    run = load_run(
        {
            "model": "gpt2-345m",
            "training": {"sequence": 1024, "global_batch": 256, "microbatch": 16},
            "plan": {"preset": "megatron", "pp": 4, "stages": [2, 2, 18, 2]},
            "cluster": "1x4 a100-sxm-80gb",
        }
    )
    result = predict(run)
    assert "The others wait for" not in render(result, run)  # stage 2 itself is shown
    idle = replace(result, last_class=0, time_parts=result.classes[0].parts)
    text = " ".join(render(idle, run).split())
    assert "The others wait for stage 2: compute 98." in text
