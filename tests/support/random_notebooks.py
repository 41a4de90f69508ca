"""Small notebooks at random: constants that change, classes that are patched, cells that run again, shared objects.

`train` returns all that can be seen of what it uses, so that two programs can be compared by what they return.
"""

from __future__ import annotations

import random
import textwrap

DEFINITIONS = {
    "decorator": """
        def scaled(f):
            def inner(*values, **named):
                return FACTOR_NOW * f(*values, **named)
            return inner
        """,
    "wrapping": """
        def counted(f):
            @functools.wraps(f)
            def inner(*values, **named):
                return f(*values, **named) + LIMIT_NOW
            inner.kind = LIMIT_NOW
            return inner
        """,
    "base": """
        class Base:
            kind = "KIND_NOW"
            def told(self, mark=LR):
                return self.kind, mark
        """,
    "helper": """
        DECORATION
        def helper(x, k=LR, *, more=OPTIONS):
            return x * k + len(more)
        """,
    "net": """
        class Net(Base):
            scale = LR
            sizes = [SIZE, 2 * SIZE]
            def forward(self, x, bias=LR):
                return x * self.scale + bias + sum(self.sizes)
            @property
            def wide(self):
                return self.scale > 0.2
        """,
    "config": """
        @dataclasses.dataclass
        class Config:
            lr: float = LR
            size: int = SIZE
            names: list = dataclasses.field(default_factory=list)
        """,
    "record": """
        class Record(NamedTuple):
            lr: float = LR
            size: int = 3
        """,
    "mode": """
        class Mode(enum.Enum):
            slow = LR
            fast = SIZE
        """,
    "act": "act = lambda x, k=LR: x * k",
    "noisy": """
        def noisy(x, n=random.random()):
            return x + n
        """,
    "cached": """
        @functools.cache
        def cached(x, k=SIZE):
            return x * k
        """,
    "told": """
        @functools.singledispatch
        def told(x):
            return "any"
        """,
    "told_int": """
        @told.register
        def _(x: int):
            return "int", LR
        """,
    "told_str": """
        @told.register(str)
        def told_text(x, k=LR):
            return "str", k
        """,
    "collect": """
        def collect(x, found=[]):
            found.append(x)
            return list(found)
        """,
}

NEEDS = {"net": ["base"], "told_int": ["told"], "told_str": ["told"]}

SEEN = {
    "decorator": "[scaled(lambda x: x)(2)]",
    "wrapping": "[counted(lambda x: x)(2)]",
    "base": "[Base().told(), Base.kind]",
    "helper": "[helper(2), getattr(helper, 'tag', None), getattr(helper, 'kind', None)]",
    "net": "[Net().forward(3), Net.scale, getattr(Net, 'extra', 0), isinstance(Net(), Base), Net().told(), Net().wide]",
    "config": "[Config(), Config.lr, dataclasses.fields(Config)[0].default]",
    "record": "[Record(), Record._field_defaults]",
    "mode": "[[m.value for m in Mode]]",
    "act": "[act(2)]",
    "noisy": "[noisy(1)]",
    "cached": "[cached(3)]",
    "told": "[told(1.5), told(1), told('a')]",
    "collect": "[collect(1), collect(2)]",
}

EVENTS = {
    "LR changes": (None, "LR = {number}"),
    "SIZE changes": (None, "SIZE = {digit}"),
    "OPTIONS grows": (None, "OPTIONS['more'] = {digit}"),
    "SHARED grows": (None, "SHARED.append({digit})"),
    "a class attribute changes": ("net", "Net.scale = {number}"),
    "a class gets an attribute": ("net", "Net.extra = [{digit}]"),
    "a class gets a function": ("net", "def forward(self, x, bias=1):\n    return bias\nNet.forward = forward"),
    "a class gets a shared list": ("net", "Net.extra = SHARED"),
    "a base's attribute changes": ("base", "Base.kind = 'set{digit}'"),
    "a function gets an attribute": ("helper", "helper.tag = {digit}"),
    "a dataclass gets a default": ("config", "Config.lr = {number}"),
    "a mutable default is used": ("collect", "collect({digit})"),
    "a method gets an attribute": ("net", "Net.forward.tag = {digit}"),
    "a cache is used": ("cached", "cached({digit})"),
}


def cells_of(seed: int) -> list[str]:
    """The cells of one notebook, in the order in which they run; the last defines `train`."""
    rng = random.Random(seed)
    wanted = {name for name in DEFINITIONS if rng.random() < 0.45} or {"helper"}
    wanted |= {needed for name in wanted for needed in NEEDS.get(name, [])}
    chosen = [name for name in DEFINITIONS if name in wanted]
    decorations = [f"@{d}" for d, name in (("scaled", "decorator"), ("counted", "wrapping")) if name in wanted]
    decoration = rng.choice(["", *decorations])

    def text(name: str) -> str:
        # `counted` may carry a number of its own each time that its cell is edited and run again.
        now = {
            "FACTOR_NOW": str(rng.choice([2, 3])),
            "KIND_NOW": rng.choice("ab"),
            "LIMIT_NOW": str(rng.choice([1, 9])),
        }
        written = textwrap.dedent(DEFINITIONS[name]).strip()
        for word, value in {**now, "DECORATION": decoration}.items():
            written = written.replace(word, value)
        return written.strip()

    cells = ["import dataclasses, enum, functools, random\nfrom typing import NamedTuple"]
    cells.append("LR, SIZE = 0.1, 4\nOPTIONS = {'a': 1}\nSHARED = [1]\nAGAIN = SHARED\nNESTED = {'s': SHARED}")
    cells += [text(name) for name in chosen]
    for _ in range(rng.randrange(6)):
        if rng.random() < 0.4:
            cells.append(text(rng.choice(chosen)))  # run again, edited or not
            continue
        needs, event = EVENTS[rng.choice(sorted(EVENTS))]
        if needs is None or needs in wanted:
            cells.append(event.format(number=rng.choice([0.5, 0.7]), digit=rng.randrange(5, 9)))
    constants = "LR, SIZE, OPTIONS, SHARED, SHARED is AGAIN, SHARED is NESTED['s'], lr, items is SHARED"
    seen = ",\n        ".join([constants, *(f"*{SEEN[name]}" for name in chosen if name in SEEN)])
    cells.append(f"def train(worker, lr=LR, items=SHARED):\n    return [\n        {seen},\n    ]")
    if rng.random() < 0.3:
        cells.append("LR = 0.9")
    return cells
