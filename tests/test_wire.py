"The protocol against its users: OpenAI's own types, and inputs nobody should send. (Told in nbs/40_wire*.ipynb.)"
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from mlxspec.core import Choices, Chunk, Emitted, Params, RequestError, RequestStats
from mlxspec.errors import told
from mlxspec.stand_in import StandInChat
from mlxspec.wire import (DONE, MAX_N, Head, Response, account, check_tree, ignored, read_body, speculation, to_params, together,
                          usage)
from mlxspec.wire_chat import ChatRequest, read_chat
from mlxspec.wire_completions import (CompletionRequest, DetokenizeRequest, TokenizeRequest, read_completion, read_tokens,
                                      several, tokenize)

CI = settings(max_examples=30, derandomize=True, deadline=None)
HELLO, PROMPT = {'messages': [{'role': 'user', 'content': 'hello'}]}, {'prompt': 'hello'}
TOOLS = {'tools': [{'type': 'function', 'function': {'name': 'find'}}]}
TEXT = '<think>check the map</think>Two calls: <tool_call>{"name":"find","arguments":{"q":"café 😀"}}</tool_call><tool_call>{"name":"open"}</tool_call>'
rounds = st.lists(st.integers(1, 8).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), max_size=30)
READ = {ChatRequest: (read_chat, HELLO), CompletionRequest: (read_completion, PROMPT)}


def stats_of(pairs, **kw):
    return RequestStats(prompt_tokens=5, completion_tokens=9, per_step_drafted=[d for d, _ in pairs],
                        per_step_accepted=[a for _, a in pairs], **kw)


def response(req, n=1):
    "An empty response to a request, with the tokenizer of the stand-in."
    return Response(Head(f'{req.prefix}-7', 1700000000, 'm', 'fp_1'), [req.choice(i, '7', StandInChat(), [104, 105]) for i in range(n)],
                    req.kinds, req.stream_options, 5)


def chunks(text, n, logprobs=None, reason='stop'):
    top = tuple((65 + i, -.5 if i == 0 else float('-inf')) for i in range(logprobs or 0))
    token = lambda t: (Emitted(ord(t[0]), 'target', None if logprobs is None else -.5, top),)
    return [Chunk(t := text[i:i + n], token(t), (t,)) for i in range(0, len(text), n)] + [Chunk('', finish_reason=reason)]


def whole(req, text, n=1, **kw):
    r = response(req, n)
    for i in range(n):
        for c in chunks(text, 10**6, **kw): r.step(i, c)
    return r.body(stats_of([(3, 2)]), 4)


def streamed(req, text, size, n=1, **kw):
    r = response(req, n)
    raw = r.start()
    for i in range(n): raw += ''.join(r.step(i, c) for c in chunks(text, size, **kw)) + r.end(i)
    parts = (raw + r.finish(stats_of([(3, 2)]), 4)).split('\n\n')
    assert raw.isascii() and parts.pop() == '' and parts.pop() == 'data: [DONE]' and DONE == 'data: [DONE]\n\n'
    assert all(e.startswith('data: ') for e in parts)
    return [json.loads(e[6:]) for e in parts]


def as_openai(event):
    "A completion's event as OpenAI's type has it. It wants a finish reason, which OpenAI's own streams do not have before the end."
    return event | {'choices': [c | {'finish_reason': c['finish_reason'] or 'stop'} for c in event['choices']]}


# ---- what goes out

