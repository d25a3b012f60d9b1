"The protocol against its users: OpenAI's own types, and inputs nobody should send. (Told in nbs/40_wire.ipynb.)"
import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import mlxspec
from mlxspec.core import Chunk, Emitted, MlxspecError, RequestError, RequestStats
from mlxspec.reply import Splitter
from mlxspec.wire import (CATALOGUE, DONE, Answer, ChatStream, Head, account, chat_body, check_tree, error_body, fault,
                          read_body, read_chat, speculation, template_inputs, to_params)

CI = settings(max_examples=30, derandomize=True, deadline=None)
HEAD = Head('chatcmpl-7', 1700000000, 'm', 'fp_1')
THINK, TOOL = ('<think>', '</think>'), ('<tool_call>', '</tool_call>')
HELLO = [{'role': 'user', 'content': 'hello'}]
TEXT = '<think>check the map</think>Two calls: <tool_call>{"name":"find","arguments":{"q":"café 😀"}}</tool_call><tool_call>{"name":"open"}</tool_call>'
rounds = st.lists(st.integers(1, 8).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), max_size=30)


def stats_of(pairs, **kw):
    return RequestStats(prompt_tokens=5, completion_tokens=9, per_step_drafted=[d for d, _ in pairs],
                        per_step_accepted=[a for _, a in pairs], **kw)


def chunks(text, n, logprobs=False, reason='stop'):
    t = (Emitted(0, 'target', -.5, ((0, -.5), (1, float('-inf')))),) if logprobs else ()
    return [Chunk(text[i:i + n], t) for i in range(0, len(text), n)] + [Chunk('', finish_reason=reason)]


def streamed(text, n, include_usage=True, **kw):
    s = ChatStream(Answer(HEAD, Splitter(THINK, TOOL), **kw), include_usage)
    raw = s.start() + ''.join(s.step(c) for c in chunks(text, n, 'text_of' in kw)) + s.finish(stats_of([(3, 2)]), 4)
    events = raw.split('\n\n')
    assert raw.endswith(DONE) and events.pop() == '' and events.pop() == 'data: [DONE]'
    assert raw.isascii() and all(e.startswith('data: ') for e in events)
    return [json.loads(e[6:]) for e in events]


def whole(text, **kw):
    a = Answer(HEAD, Splitter(THINK, TOOL), **kw)
    for c in chunks(text, 10**6, 'text_of' in kw): a.add(c)
    return chat_body(a, stats_of([(3, 2)]), 4)


@pytest.mark.parametrize('text', ['', 'Hello', TEXT, '<think>a', 'a<tool_call>{"na'])
@pytest.mark.parametrize('kw', [{}, {'text_of': 'ab'.__getitem__}], ids=['plain', 'logprobs'])
def test_bodies_are_what_openai_says(text, kw):
    ChatCompletion.model_validate(whole(text, **kw), strict=True)
    for usage in (True, False):
        for e in streamed(text, 3, usage, **kw):
            ChatCompletionChunk.model_validate(e, strict=True)
            assert (e['id'], e['created'], e['model'], e['object']) == ('chatcmpl-7', 1700000000, 'm', 'chat.completion.chunk')
            json.dumps(e, allow_nan=False)


@pytest.mark.parametrize('n', range(1, 17))
def test_a_stream_adds_up_to_the_whole_answer(n):
    events, message = streamed(TEXT, n), whole(TEXT)['choices'][0]['message']
    deltas = [c['delta'] for e in events for c in e['choices']]
    assert deltas[0] == {'role': 'assistant', 'content': '', 'refusal': None}
    for k in ('content', 'reasoning_content'): assert ''.join(d.get(k) or '' for d in deltas) == message[k]
    calls = [c for d in deltas for c in d.get('tool_calls', [])]
    assert [c.pop('index') for c in calls] == [0, 1] and calls == message['tool_calls']
    assert json.loads(calls[0]['function']['arguments']) == {'q': 'café 😀'}


def test_order_of_a_stream():
    events = streamed('Hello, world', 5)
    assert [bool(e['choices']) for e in events] == [True] * (len(events) - 1) + [False]
    assert all('usage' in e for e in events) and [e['usage'] is None for e in events] == [True] * (len(events) - 1) + [False]
    assert [e['choices'][0]['finish_reason'] for e in events[:-1]] == [None] * (len(events) - 2) + ['stop']
    assert events[-1]['usage']['total_tokens'] == 14 and 'metrics' in events[-1]
    unasked = streamed('Hello, world', 5, include_usage=False)
    assert all('usage' not in e for e in unasked) and unasked[-1]['metrics'] == events[-1]['metrics']


