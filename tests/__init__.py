import sys
from pathlib import Path

_COURSE = str(Path(__file__).parent.parent / "notebooks")
if _COURSE not in sys.path:  # where pytest has not put it: a program of these, `python -m tests.…`
    sys.path.append(_COURSE)
