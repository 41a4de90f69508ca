"""What a rank's process does, from its start to its end.

Names of Python and PyTorch that labkit replaces, in the order in which a process meets them. Each entry says where it
is done, why nothing public does it, and what puts the original back.

In the notebook's process:

* `multiprocessing.spawn.get_preparation_data` (`engines.spawn`): a spawned rank must not import the script that
  launches it. Put back once the processes exist.

In a rank's process, for its whole life:

* `ForkingPickler.reducer_override` (`rank.script_compat.children`): functions of cells reach a DataLoader's workers by
  value.
* `tqdm.notebook`, by a finder in `sys.meta_path` (`rank.script_compat.bars`): a widget made in a rank is shown nowhere.
* `torch.distributed.rendezvous._create_c10d_store` (`rank.file_store`): `rpc.init_rpc` would listen on the whole
  network. It calls the original for every other address.
* `dist.init_process_group` (`rank.script_compat.reuse_process_group`): a script finds that its rank has joined the
  group. It calls the original outside of a job.

In a rank's process, while the function runs:

* `sys.breakpointhook`, `pdb.set_trace` (`rank.debugging`): you answer under the cell. Put back after the function.
* `ProcessGroup.send` and the like, and functional collectives (`rank.device`, only for CUDA tensors over gloo): gloo
  would crash on them. Put back after the function.
* `dist.destroy_process_group` (`rank.report_collectives`): PyTorch tells nobody that a rank has left its group. Put
  back after the function.
* `torch.autograd.backward` (`steps.hooks`, only with `trace=` and in `compare`): PyTorch has no hook around a
  backward pass. Put back when the trace ends.
"""
