"""Lessons hold with another seed and more ranks."""

from __future__ import annotations

import pytest

from tests.tools.run_notebooks import FOLDER, LESSONS, execute

NAMES = [lesson.stem for lesson in LESSONS]
OTHER = {
    "00_start_here": {"seed": 1, "world_size": 3},
    "02_from_a_cell_to_ranks": {"seed": 1, "world_size": 3},
    "03_collectives": {"seed": 1, "world_size": 3},
    "04_data_parallel": {"seed": 1, "devices": 3},
    "05_ddp_by_hand": {"seed": 1, "world_size": 3},
    "06_ddp": {"seed": 1, "world_size": 3},
    "06b_local_sgd": {"seed": 1, "world_size": 3},
    "07_model_parallel": {"seed": 1},
    "08_pipeline": {"seed": 1},
    "09_sharding": {"seed": 1, "world_size": 4},
    "10_compare": {"seed": 1, "world_size": 4},
    "11_scaling": {"seed": 1, "batch_size": 100, "repeats": 3},
    "12_when_parallel_equals_serial": {"seed": 1, "world_size": 3},
    "13_checkpoint": {"seed": 1, "world_size": 3},
    "14_when_it_hangs": {"seed": 1, "world_size": 4, "odd": 2},
    "14b_who_is_late": {"seed": 1, "world_size": 3},
    "14c_when_ranks_differ": {"seed": 1, "world_size": 4, "odd": 2},
    "15_launchers": {"seed": 1, "world_size": 4},
    "15c_resnet_at_scale": {"seed": 1, "batch_size": 65, "epochs": 2, "trials": 2},
    "16_pitfalls_starting": {"seed": 1, "world_size": 3},
    "16b_pitfalls_training": {"seed": 1, "world_size": 3},
    "21_sharding_a_gpt": {"seed": 1, "world_size": 4},
    "22_tensor_parallel": {"seed": 1, "world_size": 4},
    "23_cutting_the_sequence": {"seed": 1, "world_size": 2},
    "24_pipelines_side_by_side": {"seed": 1},
    "25_experts": {"seed": 1, "world_size": 4},
    "26_plan_a_run": {"seed": 1, "sequence": 64},
}
"""A second run of each, with another seed and more ranks where the lesson has them."""


def test_there_is_a_second_run_for_every_lesson():
    assert set(OTHER) == set(NAMES)


@pytest.mark.notebook
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.wide if n[:2] in ("00", "10") else pytest.mark.long) for n in NAMES],
)
def test_a_lesson_holds_with_another_seed_and_more_ranks(name, tmp_path):
    execute(FOLDER / f"{name}.ipynb", tmp_path, {**OTHER[name]})