@pytest.mark.parametrize('text', ['', 'Hello', TEXT, '<think>a', 'a<tool_call>{"na'])
@pytest.mark.parametrize('more', [{}, {'logprobs': True, 'top_logprobs': 2}], ids=['plain', 'logprobs'])
@pytest.mark.parametrize('n', [1, 2])
def test_chats_are_what_openai_says(text, more, n):
    lp = 2 if more else None
    body = whole(read_chat(HELLO | TOOLS | more), text, n, logprobs=lp)
    ChatCompletion.model_validate(body, strict=True)
    assert [c['index'] for c in body['choices']] == list(range(n))
    for options in ({}, {'include_usage': True}, {'include_usage': True, 'continuous_usage_stats': True}):
        for e in streamed(read_chat(HELLO | TOOLS | more | {'stream_options': options}), text, 3, n, logprobs=lp):
            ChatCompletionChunk.model_validate(e, strict=True)
            assert (e['id'], e['created'], e['model'], e['object']) == ('chatcmpl-7', 1700000000, 'm', 'chat.completion.chunk')
            json.dumps(e, allow_nan=False)


@pytest.mark.parametrize('text', ['', 'Hello', TEXT])
@pytest.mark.parametrize('more', [{}, {'logprobs': 0}, {'logprobs': 3}, {'echo': True}], ids=str)
@pytest.mark.parametrize('n', [1, 2])
def test_completions_are_what_openai_says(text, more, n):
    lp = more.get('logprobs')
    req = read_completion(PROMPT | more | {'stream_options': {'include_usage': True}})
    body, events = whole(req, text, n, logprobs=lp), streamed(req, text, 3, n, logprobs=lp)
    for e in (body, *map(as_openai, events)): Completion.model_validate(e, strict=True)
    for i in range(n):
        mine = [c for e in events for c in e['choices'] if c['index'] == i]
        assert ''.join(c['text'] for c in mine) == body['choices'][i]['text'] == ('hi' if 'echo' in more else '') + text
        assert [c['finish_reason'] for c in mine] == [None] * (len(mine) - 1) + ['stop']
    if lp is not None and text:
        said = streamed(req, text, 3, 1, logprobs=lp)
        lists = [c['logprobs'] for e in said for c in e['choices'] if c['logprobs']]
        assert sum((x['text_offset'] for x in lists), []) == list(range(0, len(text), 3))
        assert all(len(d) in (lp, lp + 1) and -9999 <= min(d.values()) for x in lists for d in x['top_logprobs'])


@pytest.mark.parametrize('size', range(1, 17))
def test_a_stream_adds_up_to_the_whole_answer(size):
    req = read_chat(HELLO | TOOLS)
    events, message = streamed(req, TEXT, size), whole(req, TEXT)['choices'][0]['message']
    deltas = [c['delta'] for e in events for c in e['choices']]
    assert deltas[0] == {'role': 'assistant', 'content': '', 'refusal': None}
    for k in ('content', 'reasoning_content'): assert ''.join(d.get(k) or '' for d in deltas) == message[k]
    calls = {}
    for c in (c for d in deltas for c in d.get('tool_calls', [])):
        if c['index'] in calls:
            assert set(c) == {'index', 'function'} and set(c['function']) == {'arguments'}
            calls[c['index']]['function']['arguments'] += c['function']['arguments']
        else: calls[c['index']] = c
    assert [{k: v for k, v in calls[i].items() if k != 'index'} for i in range(2)] == message['tool_calls']
    assert json.loads(calls[0]['function']['arguments']) == {'q': 'café 😀'}


def test_order_of_a_stream():
    ask = lambda **options: read_chat(HELLO | {'stream_options': options})
    events = streamed(ask(include_usage=True), 'Hello, world', 5)
    assert [bool(e['choices']) for e in events] == [True] * (len(events) - 1) + [False]
    assert all('usage' in e for e in events) and [e['usage'] is None for e in events] == [True] * (len(events) - 1) + [False]
    assert [e['choices'][0]['finish_reason'] for e in events[:-1]] == [None] * (len(events) - 2) + ['stop']
    assert events[-1]['usage']['total_tokens'] == 14 and 'metrics' in events[-1]
    unasked = streamed(ask(), 'Hello, world', 5)
    assert all('usage' not in e for e in unasked) and unasked[-1]['metrics'] == events[-1]['metrics']
    running = streamed(ask(continuous_usage_stats=True), 'Hello, world', 5)
    assert [e['usage']['completion_tokens'] for e in running] == [0, 1, 2, 3, 3] and running[0]['usage']['prompt_tokens'] == 5


