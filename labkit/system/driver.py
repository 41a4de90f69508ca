"""Ask NVIDIA's driver what it can do, without PyTorch: run as a program, which prints what it found as JSON.

{"version": 13020, "count": 2}, the version as CUDA counts it; {"error": "…"} where the driver cannot be used.
"""

from __future__ import annotations

import ctypes
import json


def ask() -> dict[str, object]:
    """Return the driver's version, and how many devices it finds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"error": f"the driver's library is missing ({error})"}
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    if code := driver.cuInit(0):
        return {"version": version.value, "error": f"CUDA does not begin (cuInit: error {code})"}
    driver.cuDeviceGetCount(ctypes.byref(count))
    return {"version": version.value, "count": count.value}


if __name__ == "__main__":
    print(json.dumps(ask()))
