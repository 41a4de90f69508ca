"""Lessons hold with another seed and more ranks."""

from __future__ import annotations

import pytest

from tests.tools.run_notebooks import FOLDER, LESSONS, execute

NAMES = [lesson.stem for lesson in LESSONS]
OTHER = {
    "00_start_here": {"seed": 1, "world_size": 3},
    "01_collectives": {"seed": 1, "world_size": 3},
    "02_data_parallel": {"seed": 1, "devices": 3},
    "03_ddp_by_hand": {"seed": 1, "world_size": 3},
    "04_ddp": {"seed": 1, "world_size": 3},
    "05_model_parallel": {"seed": 1},
    "06_pipeline": {"seed": 1},
    "07_compare": {"seed": 1, "world_size": 4},
    "08_when_parallel_equals_serial": {"seed": 1, "world_size": 3},
    "09_scaling": {"seed": 1, "batch_size": 100, "repeats": 3},
    "10_who_is_late": {"seed": 1, "world_size": 3},
    "11_from_a_cell_to_ranks": {"seed": 1, "world_size": 3},
    "12_when_it_hangs": {"seed": 1, "world_size": 4, "odd": 2},
    "13_when_ranks_differ": {"seed": 1, "world_size": 4, "odd": 2},
    "14_checkpoint": {"seed": 1, "world_size": 3},
    "15_launchers": {"seed": 1, "world_size": 4},
    "16_resnet_at_scale": {"seed": 1, "batch_size": 65, "epochs": 2, "trials": 2},
    "17_pitfalls_starting": {"seed": 1, "world_size": 3},
    "18_pitfalls_training": {"seed": 1, "world_size": 3},
    "19_sharding": {"seed": 1, "world_size": 4},
    "20_sharding_a_gpt": {"seed": 1, "world_size": 4},
    "21_tensor_parallel": {"seed": 1, "world_size": 4},
    "22_cutting_the_sequence": {"seed": 1, "world_size": 2},
    "23_pipelines_side_by_side": {"seed": 1},
    "24_experts": {"seed": 1, "world_size": 4},
    "25_plan_a_run": {"seed": 1, "sequence": 64},
    "26_local_sgd": {"seed": 1, "world_size": 3},
}
"""A second run of each, with another seed and more ranks where the lesson has them."""


def test_there_is_a_second_run_for_every_lesson():
    assert set(OTHER) == set(NAMES)


@pytest.mark.notebook
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.wide if n[:2] in ("00", "07") else pytest.mark.long) for n in NAMES],
)
def test_a_lesson_holds_with_another_seed_and_more_ranks(name, tmp_path):
    execute(FOLDER / f"{name}.ipynb", tmp_path, {**OTHER[name]})