def test_the_last_of_several_choices_carries_the_account():
    events = streamed(read_chat(HELLO), 'ab', 1, n=3)
    ends = [e for e in events if e['choices'][0]['finish_reason']]
    assert ['metrics' in e for e in ends] == [False, False, True] and ends[-1] is events[-1]


@pytest.mark.parametrize(('text', 'reason', 'shown'), [('x', 'stop', 'stop'), ('x', 'length', 'length'), (TEXT, 'stop', 'tool_calls'),
                                                       (TEXT, 'length', 'length')])
def test_finish_reasons(text, reason, shown):
    assert whole(read_chat(HELLO | TOOLS), text, reason=reason)['choices'][0]['finish_reason'] == shown


# ---- the account

def identities(m):
    h, n = m['acceptance_histogram'], m['num_spec_steps']
    assert sum(h) == n and sum(j * c for j, c in enumerate(h)) == m['num_accepted_draft_tokens']
    assert sum(m['per_step_accepted']) == m['num_accepted_draft_tokens'] <= m['num_draft_tokens'] == sum(m['per_step_drafted'])
    assert m['mean_acceptance_length'] == (1 + m['num_accepted_draft_tokens'] / n if n else None)
    rate = m['draft_acceptance_rate']
    assert rate is None if not m['num_draft_tokens'] else rate == m['num_accepted_draft_tokens'] / m['num_draft_tokens']
    assert all(a <= d for a, d in zip(m['per_step_accepted'], m['per_step_drafted'], strict=True)) and (not h or h[-1])
    assert 'num_spec_tokens' not in m                         # K is not fixed


@CI
@given(rounds)
def test_identities_of_the_account(pairs):
    m, t = speculation(stats_of(pairs)), account(stats_of(pairs))['timings']
    identities(m)
    assert m['num_spec_steps'] == len(pairs)
    assert (t['draft_n'], t['draft_n_accepted']) == (m['num_draft_tokens'], m['num_accepted_draft_tokens'])


@CI
@given(st.lists(rounds, min_size=1, max_size=4))
def test_the_account_of_several_choices_adds_up(many):
    parts = [stats_of(p, seed=3, level='identical', sources={'lookup': [sum(d for d, _ in p), sum(a for _, a in p)]}) for p in many]
    parts[-1].cached_tokens += 5
    for p in parts: p.reasons['parked'], p.arms['plain'], p.choice = 2, 1, Choices(looks=1, tps=None)
    total = together(parts, len(parts))
    identities(speculation(total))
    n = len(parts)
    assert (total.prompt_tokens, total.completion_tokens, total.reasons['parked'], total.arms['plain']) == (5, 9 * n, 2 * n, n)
    assert (total.seed, total.level, total.choice.looks, total.choice.tps) == (3, 'identical', n, None)
    assert total.cached_tokens == (5 if n == 1 else 0) and together(parts, 1).prompt_tokens == 5 * n
    assert total.sources['lookup'] == [total.drafted, total.accepted]
    assert [p.completion_tokens for p in parts] == [9] * n    # and the parts are as they were


@CI
@given(st.integers(0, 9), st.integers(0, 9))
def test_tokens_of_a_prediction_are_counted_where_one_was_sent(accepted, rejected):
    details = lambda s: usage(s)['completion_tokens_details']
    d = details(stats_of([], sources={'prediction': [accepted + rejected, accepted], 'lookup': [9, 3]}))
    assert (d['accepted_prediction_tokens'], d['rejected_prediction_tokens']) == (accepted, rejected)
    d = details(stats_of([], sources={'lookup': [9, 3]}))
    assert (d['accepted_prediction_tokens'], d['rejected_prediction_tokens']) == (0, 0)


