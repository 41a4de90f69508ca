"""What goes around a job on ranks that stay."""

import gc
import threading
import time
import weakref

from labkit.rank.isolation import collect_garbage


class Cycle:
    def __init__(self, rest_s=0.0):
        self.itself, self.rest_s = self, rest_s

    def __del__(self):
        time.sleep(self.rest_s)  # other threads run meanwhile, as they do while a tensor is freed


def test_garbage_is_gone_though_another_thread_is_collecting():
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
