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


@torch.no_grad()
def test_the_halves_of_convnet_compose():
    model, images = models.ConvNet(), torch.randn(4, 1, 28, 28)
    features = model.features(images)
    assert features.shape == (4, 320)
    assert torch.equal(model.classifier(features), model(images))
    assert count_parameters(model.features) + count_parameters(model.classifier) == count_parameters(model)


@torch.no_grad()
def test_only_a_dropout_above_zero_makes_training_random():
    images = torch.randn(4, 1, 28, 28)
    exact, random = models.ConvNet().train(), models.ConvNet(dropout=0.5).train()
    assert torch.equal(exact(images), exact(images))
    assert not torch.equal(random(images), random(images))


# Height and width after the stem, and after the last block, for 32 × 32 images.
@pytest.mark.parametrize(("make", "channels"), [(models.resnet18, 512), (models.resnet50, 2048)])
@pytest.mark.parametrize(("cifar_stem", "stem_size", "last_size"), [(False, 8, 1), (True, 32, 4)])
@torch.no_grad()
def test_the_cifar_stem_of_a_resnet_keeps_the_size_of_the_image(make, channels, cifar_stem, stem_size, last_size):
    model = make(classes=7, cifar_stem=cifar_stem).eval()
    sizes = {}
    for name in ("maxpool", "layer4"):
        getattr(model, name).register_forward_hook(lambda _, __, out, name=name: sizes.update({name: out.shape}))
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)
    assert sizes == {"maxpool": (2, 64, stem_size, stem_size), "layer4": (2, channels, last_size, last_size)}


def test_a_sleep_passes_values_and_gradients_on_and_its_backward_takes_twice_as_long(monkeypatch):
    slept = []
    monkeypatch.setattr(models.time, "sleep", slept.append)
    values = torch.randn(3, requires_grad=True)
    passed = models.Sleep.apply(values, 0.01)
    passed.square().sum().backward()
    assert torch.equal(passed, values)
    assert torch.equal(values.grad, 2 * values)
    assert slept == [0.01, 0.02]
