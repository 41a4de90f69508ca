"""What goes around a job on ranks that stay."""

import gc
import threading
import time
import weakref

import pytest
import torch

from labkit.rank.staying import collect_garbage


class Cycle:
    def __init__(self, rest_s=0.0):
        self.itself, self.rest_s = self, rest_s

    def __del__(self):
        time.sleep(self.rest_s)  # other threads run meanwhile, as they do while a tensor is freed


@pytest.fixture
def only_when_asked():
    """No collection begins by itself, because of what was allocated."""
    gc.disable()
    yield
    gc.enable()


def test_garbage_is_gone_though_another_thread_is_collecting(only_when_asked):
    is_slow, slow = threading.Event(), Cycle(0.2)
    weakref.finalize(slow, is_slow.set)
    del slow
    other = threading.Thread(target=gc.collect)
    other.start()
    assert is_slow.wait(10.0)
    mine = Cycle()
    gone = weakref.ref(mine)
    del mine
    gc.collect()
    assert gone() is not None, "Python's own returned at once"
    collect_garbage()
    assert gone() is None
    other.join()


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
