"""Errors by their text: each message that people search for is raised, or quoted, and the report ends with its page.

What a CPU can raise is raised. What takes NCCL or a GPU is quoted word for word, from PyTorch's and NCCL's source and
from logs of several versions, since the words have changed.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.nn.parallel import DistributedDataParallel

import labkit
from labkit.failures.first_to_fail import diagnose
from labkit.failures.known_errors import KNOWN, recognise
from labkit.run import Run
from tests.failures import messages
from tests.failures.test_diagnosis import died, raised
from tests.support.fake_engine import FakeEngine

NCCL = "torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, "
SYSTEM = f"{NCCL}unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.3\nncclSystemError: "
SYSTEM += "System call (e.g. socket, malloc) or external library call failed or device error. \nLast error:\n"
USAGE = f"{NCCL}invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.3\nncclInvalidUsage: "
USAGE += "This usually reflects invalid usage of NCCL library.\nLast error:\n"
ASYNCHRONOUS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` to enable "
    "device-side assertions.\n"
)
UNUSED = (
    "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error "
    "indicates that your module has parameters that were not used in producing loss. "
)
PARTICIPATE = (
    "making sure all `forward` function outputs participate in calculating loss. \nIf you already have done the above, "
    "then the distributed data parallel module wasn't able to locate the output tensors in the return value of your "
    "module's `forward` function. Please include the loss function and the structure of the return value of `forward` "
    "of your module when reporting this issue (e.g. list, dict, iterable).\n"
    "Parameter indices which did not receive grad for rank 0: 2 3"
)
TWICE = (
    "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following reasons: "
    "1) Use of a module parameter outside the `forward` function. Please make sure model parameters are not shared "
    "across multiple concurrent forward-backward passes. or try to use _set_static_graph() as a workaround if this "
    "module graph does not change during training loop.2) Reused parameters in multiple reentrant backward passes. For "
    "example, if you use multiple `checkpoint` functions to wrap the same part of your model, it would result in the "
    "same set of parameters been used by different reentrant backward passes multiple times, and hence marking a "
    "variable ready multiple times. DDP does not support such use cases in default. You can try to use "
    "_set_static_graph() as a workaround if your module graph does not change over iterations.\n"
    "Parameter at index 3 has been marked as ready twice. This means that multiple autograd engine  hooks have fired "
    "for this particular parameter during this iteration. You can set the environment variable TORCH_DISTRIBUTED_DEBUG "
    "to either INFO or DETAIL to print parameter names for further debugging."
)
FULL = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.95 GiB. GPU 0 has a total capacity of 14.57 GiB "
    "of which 1.58 GiB is free. Process 2493055 has 12.02 GiB memory in use. Including non-PyTorch memory, this "
    "process has 966.00 MiB memory in use. Of the allocated memory 734.07 MiB is allocated by PyTorch, and 33.93 MiB "
    "is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
    "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)
WORKER = "RuntimeError: DataLoader worker (pid 4711) "
DETAILS = (
    f"{WORKER}exited unexpectedly with exit code 1. Details are lost due to multiprocessing. Rerunning with "
    "num_workers=0 may give better error trace."
)
BOOTSTRAPPING = """RuntimeError: 
        An attempt has been made to start a new process before the
        current process has finished its bootstrapping phase.

        This probably means that you are not using fork to start your
        child processes and you have forgotten to use the proper idiom
        in the main module:

            if __name__ == '__main__':
                freeze_support()
                ...

        The "freeze_support()" line can be omitted if the program
        is not going to be frozen to produce an executable.
