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


def test_key_lines() -> None:
    assert {".".join(path): line for path, line in key_lines(TEXT).items()} == {
        "a": 2,
        "b.c": 3,  # ("b.c",)
        "b.c.d": 3,
        "f": 5,
        "f.0": 6,
        "f.1": 6,
        "f.2": 6,
        "f.2.0": 6,
        "f.2.1": 7,
        "f.3": 8,
        "f.3.g": 8,
        "f.3.g.h": 8,
        "f.3.i": 8,
        "f.3.i.j": 8,
        "k": 11,
        "k.l": 12,
        "k.n": 15,
        "k.n.o": 15,
        "k.n.p": 16,
        "k.q": 17,
        "k.q.r": 17,
        "k.q.r.s": 18,
        "k.q.r.s.0": 18,
        "k.q.r.s.1": 19,
        "t": 21,
        "t.0": 21,
        "t.0.u": 22,
        "t.0.v": 23,
        "t.0.v.w": 24,
        "t.0.x": 25,
        "t.0.x.0": 25,
        "t.0.x.1": 26,
        "t.0.x.1.y": 27,
        "t.1": 28,
        "t.1.u": 29,
        "t.1.x": 30,
        "t.1.x.0": 30,
        "t.1.x.0.y": 31,
        "last": 32,
    }
