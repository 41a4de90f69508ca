"""Pretend GPUs in this process as soon as it has imported torch, if the environment says so."""

import os
import sys

if os.environ.get("LABKIT_PRETENDED_GPUS"):
    import importlib.abc
    import importlib.machinery

    class _AfterTorch(importlib.abc.MetaPathFinder):
        """Finds torch as everybody does, and installs the pretence when it has been executed."""

        def find_spec(self, name, path, target=None):
            if name != "torch":
                return None
            sys.meta_path.remove(self)
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                import tests.pretended_gpu

                tests.pretended_gpu.install()

            spec.loader.exec_module = exec_module
            return spec

    sys.meta_path.insert(0, _AfterTorch())
