"""What a rank has of your notebook. `help("labkit.rank.on_ranks")` shows this page.

In a script every rank runs the lines at the top itself. In a notebook a cell has run them, in another process. A
launched function finds most of it all the same:

| of the notebook | on a rank |
|---|---|
| what the function uses: variables, functions, classes | comes along, as it is at the launch |
| other data | stays; a `NameError` says so. Pass it as an argument |
| tensors that share memory | still do; each storage travels once, and whole, as in `torch.save` |
| a tensor and an array in the same memory | are refused at the launch: make one of the other in the function |
| the memory of a tensor | is not the notebook's, and cannot be resized, as after `torch.load` |
| tensors in shared memory (`share_memory_()`) | are the same memory, as with `mp.spawn`; elsewhere copies: it warns |
| tensors on a GPU | go to `worker.device`; what a rank returns comes back on the CPU |
| `.grad` of a tensor, and how it was computed | no, as in `torch.save`: call `backward` in the function |
| hooks and parametrizations of a model | no: make them in the function |
| what cannot be pickled: open files, locks, modules made by hand | is refused at the launch, by name |
| imported modules | are imported by name, from where the notebook has found them |
| a module that was edited | is imported as its file is now; a warning if the notebook has not reloaded it |
| what cells have changed in modules (patches, entries in registries) | no: do it in the function |
| working folder, environment, `sys.path` | the same; of a cluster's ranks, as far as they are there |
| PyTorch's default type, deterministic algorithms, anomaly detection | the same |
| precision of matrix products, TF32, cuDNN's settings | the same |
| how tensors and arrays are printed; warning filters; levels of `logging` | the same |
| random states | no: each rank begins with `seed=` and its rank |
| number of threads | no: its share of the cores |

All other settings are the rank's own, so set them in the function: gradient mode, default device, current CUDA device
(`worker.device`), `decimal`, locale, file mode mask, sockets' time limit, `numpy.seterr`, recursion limit, formats,
handlers and filters of `logging`, settings of other libraries.

What a rank returns is of the notebook's own classes. What a rank saves by name (`torch.save(model)`) the notebook can
load, and the other way round, where the function mentions the class.

On reserved ranks (`labkit.Session`) each launch sets all that is "the same" anew. What modules hold, handlers, and what
a function has replaced (`builtins.print`, a patched class) stay for the next launch, as in a kernel; so do functions
registered with `atexit`. `ranks.close()` and a new `labkit.Session(4)` give new ranks.
"""
