import pytest
import torch

from course import models


def count_parameters(model):
    return sum(p.numel() for p in model.parameters())


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("make", "parameters"), [(models.linear, 7_850), (models.ConvNet, 21_840), (models.pairs, 239_728)]
)
def test_parameter_counts_are_those_in_the_lessons(make, parameters):
    assert count_parameters(make()) == parameters


@pytest.mark.parametrize(
    ("model", "shape", "classes"),
    [
        (models.linear(), (4, 1, 28, 28), 10),
        (models.linear(3 * 32 * 32, classes=7), (4, 3, 32, 32), 7),
        (models.pairs(), (4, 1, 28, 28), 16),
        (models.ConvNet(), (4, 1, 28, 28), 10),
        (models.ConvNet(), (1, 1, 28, 28), 10),
        (models.ConvNet(channels=3, classes=7), (4, 3, 32, 32), 7),
        (models.ConvNet(), (4, 1, 64, 48), 10),
    ],
)
@torch.no_grad()
def test_images_become_one_row_of_logits_each(model, shape, classes):
    assert model(torch.randn(shape)).shape == (shape[0], classes)
