"""All that is said of the package is in pyproject.toml; this is for a clone that cannot be written.

setuptools builds beside the source, and has no setting for that which pip could be given alike in every folder. On
Kaggle, say, data sets are read-only (`pip install /kaggle/input/labkit`), and on many servers the clone is another's.
"""

import atexit
import os
import shutil
import tempfile

from setuptools import setup

options = {}
if not os.access(".", os.W_OK):
    folder = tempfile.mkdtemp(prefix="labkit-build-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    options = {"build": {"build_base": folder}, "egg_info": {"egg_base": folder}}
setup(options=options)