# ---- what comes in

@pytest.mark.parametrize(('field', 'value', 'param', 'code'), [
    ('temperature', 'hot', 'temperature', 'invalid_type'), ('temperature', True, 'temperature', 'invalid_type'),
    ('temperature', float('inf'), 'temperature', 'invalid_value'), ('temperature', 2.1, 'temperature', 'invalid_value'),
    ('temperature', 10**400, 'temperature', 'invalid_type'),
    ('max_tokens', 0, 'max_tokens', 'invalid_value'), ('max_tokens', -1, 'max_tokens', 'invalid_value'), ('max_tokens', 2**70, 'max_tokens', 'invalid_value'),
    ('min_tokens', -1, 'min_tokens', 'invalid_value'), ('min_tokens', True, 'min_tokens', 'invalid_type'),
    ('top_k', -1, 'top_k', 'invalid_value'), ('top_k', float('inf'), 'top_k', 'invalid_type'), ('seed', 2**63, 'seed', 'invalid_value'),
    ('seed', 2**70, 'seed', 'invalid_value'), ('seed', '1', 'seed', 'invalid_type'), ('stop', '', 'stop[0]', 'invalid_value'),
    ('stop', [''], 'stop[0]', 'invalid_value'), ('stop', ['x'] * 17, 'stop', 'invalid_value'), ('stop', 'x' * 10**6, 'stop[0]', 'invalid_value'),
    ('stop', ['a', 3], 'stop[1]', 'invalid_type'), ('stop', 3, 'stop', 'invalid_type'), ('stream', 'yes', 'stream', 'invalid_type'),
    ('stream', 1, 'stream', 'invalid_type'), ('stream_options', {'include_usage': 1}, 'stream_options.include_usage', 'invalid_type'),
    ('logit_bias', {'abc': 1}, 'logit_bias.abc', 'invalid_value'), ('logit_bias', {'50': 1}, 'logit_bias.50', 'invalid_value'),
    ('logit_bias', {'-5': 1}, 'logit_bias.-5', 'invalid_value'), ('logit_bias', {'5': float('nan')}, 'logit_bias.5', 'invalid_value'),
    ('logit_bias', {'5': 101}, 'logit_bias.5', 'invalid_value'), ('logit_bias', {'٣': 1}, 'logit_bias.٣', 'invalid_value'),
    ('logit_bias', {str(i): 1 for i in range(1025)}, 'logit_bias', 'invalid_value'),
    ('speculation', {'disable': 'yes'}, 'speculation.disable', 'invalid_type'), ('model', 3, 'model', 'invalid_type'),
    ('n', 0, 'n', 'invalid_value'), ('n', True, 'n', 'invalid_type'), ('n', 9, 'n', 'unsupported_parameter'), ('n', 129, 'n', 'invalid_value'),
    ('store', True, 'store', 'unsupported_parameter'), ('response_format', {'type': 'json_object'}, 'response_format', 'unsupported_parameter'),
    ('guided_json', {}, 'guided_json', 'unsupported_parameter'), ('best_of', 3, 'best_of', 'unsupported_parameter'),
    ('use_beam_search', True, 'use_beam_search', 'unsupported_parameter'),
    ('prediction', 'x', 'prediction', 'invalid_type'), ('prediction', {'type': 'content'}, 'prediction.content', 'invalid_value'),
    ('prediction', {'type': 'file', 'content': 'x'}, 'prediction.type', 'unsupported_parameter'),
    ('prediction', {'type': 'content', 'content': [{'type': 'image_url'}]}, 'prediction.content[0]', 'unsupported_parameter'),
    ('prediction', {'type': 'content', 'content': 3}, 'prediction.content', 'invalid_type'),
    # chat
    ('messages', 'hi', 'messages', 'invalid_type'), ('messages', [3], 'messages[0]', 'invalid_type'), ('messages', None, 'messages', 'invalid_value'),
    ('messages', [], 'messages', 'invalid_value'), ('messages', [{'role': 'robot', 'content': ''}], 'messages[0].role', 'invalid_value'),
    ('messages', [{'role': 'user'}], 'messages[0].content', 'invalid_value'),
    ('messages', [*HELLO['messages'], {'role': 'user', 'content': [{'type': 'image_url'}]}], 'messages[1].content[0]', 'unsupported_parameter'),
    ('max_completion_tokens', 1.5, 'max_completion_tokens', 'invalid_type'), ('top_logprobs', 21, 'top_logprobs', 'invalid_value'),
    ('top_logprobs', 2, 'top_logprobs', 'invalid_value'), ('tools', [{'type': 'function'}], 'tools[0].function', 'invalid_value'),
    ('tools', [dict(type='mcp')], 'tools[0].type', 'invalid_value'),
    ('tools', [{'type': 'function', 'function': {'name': 'f', 'parameters': {'x': 'y' * 70000}}}], 'tools[0].function.parameters', 'invalid_value'),
    ('chat_template_kwargs', {'tokenize': True}, 'chat_template_kwargs.tokenize', 'invalid_value'),
    ('chat_template_kwargs', {'a': 'x' * 10**6}, 'chat_template_kwargs.a', 'invalid_value'),
    ('chat_template_kwargs', {'a': {}}, 'chat_template_kwargs.a', 'invalid_value'), ('audio', {}, 'audio', 'unsupported_parameter'),
    ('tool_choice', {'type': 'function'}, 'tool_choice', 'unsupported_parameter'), ('tool_choice', 'required', 'tool_choice', 'unsupported_parameter'),
    ('parallel_tool_calls', False, 'parallel_tool_calls', 'unsupported_parameter'),
    # completions
    ('prompt', None, 'prompt', 'invalid_value'), ('prompt', 3, 'prompt', 'invalid_type'), ('prompt', ['a'] * 10_000, 'prompt', 'invalid_value'),
    ('prompt', [['a']], 'prompt[0]', 'invalid_type'), ('prompt', [1, 'a'], 'prompt[0]', 'invalid_type'), ('prompt', [True], 'prompt[0]', 'invalid_type'),
    ('suffix', 'x', 'suffix', 'unsupported_parameter')])
