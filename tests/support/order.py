"""How long each file of tests takes: the longest are begun first, so that no worker is left with one of them.

`python -m tests.support.order build/test.xml` takes the seconds from what pytest has written with --junitxml.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

FILE = Path(__file__).parent / "seconds.json"
FILE_S: dict[str, float] = json.loads(FILE.read_text())
"""What all tests of a file took on two cores."""

if __name__ == "__main__":
    took: Counter[str] = Counter()
    for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
        took[case.attrib["classname"].rpartition(".")[2] + ".py"] += float(case.attrib["time"])
    FILE.write_text(json.dumps({name: round(took[name], 1) for name in sorted(took)}, indent=1) + "\n")