@pytest.mark.parametrize(('text', 'reason', 'shown'), [('x', 'stop', 'stop'), ('x', 'length', 'length'), (TEXT, 'stop', 'tool_calls'),
                                                       (TEXT, 'length', 'length')])
def test_finish_reasons(text, reason, shown):
    a = Answer(HEAD, Splitter(THINK, TOOL))
    for c in chunks(text, 4, reason=reason): a.add(c)
    assert a.reason == shown


@CI
@given(rounds)
def test_identities_of_the_account(pairs):
    m = speculation(stats_of(pairs))
    h, n = m['acceptance_histogram'], m['num_spec_steps']
    assert sum(h) == n == len(pairs) and sum(j * c for j, c in enumerate(h)) == m['num_accepted_draft_tokens']
    assert sum(m['per_step_accepted']) == m['num_accepted_draft_tokens'] <= m['num_draft_tokens'] == sum(m['per_step_drafted'])
    assert m['mean_acceptance_length'] == (1 + m['num_accepted_draft_tokens'] / n if n else None)
    assert all(a <= d for a, d in zip(m['per_step_accepted'], m['per_step_drafted'], strict=True)) and (not h or h[-1])
    t = account(stats_of(pairs))['timings']
    assert (t['draft_n'], t['draft_n_accepted']) == (m['num_draft_tokens'], m['num_accepted_draft_tokens'])
    assert 'num_spec_tokens' not in m


@pytest.mark.parametrize(('field', 'value', 'param', 'code'), [
    ('messages', 'hi', 'messages', 'invalid_type'), ('messages', [3], 'messages[0]', 'invalid_type'),
    ('messages', None, 'messages', 'invalid_value'), ('temperature', 'hot', 'temperature', 'invalid_type'),
    ('temperature', True, 'temperature', 'invalid_type'), ('temperature', float('inf'), 'temperature', 'invalid_value'),
    ('temperature', 2.1, 'temperature', 'invalid_value'), ('max_tokens', 0, 'max_tokens', 'invalid_value'),
    ('max_tokens', -1, 'max_tokens', 'invalid_value'), ('max_completion_tokens', 1.5, 'max_completion_tokens', 'invalid_type'),
    ('top_k', -1, 'top_k', 'invalid_value'), ('top_k', float('inf'), 'top_k', 'invalid_type'), ('seed', 2**63, 'seed', 'invalid_value'),
    ('seed', '1', 'seed', 'invalid_type'), ('stop', '', 'stop[0]', 'invalid_value'), ('stop', ['a', 3], 'stop[1]', 'invalid_type'),
    ('stop', 3, 'stop', 'invalid_type'), ('stream', 'yes', 'stream', 'invalid_type'), ('stream', 1, 'stream', 'invalid_type'),
    ('logit_bias', {'abc': 1}, 'logit_bias.abc', 'invalid_value'), ('logit_bias', {'50': 1}, 'logit_bias.50', 'invalid_value'),
    ('logit_bias', {'-5': 1}, 'logit_bias.-5', 'invalid_value'), ('logit_bias', {'5': float('nan')}, 'logit_bias.5', 'invalid_value'),
    ('logit_bias', {'5': 101}, 'logit_bias.5', 'invalid_value'), ('logit_bias', {'٣': 1}, 'logit_bias.٣', 'invalid_value'),
    ('logit_bias', {str(i): 1 for i in range(1025)}, 'logit_bias', 'invalid_value'),
    ('top_logprobs', 21, 'top_logprobs', 'invalid_value'), ('top_logprobs', 2, 'top_logprobs', 'invalid_value'),
    ('tools', [{'type': 'function'}], 'tools[0].function', 'invalid_value'), ('tools', [dict(type='mcp')], 'tools[0].type', 'invalid_value'),
    ('tools', [{'type': 'function', 'function': {'name': 'f', 'parameters': {'x': 'y' * 70000}}}], 'tools[0].function.parameters', 'invalid_value'),
    ('chat_template_kwargs', {'tokenize': True}, 'chat_template_kwargs.tokenize', 'invalid_value'),
    ('chat_template_kwargs', {'a': 'x' * 10**6}, 'chat_template_kwargs.a', 'invalid_value'),
    ('chat_template_kwargs', {'a': {}}, 'chat_template_kwargs.a', 'invalid_value'),
    ('speculation', {'disable': 'yes'}, 'speculation.disable', 'invalid_type'), ('model', 3, 'model', 'invalid_type'),
    ('n', 9, 'n', 'unsupported_parameter'), ('store', True, 'store', 'unsupported_parameter'), ('audio', {}, 'audio', 'unsupported_parameter'),
    ('response_format', {'type': 'json_object'}, 'response_format', 'unsupported_parameter'),
    ('prediction', {'type': 'content', 'content': 'x'}, 'prediction', 'unsupported_parameter'),
    ('tool_choice', {'type': 'function'}, 'tool_choice', 'unsupported_parameter'),
])
def test_wrong_fields_are_named(field, value, param, code):
    def admit(body):
        req = read_chat(body)
        template_inputs(req)
        return to_params(req, 50)
    with pytest.raises(RequestError) as e: admit({'messages': HELLO} | {field: value})
    assert (e.value.param, e.value.code, e.value.status) == (param, code, 400)
    assert len(str(e.value)) < 250


