"""Where each key of a TOML text is written."""

import pytest

from torchllm.tools.config.toml_files import key_lines

pytestmark = pytest.mark.quick

TEXT = (
    '''# a = 1
a = 1 # b = 2
"b.c" . 'd' = """ ""x""
e = 1 \\""" """""
f = [ # [
  "]", '[', [1,
    2],
  {g = {h = "}"}, i.j = 1979-05-27 07:32:00.5},
]

[k]
l = \'\'\'
[m]
\'\'\'
n.o = 1.5
n.p = -2e-3
[k.q.r]
s = ['''
    + """'''a
''', \"\"\"
b\"\"\"]
[[t]]
u = 1
[t.v]
w = 2
[[t.x]]
[[t.x]]
y = 3
[[t]]
u = 4
[[t.x]]
y = {}
[last]"""
)


KEYS_OF_LINES = {
    2: "a",
    3: "b.c b.c.d",
    5: "f",
    6: "f.0 f.1 f.2 f.2.0",
    7: "f.2.1",
    8: "f.3 f.3.g f.3.g.h f.3.i f.3.i.j",
    11: "k",
    12: "k.l",
    15: "k.n k.n.o",
    16: "k.n.p",
    17: "k.q k.q.r",
    18: "k.q.r.s k.q.r.s.0",
    19: "k.q.r.s.1",
    21: "t t.0",
    22: "t.0.u",
    23: "t.0.v",
    24: "t.0.v.w",
    25: "t.0.x t.0.x.0",
    26: "t.0.x.1",
    27: "t.0.x.1.y",
    28: "t.1",
    29: "t.1.u",
    30: "t.1.x t.1.x.0",
    31: "t.1.x.0.y",
    32: "last",
}


def test_key_lines() -> None:
    keys: dict[int, list[str]] = {}
    for path, line in key_lines(TEXT).items():
        keys.setdefault(line, []).append(".".join(path))
    assert {line: " ".join(names) for line, names in keys.items()} == KEYS_OF_LINES
    assert ("b.c",) in key_lines(TEXT)