"""  # noqa: W291 - as Python has it
CHILDS = f'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n{BOOTSTRAPPING}'
LISTEN = "The server socket has failed to listen on any local network address. "

QUOTED = {
    "nccl_system_error": [
        f"{SYSTEM}Error while creating shared memory segment /dev/shm/nccl-cjY8K5 (size 10617216), error: No space "
        "left on device (28)",
        f"{SYSTEM}socketStartConnect: Connect to 10.0.0.2<43211> failed : Connection refused",
        # PyTorch 1.8, NCCL 2.7
        "RuntimeError: NCCL error in: /pytorch/torch/lib/c10d/ProcessGroupNCCL.cpp:825, unhandled system error, NCCL "
        "version 2.7.8\nncclSystemError: System call (socket, malloc, munmap, etc) failed.",
    ],
    "duplicate_gpu": [
        f"{USAGE}Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
        # NCCL 2.30, src/init.cc
        f"{USAGE}Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this "
        "configuration.",
    ],
    "device_side_assert": [
        f"torch.AcceleratorError: CUDA error: device-side assert triggered{ASYNCHRONOUS}",
        f"RuntimeError: CUDA error: device-side assert triggered{ASYNCHRONOUS}",  # before PyTorch 2.8
    ],
    "gpu": [
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040).",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a "
        "driver from http://www.nvidia.com/Download/index.aspx",
        "RuntimeError: No CUDA GPUs are available",
        "RuntimeError: CUDA driver initialization failed, you might not have a CUDA gpu.",
        f"torch.AcceleratorError: CUDA error: an illegal memory access was encountered{ASYNCHRONOUS}",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
    ],
    "gpu_out_of_memory": [
        FULL,
        # c10/cuda/CUDACachingAllocator.cpp of PyTorch 1.13
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 23.70 GiB total capacity; "
        "21.50 GiB already allocated; 1.10 GiB free; 21.60 GiB reserved in total by PyTorch) If reserved memory is >> "
        "allocated memory try setting max_split_size_mb to avoid fragmentation.  See documentation for Memory "
        "Management and PYTORCH_CUDA_ALLOC_CONF",
        f"RuntimeError: CUDA error: out of memory{ASYNCHRONOUS}",
        f"{NCCL}unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version "
        "2.27.3\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    ],
    "unused_parameters": [
        f"{UNUSED}You can enable unused parameter detection by passing the keyword argument "
        "`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and by \n" + PARTICIPATE,
        f"{UNUSED}Since `find_unused_parameters=True` is enabled, this likely  means that not all `forward` outputs "
        "participate in computing loss. You can fix this by " + PARTICIPATE,
        "RuntimeError: Your training graph has changed in this iteration, e.g., one parameter is unused in first "
        "iteration, but then got used in the second iteration. this is not compatible with static_graph set to True.",
    ],
    "marked_ready_twice": [TWICE],
    "shared_memory": [
        f"{WORKER}is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. "
        "Please try to raise your shared memory limit.",
        "RuntimeError: unable to write to file </torch_18692_1954506624>",  # PyTorch 1.8
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_71_2866_0>: No space left on device (28)",
    ],
    "too_many_open_files": [
        "RuntimeError: Too many open files. Communication with the workers is no longer possible. Please increase the "
        "limit using `ulimit -n` in the shell or change the sharing strategy by calling "
        "`torch.multiprocessing.set_sharing_strategy('file_system')` at the beginning of your code",
        "RuntimeError: received 0 items of ancdata",
        "RuntimeError: unable to open shared memory object </torch_29919_1396182366> in read-write mode: Too many open "
        "files (24)",
        "OSError: [Errno 24] Too many open files: 'data.bin'",
    ],
    "address_in_use": [
        f"torch.distributed.DistNetworkError: {LISTEN}port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, "
        "message: address already in use",
        # PyTorch 2.0, torch/csrc/distributed/c10d/socket.cpp
        f"RuntimeError: {LISTEN}The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in "
        "use).",
        "RuntimeError: Address already in use",  # PyTorch 1.8
        "OSError: [Errno 48] error while attempting to bind on address ('127.0.0.1', 8000): address already in use",
        "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:5555')",
    ],
    "no_backend_for_device": ["RuntimeError: No backend type associated with device type cpu"],
    "module_keys": [
        'RuntimeError: Error(s) in loading state_dict for Linear:\n\tMissing key(s) in state_dict: "weight", "bias". '
        '\n\tUnexpected key(s) in state_dict: "module.weight", "module.bias". ',
        "RuntimeError: Error(s) in loading state_dict for DistributedDataParallel:\n\tMissing key(s) in state_dict: "
        '"module.weight", "module.bias". \n\tUnexpected key(s) in state_dict: "weight", "bias". ',
        'RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s) in state_dict: "out.weight". \n\t'
        'Unexpected key(s) in state_dict: "_orig_mod.out.weight". ',
    ],
    "main_guard": [BOOTSTRAPPING],
}
"""By page: an error's text, newest first. The words of PyTorch 2.15 and NCCL 2.27, where nothing else is said."""

ASSERTIONS = [
    # aten/src/ATen/native/cuda/Loss.cu and TensorCompare.cu
    "/pytorch/aten/src/ATen/native/cuda/Loss.cu:245: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: "
    "[4,0,0] Assertion `t >= 0 && t < n_classes` failed.",
    "/pytorch/aten/src/ATen/native/cuda/TensorCompare.cu:112: _assert_async_cuda_kernel: block: [0,0,0], thread: "
    "[0,0,0] Assertion `probability tensor contains either `inf`, `nan` or element < 0` failed.",
]

AT = "[rank0]:[E1003 18:37:01.832146912 ProcessGroupNCCL.cpp:607] "
LATE = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=6463, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, "
LATE += "Timeout(ms)=600000) ran for 600097 milliseconds before timing out."
THREAD = "Process group watchdog thread terminated with exception: "
THROWN = "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  "