def test_wrong_fields_are_named(field, value, param, code):
    kinds = [k for k in READ if field in k.model_fields or field in k.refuses]
    assert kinds
    for kind in kinds:
        read, base = READ[kind]
        with pytest.raises(RequestError) as e: to_params(read(base | {field: value}), 50)
        assert (e.value.param, e.value.code, e.value.status) == (param, code, 400), kind
        assert len(str(e.value)) < 250


@pytest.mark.parametrize(('more', 'param'), [({'logprobs': 6}, 'logprobs'), ({'echo': 1}, 'echo'), ({'logprobs': True}, 'logprobs'),
                                            ({'prompt': ['a'] * 8, 'n': 5}, 'n')])
def test_wrong_fields_of_completions(more, param):
    with pytest.raises(RequestError) as e: read_completion(PROMPT | more)
    assert e.value.param == param


@pytest.mark.parametrize('more', [
    {'n': 1}, {'n': 1.0}, {'n': MAX_N}, {'store': False}, {'response_format': {'type': 'text'}}, {'modalities': ['text']}, {'tool_choice': 'none'},
    {'unknown': {'deep': [1]}}, {'temperature': None, 'stop': None, 'tools': None, 'n': None}, {'metadata': {'a': 'b'}}, {'best_of': 1},
    {'max_tokens': 5, 'max_completion_tokens': 5}, {'top_p': 1, 'seed': -2**63, 'user': 'u'}, {'stop': ['x'] * 16}, {'parallel_tool_calls': True},
    {'stream_options': {'include_usage': True, 'include_obfuscation': False}}, {'service_tier': 'auto'},
    {'prediction': {'type': 'content', 'content': ''}}])
