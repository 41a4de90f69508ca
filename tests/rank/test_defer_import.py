"""What is imported when it is needed and not before: torch's compiler. In fresh processes."""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap

import pytest
import torch

import labkit
from tests.support import prefork

pytestmark = pytest.mark.spawns

BEGIN = """
import sys, torch, torch.distributed as dist
from labkit.rank.script_compat import dynamo
dynamo.defer_import()
def is_real():
    found = sys.modules["torch._dynamo"]
    return "torch._dynamo.symbolic_convert" in sys.modules and not isinstance(found, dynamo._StandIn)
"""
STEPS = """
torch.manual_seed(0)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 4))
for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad"):
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.randn(3, 8)).pow(2).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
dist.destroy_process_group()
print([p.tolist() for p in model.parameters()])
"""


@pytest.fixture(scope="module")
def prints():
    """Returns what code prints in a process of its own, which begins with torch imported and nothing else."""
    forker = prefork.Forker.start(("torch.nn.parallel",))

    def prints(code, begin=BEGIN):
        with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as error:
            argv = [sys.executable, "-c", begin + textwrap.dedent(code)]
            pid = forker.fork(argv, {0: 0, 1: printed.fileno(), 2: error.fileno()})
            exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            for file in (printed, error):
                file.seek(0)
            assert exit_code == 0, error.read()
            return printed.read().strip()

    yield prints
    forker.close()


def test_ddp_and_optimizers_take_the_same_steps_without_it(prints):
    with_it = prints(STEPS, begin="import torch, torch.distributed as dist, torch._dynamo\n")
    assert prints(STEPS + "print(is_real())").splitlines() == [with_it, "False"]


@pytest.mark.parametrize(
    "need",
    [
        "from torch._dynamo.config import cache_size_limit",
        "from torch._dynamo import OptimizedModule",
        "torch._dynamo.reset()",
        "torch.compile(torch.nn.Linear(2, 2), backend='eager')(torch.zeros(1, 2))",
        "from torch.distributed.pipelining import ScheduleGPipe",
        "torch.compiler.disable(print)",
    ],
)
def test_whoever_needs_it_finds_the_real_one_imported_once(need, prints):
    """A module that Python had imported twice would not be the one that the package holds."""
    told = prints(
        f"""
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
        {need}
        import torch._dynamo as real
        below = [name for name in sys.modules if name.startswith("torch._dynamo.") and name.count(".") == 2]
        held = {{name: getattr(real, name.rpartition(".")[2], None) for name in below}}
        twice = [name for name, module in held.items() if module is not sys.modules[name]
                 and (module is None or isinstance(module, type(sys)))]
        specs = [name for name in below if sys.modules[name].__spec__.name != name
                 or isinstance(sys.modules[name].__spec__.loader, dynamo._AsItIs)]
        print(is_real(), torch._dynamo is sys.modules["torch._dynamo"] is real, len(below) > 10, twice, specs)
        """
    )
    assert told == "True True True [] []"


def test_a_step_is_compiled_after_others_were_not(prints):
    """What optimizers keep from the compiler they keep from it then, too."""
    told = prints(
        """
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        def step(x):
            loss = (parameter * x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss
        step(torch.ones(3))
        compiled = torch.compile(step, backend="eager")
        print(compiled(torch.ones(3)).item(), compiled(torch.ones(3)).item(), parameter.tolist(), is_real())
        """
    )
    assert told == "1.5 0.0 [-0.5, -0.5, -0.5] True"


def test_what_a_rank_does_while_it_stands_by_takes_none_of_it(prints):
    assert (
        prints("from labkit.rank import first_step\nfirst_step.get_warm()\nprint(is_real(), 'sympy' in sys.modules)")
        == "False False"
    )


def has_compiler(worker):
    return "torch._dynamo.symbolic_convert" in sys.modules


def trains_then_compiles(worker):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    after_training = has_compiler(worker)
    doubled = torch.compile(lambda x: 2 * x, backend="eager")(torch.ones(1)).item()
    return after_training, doubled, has_compiler(worker)


@pytest.mark.cold
def test_a_rank_trains_without_it_and_compiles_with_it():
    assert labkit.launch(trains_then_compiles, world_size=2, live=False).results == [(False, 2.0, True)] * 2


def test_what_is_set_is_set_on_the_real_one(prints):
    assert prints("torch._dynamo.trace = 1\nimport torch._dynamo\nprint(torch._dynamo.trace, is_real())") == "1 True"


def test_one_that_is_there_already_stays(prints):
    assert prints("print(is_real())", begin="import torch._dynamo\n" + BEGIN) == "True"


def test_steps_are_traced_without_it(prints):
    told = prints(
        """
        from labkit import profiling
        with profiling.profiler(torch.device("cpu")) as profiler:
            torch.ones(3).sum()
        found = {event.name for event in profiling.events_of(profiler)}
        print("aten::sum" in found, is_real(), "torch._inductor" in sys.modules)
        """
    )
    assert told == "True False False"
