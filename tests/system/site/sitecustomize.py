"""`LABKIT_EMULATE=darwin` or `win32`: labkit's own modules find that system; everything else finds Linux as it is."""

import os

if os.environ.get("LABKIT_EMULATE"):
    import labkit_emulation  # noqa: F401
