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
    shown = {'call': '{{"name":"{}","arguments":', 'arguments': '{}}}'} # as the alphabet above writes a call
    got = ''.join(shown.get(p.kind, '{}').format(p.text) for p in split([text], tool=TOOL if tools else None))
    assert strip(got) == strip(text)


@pytest.mark.parametrize('n', range(1, 17))
def test_blocks(n):
    assert split([FULL[i:i + n] for i in range(0, len(FULL), n)]) == split([FULL])


def test_every_two_and_three_way_cut():
    text = 'Hm.<think>a\n</think>\n\nb<tool_call>{"name": "f", "arguments": {"x": ["</tool_call>\n"]}}</tool_call>c'
    whole = split([text])
    assert [tuple(p) for p in whole] == [('content', 'Hm.'), ('reasoning', 'a'), ('content', '\nb'), ('call', 'f'),
                                         ('arguments', '{"x": ["</tool_call>\\n"]}'), ('content', '\nc')]
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
    body = '<tool_call>{"arguments": {"t": "' + 'x' * 5000 + '"}, "name": "f"}</tool_call>'
    assert len(split(body)) == 2 and calls == 1


values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
                      lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3), max_leaves=8)


@CI
@given(st.dictionaries(st.text(max_size=5), values, max_size=4), st.integers(1, 9), st.sampled_from([None, 1]), st.booleans())
def test_arguments_are_what_the_model_wrote_in_any_blocks(args, n, indent, ascii_only):
    text = '<tool_call>' + json.dumps({'name': 'f', 'arguments': args}, indent=indent, ensure_ascii=ascii_only) + '</tool_call>ok'
    call, said, rest = split([text[i:i + n] for i in range(0, len(text), n)])
    assert (call, json.loads(said.text), rest.text) == (('call', 'f'), args, 'ok')


def test_long_arguments_come_while_they_are_written():
    s = Splitter(THINK, TOOL)
    s.feed('<tool_call>{"name": "write", "arguments": {"text": "')
    for piece in ('Once\n', 'upon a \\', '"time\\"'): assert [p.kind for p in s.feed(piece)] == ['arguments']


@pytest.mark.parametrize(('text', 'args'), [
    ('{"name": "f", "arguments": {"a": [1}</tool_call>', '{"a": [1}]}'), # a bracket that does not fit stands as it is
    ('{"name": "f", "arguments": {"a": {"b": 1</tool_call>', '{"a": {"b": 1}}'),
    ('{"name": "f", "arguments": {"a": "x', '{"a": "x'), ('{"name": "f", "arguments": {"a": 1} </tool', '{"a": 1}'),
    ('{"name": "f", "arguments": {"a": 1}, "id": 3}</tool_call>', '{"a": 1}'), ('{"name": "f", "arguments": {"a": 1}</tool_call>', '{"a": 1}')])
def test_calls_that_break_off(text, args):
    for n in (1, 4, 99): assert split([('<tool_call>' + text)[i:i + n] for i in range(0, 99, n)])[:2] == [('call', 'f'), ('arguments', args)]


def test_other_notations_are_read_by_the_targets_own_parser():
    def parse(body):
        name, _, arg = body.strip().partition(' ')
        return {'name': name, 'arguments': {'x': int(arg)}}
    s = Splitter(THINK, TOOL, parse=parse)
    text = '<tool_call>\nf 3\n</tool_call><tool_call>f x</tool_call>'
    assert join(s.feed(text) + s.end()) == [('call', 'f'), ('arguments', '{"x": 3}'), ('content', '<tool_call>f x</tool_call>')]


def test_importing_it_loads_no_mlx():
    code = 'import sys, mlxspec.reply; print([m for m in sys.modules if m.split(".")[0] in ("mlx", "mlx_lm", "transformers")])'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout == '[]\n'
