"""What goes around a job on ranks that stay."""

import gc
import weakref

import pytest
import torch

from labkit.rank.staying import collect_garbage


class Cycle:
    def __init__(self):
        self.itself = self


@pytest.fixture
def only_when_asked():
    """No collection begins by itself, because of what was allocated."""
    gc.disable()
    yield
    gc.enable()


class Network:
    def __init__(self):
        self.itself = self

    def hook(self, gradient):
        return gradient


def in_a_graph_that_garbage_refers_to():
    """A network to which only autograd's graph refers, and to that only a loss in a cycle."""
    network, holder = Network(), Cycle()
    holder.loss = torch.ones(1, requires_grad=True) * 2
    holder.loss.register_hook(network.hook)
    return weakref.ref(network)


def test_what_only_autograds_graph_refers_to_is_gone_too(only_when_asked):
    network = in_a_graph_that_garbage_refers_to()
    gc.collect()
    assert network() is not None, "one pass frees the loss, and with it the graph"
    network = in_a_graph_that_garbage_refers_to()
    collect_garbage()
    assert network() is None
