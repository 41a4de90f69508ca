"""What a rank has of your notebook. `help("labkit.rank.on_ranks")` shows this page.

In a script every rank runs the lines at the top itself. In a notebook some cell has run them, in another process. A
launched function finds most of it all the same:

| of the notebook | on a rank |
|---|---|
| what the function uses: variables, functions, classes | comes along, as it is at the launch |
| other functions and classes from cells | come along: in `__main__`, for who looks them up or unpickles one |
| other data | stay; a `NameError` for one says so. Pass them as arguments |
| tensors that share memory | still do; each storage travels once, and whole, as in `torch.save` |
| tensors in shared memory (`share_memory_()`) | are the same memory, as with `mp.spawn`; elsewhere copies: it warns |
| tensors on a GPU | go to `worker.device`; what a rank returns comes back on the CPU |
| hooks on weights, gradients and optimizers' steps | come along; what a rank returns has none |
| `.grad` of a tensor, and how it was computed | no, as in `torch.save`: call `backward` in the function |
| arrays of NumPy that are views of one another | come apart, as in pickle; those in a tensor's memory stay there |
| functions with decorators, compiled ones | come along; what cannot is refused at the launch, by name |
| imported modules | are imported by name, from where the notebook has found them; those made by hand come along |
| your own modules, on Ray nodes without your files | come along, up to 16 MiB a package; of more, its sources |
| a module that was edited | as its file is now, also on reserved ranks; a warning if the notebook has not reloaded it |
| what cells have changed in modules (patches, entries in registries) | no: do it in the function |
| modules imported for effect (registries, patches) | are not imported; a failure that may be due to it names them |
| working folder, environment, `sys.path` | the same; of a cluster's ranks, as far as they are there |
| PyTorch's default type and device, gradient mode, anomaly detection | the same |
| deterministic algorithms, matrix products' precision, TF32, cuDNN, attention kernels | the same |
| how tensors and arrays are printed; sharing strategy; recursion limit | the same |
| file mode mask, locale, time zone, `decimal`, NumPy's `seterr`, sockets' time limit | the same |
| classes that `torch.load` may make (`add_safe_globals`) | the same |
| `logging`: levels; streams and files of the root and of your loggers | the same; other handlers write plain lines |
| `logging`: filters, and how libraries set up their own loggers | as the rank's libraries have it |
| warning filters | the same, for categories that the rank has loaded |
| random states | no: each rank begins with `seed=` and its rank |
| number of threads | no: its share of the cores |
| current CUDA device | no: `worker.device` |
| settings of other libraries (pandas, matplotlib, `torch._inductor.config`) | no: set them in the function |
| open files, locks, threads, processes, queues, signal handlers | no: make them in the function |

What a rank returns is of the notebook's own classes, as they are when it arrives: `isinstance` holds, also where their
cell was run again in between. What a rank saves by name (`torch.save(model)`) the notebook can load, and the other way
round.

On reserved ranks (`labkit.Session`) a function finds the same, whatever ran there before. What a module has changed
when it was imported, by an earlier function, stays so. What is registered with `atexit` runs when the session ends.
"""