WATCHDOGS = {
    "PyTorch 2.5": f"{AT}[Rank 0] {LATE}\n{AT}[PG ID 0 PG GUID 0(default_pg) Rank 0] Timeout at NCCL work: 6463, last "
    f"enqueued NCCL work: 6463, last completed NCCL work: 6462.\n{THROWN}[PG ID 0 PG GUID 0(default_pg) Rank 0] "
    f"{THREAD}[Rank 0] {LATE}\nException raised from checkTimeout at "
    "../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:632 (most recent call first):\n",
    "PyTorch 1.13": "[E ProcessGroupNCCL.cpp:821] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL("
    "OpType=BROADCAST, Timeout(ms)=600000) ran for 608499 milliseconds before timing out.\n[E "
    "ProcessGroupNCCL.cpp:456] Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA "
    "kernels, subsequent GPU operations might run on corrupted/incomplete data.\n[E ProcessGroupNCCL.cpp:461] To avoid "
    "data inconsistency, we are taking the entire process down.\nterminate called after throwing an instance of "
    "'std::runtime_error'\n  what():  [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(OpType=BROADCAST, Timeout(ms)=600000) ran for 608499 milliseconds before timing out.\n",
}
"""What the watchdog writes before it aborts, word for word."""


def a_failure(error, **facts):
    """A rank that reported an exception with this text, as its traceback has it."""
    trace = f'Traceback (most recent call last):\n  File "train.py", line 7, in train\n    step()\n{error}'
    return with_traceback(error.splitlines()[0], trace, **facts)


def with_traceback(summary, trace, **facts):
    rank = raised(1, 1.0, summary, **facts)
    return replace(rank, failure=rank.failure._replace(traceback=trace))


def report(diagnosis):
    return str(labkit.WorkerFailed(diagnosis, Run(FakeEngine(), 2, "train")))


@pytest.mark.parametrize(("page", "error"), [(page, error) for page, errors in QUOTED.items() for error in errors])
def test_an_error_is_recognised_by_its_text_in_each_version(page, error):
    assert diagnose([a_failure(error)]).page == page


@pytest.mark.parametrize("page", [page for page in QUOTED if page != "main_guard"])
def test_the_report_of_such_an_error_ends_with_its_page_and_is_as_it_was_kept(page):
    messages.assert_as_kept(f"error {page}", report(diagnose([a_failure(QUOTED[page][0])])))


def test_every_row_has_a_quotation_and_every_page_of_one_is_listed():
    assert {*KNOWN} == {*QUOTED, "nccl_timeout"}
    assert all(f'`labkit.explain("{page}")`' in labkit.explain() for page in KNOWN)


def test_the_guards_error_is_the_childs_and_is_found_in_the_ranks_output():
    rank = a_failure(DETAILS, output_end=CHILDS)
    messages.assert_as_kept("error main_guard", report(diagnose([rank])))
    rank.output_end = (
        f'{CHILDS}Traceback (most recent call last):\n  File "x.py", line 1, in <module>\nValueError: no\n'
    )
    assert diagnose([rank]).page == "rank_failed", "another error of a child came after it"


@pytest.mark.parametrize("version", WATCHDOGS)
def test_a_rank_that_the_watchdog_aborted_has_its_page_and_blames_the_one_that_did_not_come(version):
    victim = died(0, 600.2, -signal.SIGABRT, output_end=WATCHDOGS[version])
    diagnosis = diagnose([victim, died(1, 601.0, -signal.SIGKILL, ended_by_us=True)])
    assert diagnosis.page == "nccl_timeout"
    if version == "PyTorch 2.5":
        assert diagnosis.rank == 1
        messages.assert_as_kept("error nccl_timeout", report(diagnosis))


# What must not be recognised


ALL = [error for errors in QUOTED.values() for error in errors]
PRINTED = "".join(f'Traceback (most recent call last):\n  File "x.py", line 1, in f\n{error}\n' for error in ALL)
PRINTED += "".join(WATCHDOGS.values()) + "\n".join(ASSERTIONS)


@pytest.mark.parametrize(
    ("rank", "page"),
    [
        (a_failure("ValueError: bad batch", output_end=PRINTED), "rank_failed"),
        (died(1, 1.0, -signal.SIGKILL, output_end=PRINTED), "rank_died"),
        (died(1, 1.0, 3, output_end=PRINTED), "rank_died"),
        (died(1, 1.0, -signal.SIGKILL, output_end=PRINTED, out_of_memory="killed"), "out_of_memory"),
        (died(1, 1.0, -signal.SIGABRT, output_end="".join(f"saw: {error}\n" for error in ALL)), "rank_died"),
    ],
)
def test_what_a_healthy_program_prints_changes_no_report(rank, page):
    diagnosis, silent = diagnose([rank]), diagnose([replace(rank, output_end="")])
    assert diagnosis.page == silent.page == page
    assert diagnosis.headline == silent.headline