@pytest.mark.parametrize('more', [
    {'n': 1}, {'n': 1.0}, {'store': False}, {'response_format': {'type': 'text'}}, {'modalities': ['text']}, {'tool_choice': 'none'},
    {'unknown': {'deep': [1]}}, {'temperature': None, 'stop': None, 'tools': None, 'n': None}, {'metadata': {'a': 'b'}},
    {'max_tokens': 5, 'max_completion_tokens': 5}, {'top_p': 1, 'seed': -2**63, 'user': 'u'}, {'stop': ['x'] * 16},
    {'stream_options': {'include_usage': True, 'include_obfuscation': False}}, {'service_tier': 'auto'}])
def test_fields_that_are_fine(more): to_params(read_chat({'messages': HELLO} | more), 50)


def test_a_million_tokens_is_a_wish(): assert to_params(read_chat({'messages': HELLO, 'max_tokens': 10**12}), 50).max_tokens == 10**12


@CI
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
                    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3), max_leaves=12),
       st.sampled_from(['messages', 'stop', 'tools', 'logit_bias', 'seed', 'temperature', 'chat_template_kwargs', 'speculation', 'n']))
def test_no_value_of_a_field_raises_anything_else(value, name):
    body = {'messages': HELLO} | {name: value}
    try:
        check_tree(body)
        req = read_chat(body)
        template_inputs(req)
        to_params(req, 50)
    except RequestError as e:
        status, error = fault(e, 'req_1')
        assert status == 400
        json.dumps(error, allow_nan=False).encode()


@CI
@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_else(raw):
    try: read_body(raw)
    except RequestError as e: assert e.status == 400


def codes_in(path):
    "Codes that a module gives to `RequestError` and `Later`, or compares with."
    for n in ast.walk(ast.parse(path.read_text())):
        if isinstance(n, ast.Call) and getattr(n.func, 'id', '') in ('RequestError', 'Later'):
            at = 2 if n.func.id == 'RequestError' else 1
            yield from (x.value for x in [*n.args[at:at + 1], *(k.value for k in n.keywords if k.arg == 'code')] if isinstance(x, ast.Constant))


def test_every_code_in_the_package_is_in_the_catalogue():
    codes = {c for p in Path(mlxspec.__file__).parent.glob('*.py') for c in codes_in(p)}
    assert {'invalid_json', 'context_length_exceeded', 'queue_full'} < codes <= set(CATALOGUE)
    todo = [MlxspecError]
    while todo:
        c = todo.pop()
        todo += c.__subclasses__()
        assert c.code in CATALOGUE and (c.status == CATALOGUE[c.code].status), c


def test_error_bodies_have_all_four_keys():
    for code in CATALOGUE: assert set(error_body('x', code)['error']) == {'message', 'type', 'param', 'code'}


def test_importing_it_loads_no_mlx():
    code = 'import sys, mlxspec.wire; print([m for m in sys.modules if m.split(".")[0] in ("mlx", "mlx_lm", "transformers")])'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout == '[]\n'
