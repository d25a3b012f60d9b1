"The splitter on texts and cuts that nobody would write down. (How it works is told in nbs/29_reply.ipynb.)"
import json
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec.reply import Splitter, join

THINK, TOOL = ('<think>', '</think>'), ('<tool_call>', '</tool_call>')
CI = settings(max_examples=60, derandomize=True, deadline=None)
FULL = ('<think>check the map</think>Two calls: <tool_call>{"name":"find","arguments":{"q":"café 😀"}}</tool_call>'
        '<tool_call>{"name":"open","arguments":{"id":42}}</tool_call>')
texts = st.lists(st.sampled_from(['<think>', '</think>', '<tool_call>', '</tool_call>', '{"name": "f", "arguments": {"a": 1}}',
                                  '{"name": "', '"}', ' ', '\n', 'x', '<', '</', '😀', 'think>', '<tool']), max_size=14).map(''.join)


def split(parts, think=THINK, tool=TOOL, thinking=False):
    s = Splitter(think, tool, thinking)
    return join([p for part in parts for p in s.feed(part)] + s.end())


@CI
@given(texts, st.lists(st.integers(0, 120), max_size=6), st.booleans(), st.booleans())
def test_any_cut_gives_the_same_reply(text, cuts, thinking, tools):
    at = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    parts = [text[a:b] for a, b in zip(at, at[1:], strict=False)]
    tool = TOOL if tools else None
    assert split(parts, tool=tool, thinking=thinking) == split([text], tool=tool, thinking=thinking)


@CI
@given(texts, st.booleans())
def test_nothing_is_lost_but_markers_and_layout(text, tools):
    strip = lambda s: re.sub(r'\s', '', re.sub('</?think>|</?tool_call>', '', s))
    got = ''.join(json.dumps({'name': p.name, 'arguments': json.loads(p.text)}) if p.kind == 'call' else p.text
                  for p in split([text], tool=TOOL if tools else None))
    assert strip(got) == strip(text)


@pytest.mark.parametrize('n', range(1, 17))
def test_blocks(n):
    assert split([FULL[i:i + n] for i in range(0, len(FULL), n)]) == split([FULL])


def test_every_two_and_three_way_cut():
    text = 'Hm.<think>a\n</think>\n\nb<tool_call>{"name": "f"}</tool_call>c'
    whole = split([text])
    assert [tuple(p)[:2] for p in whole] == [('content', 'Hm.'), ('reasoning', 'a'), ('content', '\nb'), ('call', '{}'),
                                             ('content', '\nc')]
    for i in range(len(text)):
        for j in range(i, len(text)): assert split([text[:i], text[i:j], text[j:]]) == whole


def test_calls_are_content_unless_asked_for(): assert split([FULL], tool=None)[-1].text.endswith('</tool_call>')


def test_a_target_without_markers_holds_nothing_back():
    s = Splitter()
    assert [p.text for d in ('a ', ' <thi', 'nk>\n') for p in s.feed(d)] == ['a ', ' <thi', 'nk>\n'] and s.end() == []


def test_a_long_call_costs_no_more_per_character(monkeypatch):
    calls = 0
    def counting(body):
        nonlocal calls
        calls += 1
        return False
    monkeypatch.setattr('mlxspec.reply.inside_string', counting)
    body = '<tool_call>{"name": "f", "arguments": {"t": "' + 'x' * 5000 + '"}}</tool_call>'
    assert len(split(body)) == 1 and calls == 1


def test_importing_it_loads_no_mlx():
    code = 'import sys, mlxspec.reply; print([m for m in sys.modules if m.split(".")[0] in ("mlx", "mlx_lm", "transformers")])'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout == '[]\n'