@pytest.mark.parametrize("error", ALL)
def test_an_error_that_was_handled_before_another_one_is_not_its_cause(error):
    trace = f'Traceback (most recent call last):\n  File "x.py", line 1, in f\n{error}'
    handled = f"{trace}\n\nDuring handling of the above exception, another exception occurred:\n\n"
    last = 'Traceback (most recent call last):\n  File "x.py", line 3, in f\nValueError: bad batch\n'
    assert diagnose([with_traceback("ValueError: bad batch", handled + last)]).page == "rank_failed"


@pytest.mark.parametrize("error", ALL)
@pytest.mark.parametrize("kind", ["ValueError", "RuntimeError"])
def test_an_error_of_the_readers_own_that_quotes_another_is_not_it(kind, error):
    assert recognise(a_failure(f"{kind}: the job's log ends with: {error}")) == ""


@pytest.mark.parametrize(("page", "error"), [(page, error) for page, (error, *_) in QUOTED.items()])
def test_the_direct_cause_of_an_exception_and_what_an_exit_was_made_of_are_read(page, error):
    trace = f'Traceback (most recent call last):\n  File "x.py", line 1, in f\n{error}'
    last = 'Traceback (most recent call last):\n  File "x.py", line 3, in f\n'
    cause = "\n\nThe above exception was the direct cause of the following exception:\n\n"
    chained = with_traceback("TrainError: gave up", f"{trace}{cause}{last}TrainError: gave up\n")
    assert diagnose([chained]).page == page
    context = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
    left = with_traceback(f"{error.splitlines()[0]} (then sys.exit(1))", f"{trace}{context}{last}SystemExit: 1\n")
    assert diagnose([left]).page == page
    loader = "RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nOriginal "
    assert diagnose([with_traceback(loader.splitlines()[0], f"{last}{loader}{trace}\n")]).page == page


# Raised for real


def unused_parameters(worker):
    model = DistributedDataParallel(torch.nn.ModuleDict({"used": torch.nn.Linear(2, 1), "not": torch.nn.Linear(2, 1)}))
    model.module.forward = lambda x: model.module["used"](x)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def marked_ready_twice(worker):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    def checkpointed_twice(x):
        x = model[0](x)
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(model[1], x, use_reentrant=True)
        return x

    model.forward = checkpointed_twice
    wrapped = DistributedDataParallel(model)
    wrapped(torch.ones(1, 2)).sum().backward()


def module_keys(worker):
    torch.nn.Linear(1, 1).load_state_dict(DistributedDataParallel(torch.nn.Linear(1, 1)).state_dict())


def no_backend_for_device(worker):
    dist.all_reduce(torch.ones(1), group=dist.new_group(backend="cuda:gloo"))


def address_in_use(worker):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dist.TCPStore("127.0.0.1", taken.getsockname()[1], is_master=True, use_libuv=True)


def too_many_open_files(worker):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, hard))
        while True:
            kept.append(open(os.devnull))  # noqa: SIM115 - kept open on purpose
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in kept:
            file.close()


class BusError(torch.utils.data.Dataset):
    """Data whose loader process meets a bus error, as it does when /dev/shm is full."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        signal.raise_signal(signal.SIGBUS)


def shared_memory(worker):
    list(torch.utils.data.DataLoader(BusError(), num_workers=1))


ON_ONE_RANK = [
    *(shared_memory, unused_parameters, marked_ready_twice, module_keys),
    *(no_backend_for_device, address_in_use, too_many_open_files),
]
"""Named as their pages."""

SESSION_RANKS = 1


def keeps_nothing(worker, fails):
    """Fail without the frames, which would keep a model alive, and with it a port of gloo's."""
    caught = None
    try:
        fails(worker)
    except Exception as error:
        caught = error.with_traceback(None)
    gc.collect()
    raise caught


@pytest.mark.spawns
@pytest.mark.parametrize("fails", ON_ONE_RANK, ids=lambda fails: fails.__name__)
def test_a_real_error_has_its_page(fails, ranks):
    page = fails.__name__
    with pytest.raises(labkit.WorkerFailed) as error:
        labkit.launch(keeps_nothing, fails, on=ranks, live=False)
    assert error.value.diagnosis.page == page, error.value.cause
    assert str(error.value).splitlines()[-3] == f'What to do: labkit.explain("{page}")'