def test_fields_that_are_fine(more): assert to_params(read_chat(HELLO | more), 50).prediction is None


def test_a_million_tokens_is_a_wish(): assert to_params(read_chat(HELLO | {'max_tokens': 10**12}), 50).max_tokens == 10**12


def test_parameters_arrive():
    said = dict(temperature=.5, top_p=.9, top_k=3, min_p=.1, min_tokens=2, seed=5, frequency_penalty=.1, presence_penalty=.2, repetition_penalty=1.1,
                repetition_context_size=7, ignore_eos=True, max_tokens=9)
    for read, base in READ.values():
        p = to_params(read(base | said | {'stop': 'x', 'logit_bias': {'7': 1}, 'prediction': {'type': 'content', 'content': [{'type': 'text', 'text': 'y'}]}}), 50)
        assert p == Params(**said, stop=('x',), logit_bias={7: 1.}, prediction='y')
    assert to_params(read_completion(PROMPT), 50).max_tokens == 16


def test_fields_without_effect_are_named():
    assert ignored(ChatRequest, HELLO | {'user': 'u', 'metadata': None, 'x\r\ny': 1, 'store': False, 'seed': 1}) == 'user, x%0D%0Ay'
    assert ignored(CompletionRequest, PROMPT | {f'x{i}': i for i in range(1000)}).endswith(', +984')
    assert ignored(ChatRequest, {'😀' * 999: 1}).isascii()


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
                           lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=5), x, max_size=3), max_leaves=12)


@CI
@given(json_values, st.sampled_from(sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, 'tool_choice', 'unknown'})))
def test_no_value_of_a_field_raises_anything_else(value, name):
    for read, base in READ.values():
        body = base | {name: value}
        try:
            check_tree(body)
            req = read(body)
            to_params(req, 50)
            assert req.width <= 32 and ignored(type(req), body).isascii()
        except RequestError as e:
            status, error = told(e, 'req_1')
            assert status == 400
            json.dumps(error, allow_nan=False).encode()


@CI
@given(json_values)
def test_numbers_that_are_none_and_half_characters_end_at_the_door(value):
    def broken(v):
        if isinstance(v, dict): return any(broken(x) for x in v.values())
        if isinstance(v, list): return any(map(broken, v))
        if isinstance(v, float): return not math.isfinite(v)
        return isinstance(v, str) and any('\ud800' <= c <= '\udfff' for c in v)
    try: check_tree({'a': value})
    except RequestError as e: assert broken(value) and e.param.startswith('a')
    else: assert not broken(value)


@CI
@given(st.binary(max_size=60))
def test_no_bytes_raise_anything_else(raw):
    try: read_body(raw)
    except RequestError as e: assert e.status == 400


@pytest.mark.parametrize(('kind', 'body', 'param'), [
    (TokenizeRequest, {}, 'prompt'), (TokenizeRequest, {'prompt': 3}, 'prompt'), (TokenizeRequest, {'messages': []}, 'messages'),
    (DetokenizeRequest, {}, 'tokens'), (DetokenizeRequest, {'tokens': ['a']}, 'tokens[0]'), (DetokenizeRequest, {'tokens': [1, True]}, 'tokens[1]')])
def test_wrong_requests_for_the_tokenizer(kind, body, param):
    with pytest.raises(RequestError) as e: read_tokens(kind, body)
    assert e.value.param == param and e.value.status == 400


def test_messages_are_tokenised_as_they_are_read():
    req = read_tokens(TokenizeRequest, HELLO)
    assert tokenize(req, StandInChat(), 9)['tokens'] == read_chat(HELLO).prompts(StandInChat())[0]
    assert several([[1.0, 2], 'a']) == [[1, 2], 'a'] and read_completion({'prompt': [1.0, 2]}).prompts(StandInChat()) == [[1, 2]]
