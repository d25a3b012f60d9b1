"The server: protocol edge cases on a scripted engine, then sockets, signals and a real model. (Told in nbs/41_*.ipynb and 42_serving.ipynb.)"
import asyncio
import contextlib
import http.client
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import Future
from pathlib import Path

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from mlxspec import budget, edge, feed, gate, host, server, serving
from mlxspec.config import load_settings
from mlxspec.core import EngineError, RequestStats
from mlxspec.host import Host
from mlxspec.metrics import CAUSES, Ledger, cause
from mlxspec.policy import STATES, MtpPolicySnapshot
from mlxspec.stand_in import StandIn
from mlxspec.wire_chat import read_chat

T = 30  # seconds after which a wait counts as a hang
CHAT = '/v1/chat/completions'
HELLO = {'messages': [{'role': 'user', 'content': 'hello'}]}


@pytest.fixture
def make():
    engines = []

    def client(*script, tail='', max_queue=32, **host):
        engines.append(StandIn(*script, tail=tail, max_queue=max_queue))
        h = Host(engines[-1], max_queue=max_queue, **host)
        c = TestClient(server.make_app(h), base_url='http://127.0.0.1', raise_server_exceptions=False)
        c.host, c.engine = h, engines[-1]
        return c
    yield client
    for e in engines: e.close()


def error(r, status, code, param=None):
    assert r.status_code == status, r.text
    assert set(r.json()) == {'error'}
    e = r.json()['error']
    assert set(e) == {'message', 'type', 'param', 'code'} and (e['code'], e['param']) == (code, param) and e['message']
    assert r.headers['x-request-id'].startswith('req_')
    return e


def events(text):
    "Data of a stream, and whether it ended with [DONE]."
    data = [b.removeprefix('data: ') for b in text.split('\n\n') if b and not b.startswith(':')]
    return [json.loads(d) for d in data if d != '[DONE]'], data[-1] == '[DONE]'


@pytest.mark.parametrize(('raw', 'code'), [
    (b'', 'invalid_json'), (b'{bad', 'invalid_json'), (b'[]', 'invalid_json'), (b'null', 'invalid_json'), (b'{} {}', 'invalid_json'),
    (b'\x00', 'invalid_json'), (b'"\xff"', 'invalid_json'), (b'[' * 100_000, 'invalid_json'), (b'{"a":' * 5000 + b'1' + b'}' * 5000, None),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 'invalid_value'),
    (b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}', 'invalid_value'),
    (b'{"messages": [{"role": "user", "content": "a"}], "top_p": NaN}', 'invalid_value'),
    (b'{"messages": [{"role": "user", "content": "a"}], "seed": ' + b'9' * 5000 + b'}', 'invalid_json')])
def test_bad_bodies(make, raw, code):
    c = make('ok')
    r = c.post(CHAT, content=raw, headers={'content-type': 'application/json'})
    assert r.status_code == 400 and r.json()['error']['code'] == (code or r.json()['error']['code'])
    assert c.post(CHAT, json=HELLO).json()['choices'][0]['message']['content'] == 'ok'


@pytest.mark.parametrize(('more', 'status', 'code', 'param'), [
    ({'model': 'gpt-4'}, 404, 'model_not_found', 'model'), ({'model': ''}, 404, 'model_not_found', 'model'),
    ({'messages': []}, 400, 'invalid_value', 'messages'), ({'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]}, 400,
     'unsupported_parameter', 'messages[0].content[0]'), ({'messages': [{'role': 'user', 'content': 'x' * 64}]}, 400,
     'context_length_exceeded', 'messages'), ({'max_tokens': 0}, 400, 'invalid_value', 'max_tokens'),
    ({'logit_bias': {'128': 1}}, 400, 'invalid_value', 'logit_bias.128'), ({'n': 9}, 400, 'unsupported_parameter', 'n')])
@pytest.mark.parametrize('stream', [False, True])
def test_wrong_requests_get_a_status_streamed_or_not(make, more, status, code, param, stream):
    c = make('ok')
    error(c.post(CHAT, json=HELLO | more | {'stream': stream}), status, code, param)
    assert c.host.jobs == {} and c.engine.asked == []


@pytest.mark.parametrize(('method', 'path', 'status', 'code'), [
    ('GET', CHAT, 405, 'method_not_allowed'), ('POST', '/health', 405, 'method_not_allowed'), ('POST', '/v1/v1/chat/completions', 404, 'unknown_url'),
    ('POST', '//v1/chat/completions', 404, 'unknown_url'), ('POST', CHAT + '/', 404, 'unknown_url'), ('GET', '/docs', 404, 'unknown_url'),
    ('GET', '/openapi.json', 404, 'unknown_url'), ('GET', '/internal/mtp-policy', 404, 'unknown_url')])
def test_wrong_routes(make, method, path, status, code):
    r = make().request(method, 'http://127.0.0.1' + path)
    error(r, status, code)
    assert status != 405 or r.headers['allow']


def test_a_body_must_be_declared_small_and_quick(make, monkeypatch):
    c, big = make('ok'), json.dumps(HELLO | {'x': 'y' * edge.MAX_BODY})
    as_json = {'content-type': 'application/json'}
    error(c.post(CHAT, content=big, headers=as_json), 413, 'request_too_large')
    error(c.post(CHAT, content=iter([big.encode()]), headers=as_json), 413, 'request_too_large')
    for kind in ('text/plain', 'application/x-www-form-urlencoded', ''):
        error(c.post(CHAT, content=json.dumps(HELLO), headers={'content-type': kind}), 415, 'unsupported_media_type')
    assert c.post(CHAT, content=json.dumps(HELLO), headers={'content-type': 'Application/JSON; charset=utf-8'}).status_code == 200


def test_only_our_names_are_answered(make):
    c = make('ok')
    for name in ('evil.example', 'localhost.evil.example', '127.0.0.1.evil', ''):
        error(c.get('/health', headers={'host': name}), 421, 'host_not_allowed')
    for name in ('localhost:80', '[::1]', '127.0.0.1:9'): assert c.get('/health', headers={'host': name}).status_code == 200


def test_ids_that_are_answered(make):
    c = make('ok', served_name='mine')
    for model in ('default', 'stand-in', 'mine', None): assert c.post(CHAT, json=HELLO | {'model': model}).json()['model'] == 'mine'
    e = error(c.post(CHAT, json=HELLO | {'model': 'x' * 500}), 404, 'model_not_found', 'model')
    assert 'mine and stand-in' in e['message'] and len(e['message']) < 200
    listed = c.get('/v1/models').json()
    assert [m['id'] for m in listed['data']] == ['mine', 'stand-in'] and c.get('/v1/models/stand-in').json()['object'] == 'model'


def test_stream_and_body_are_the_same_answer(make):
    text = '<think>check the map</think>Two calls: <tool_call>{"name":"find","arguments":{"q":"café 😀"}}</tool_call><tool_call>{"name":"open"}</tool_call>'
    tools = [{'type': 'function', 'function': {'name': 'find'}}]
    for n in (1, 3, 7, 16):
        c = make(*[text[i:i + n] for i in range(0, len(text), n)])
        body = c.post(CHAT, json=HELLO | {'tools': tools}).json()
        ChatCompletion.model_validate(body, strict=True)
        r = c.post(CHAT, json=HELLO | {'tools': tools, 'stream': True, 'stream_options': {'include_usage': True}})
        assert r.headers['content-type'].startswith('text/event-stream')
        got, done = events(r.text)
        for e in got: ChatCompletionChunk.model_validate(e, strict=True)
        deltas = [x['delta'] for e in got for x in e['choices']]
        message = body['choices'][0]['message']
        for k in ('content', 'reasoning_content'): assert ''.join(d.get(k) or '' for d in deltas) == message[k] != ''
        parts = [t for d in deltas for t in d.get('tool_calls', [])]
        streamed = [[p for p in parts if p['index'] == i] for i in range(2)]
        args = [json.loads(''.join(p['function']['arguments'] for p in ps)) for ps in streamed]
        assert args == [json.loads(x['function']['arguments']) for x in message['tool_calls']] == [{'q': 'café 😀'}, {}]
        assert [ps[0]['function']['name'] for ps in streamed] == [x['function']['name'] for x in message['tool_calls']] == ['find', 'open']
        assert done and got[-1]['usage'] == body['usage'] and body['choices'][0]['finish_reason'] == 'tool_calls'
        assert body['usage']['completion_tokens_details']['reasoning_tokens'] == len('check the map')
        assert c.engine.chat.seen[0][1] == tools and c.engine.chat.seen[0] == c.engine.chat.seen[1]


def test_calls_are_only_read_when_tools_were_sent(make):
    for more in ({}, {'tools': [{'type': 'function', 'function': {'name': 'f'}}], 'tool_choice': 'none'}):
        c = make('<tool_call>{"name":"f"}</tool_call>')
        assert c.post(CHAT, json=HELLO | more).json()['choices'][0]['message']['content'].startswith('<tool_call>')
        assert c.engine.chat.seen[0][1] is None


def test_a_template_may_open_the_thought(make):
    m = make('hm</think>yes', tail='<think>\n').post(CHAT, json=HELLO).json()['choices'][0]['message']
    assert (m['reasoning_content'], m['content']) == ('hm', 'yes')


def test_parameters_arrive(make):
    c = make('ok')
    c.post(CHAT, json=HELLO | {'speculation': {'disable': True}, 'seed': 5, 'max_completion_tokens': 7, 'logprobs': True, 'top_logprobs': 2,
                               'chat_template_kwargs': {'enable_thinking': False}, 'stop': 'x'})
    p = c.engine.asked[0][1]
    assert (p.speculate, p.seed, p.max_tokens, p.logprobs, p.stop) == (False, 5, 7, 2, ('x',))
    assert c.engine.chat.seen[0][2] == {'enable_thinking': False}


def test_logprobs(make):
    for stream in (False, True):
        r = make('A').post(CHAT, json=HELLO | {'logprobs': True, 'stream': stream, 'top_logprobs': 0})
        found = r.json()['choices'][0]['logprobs'] if not stream else events(r.text)[0][1]['choices'][0]['logprobs']
        assert found == {'content': [{'token': 'A', 'logprob': -.1, 'bytes': [65], 'top_logprobs': []}], 'refusal': None}


def test_an_error_before_the_first_token_has_its_status(make):
    for stream in (False, True):
        c = make(EngineError('The target failed.'))
        assert error(c.post(CHAT, json=HELLO | {'stream': stream}), 500, 'engine_error')['message'].startswith('The target failed. (req_')


def test_an_error_later_is_the_last_event(make):
    got, done = events(make('a', 'b', EngineError('The target failed.')).post(CHAT, json=HELLO | {'stream': True}).text)
    assert not done and got[-1]['error']['code'] == 'engine_error' and sum('error' in e for e in got) == 1
    assert all(x['finish_reason'] is None for e in got[:-1] for x in e['choices'])


@pytest.mark.parametrize('stream', [False, True])
def test_a_fault_of_ours_tells_nothing_but_a_number(make, stream):
    c = make(ValueError('secret'))
    r = c.post(CHAT, json=HELLO | {'stream': stream})
    e = error(r, 500, 'engine_error')
    assert 'secret' not in r.text and 'ValueError' not in r.text and r.headers['x-request-id'] in e['message']


def test_silence_is_filled_with_comments(make, monkeypatch):
    monkeypatch.setattr(feed, 'PING_S', .05)
    wait, go = [threading.Event(), threading.Event()], []
    for w in wait: go.append(threading.Timer(.3 * (len(go) + 1), w.set)); go[-1].start()
    r = make(wait[0], 'a', wait[1], 'b', grace_s=.05).post(CHAT, json=HELLO | {'stream': True})
    blocks = r.text.split('\n\n')
    first = next(i for i, b in enumerate(blocks) if '"role"' in b)  # nothing is claimed before there is a token
    assert blocks[:first] == [': ping'] * first and first >= 2 and ': ping' in blocks[first:] and events(r.text)[1]


def test_an_engine_in_one_long_step_is_bridged_too(make, monkeypatch):
    monkeypatch.setattr(feed, 'PING_S', .05)
    blocks = make(.4, 'a', .4, 'b', grace_s=.05).post(CHAT, json=HELLO | {'stream': True}).text.split('\n\n')
    first = next(i for i, b in enumerate(blocks) if '"role"' in b)
    assert first >= 2 and blocks[first:].count(': ping') >= 2 and events('\n\n'.join(blocks))[1]


def test_what_is_ready_together_leaves_in_one_write(make):
    "One event per step, whatever the writes."
    c = make(*'abcdef')
    async def scenario():
        turn, first = await host.begin(c.host, read_chat(HELLO | {'stream': True}))
        await until(lambda: turn.feed.items and isinstance(turn.feed.items[-1][1], Future))
        return [e async for e in host.events(c.host, turn, first, 'req_1')]
    writes = asyncio.run(scenario())
    got, done = events(''.join(writes))
    assert len(writes) <= 2 and done and [e['choices'][0]['delta'].get('content') for e in got] == ['', *'abcdef', None]


def test_an_error_after_the_grace_is_an_event(make):
    wait = threading.Event()
    threading.Timer(.2, wait.set).start()
    r = make(wait, EngineError('The target failed.'), grace_s=.01).post(CHAT, json=HELLO | {'stream': True})
    got, done = events(r.text)
    assert r.status_code == 200 and not done and got[-1]['error']['message'].startswith('The target failed. (req_')


class Caller:
    "One request by hand: its client can leave at any moment."
    def __init__(self, app, body, path=CHAT):
        self.app, self.body, self.leave, self.sent = app, json.dumps(body).encode(), asyncio.Event(), []
        self.scope = {'type': 'http', 'asgi': {'version': '3.0', 'spec_version': '2.3'}, 'http_version': '1.1', 'method': 'POST', 'scheme': 'http',
                      'path': path, 'raw_path': path.encode(), 'query_string': b'', 'root_path': '', 'client': ('127.0.0.1', 1),
                      'server': ('127.0.0.1', 80), 'headers': [(b'host', b'localhost'), (b'content-type', b'application/json')]}
        self.task = asyncio.ensure_future(app(self.scope, self.receive, self.send))

    async def receive(self):
        if self.body is not None:
            body, self.body = self.body, None
            return {'type': 'http.request', 'body': body}
        await self.leave.wait()
        return {'type': 'http.disconnect'}

    async def send(self, message):
        if not self.leave.is_set(): self.sent.append(message) # as uvicorn does, without a word


async def until(condition):
    async with asyncio.timeout(T):
        while not condition(): await asyncio.sleep(.002)  # noqa: ASYNC110 (another thread changes it)


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('when', ['queued', 'before the first token', 'after some tokens'])
def test_a_client_that_leaves_stops_its_job(make, when, stream):
    never = threading.Event()
    c = make(*(['a', 'b'] if when == 'after some tokens' else []), never)

    async def scenario():
        app = server.make_app(c.host)
        first = [Caller(app, HELLO)] if when == 'queued' else []
        if first: await until(lambda: c.host.jobs)
        caller = Caller(app, HELLO | {'stream': stream})
        await until(lambda: len(c.host.jobs) == len(first) + 1)
        if when == 'after some tokens': await until(lambda: [j.stats.completion_tokens for j in c.host.jobs.values()] == [2])
        caller.leave.set()
        await asyncio.wait_for(caller.task, T)
        await until(lambda: len(c.host.jobs) == len(first))
        assert c.engine.sched.snapshot()['cancelled'] == 1
        for f in first:
            assert not f.task.done()
            f.leave.set()
            await asyncio.wait_for(f.task, T)
        await until(lambda: c.host.jobs == {})
    asyncio.run(scenario())
    c.engine.script = ('ok',)
    assert c.post(CHAT, json=HELLO).json()['choices'][0]['message']['content'] == 'ok'


@pytest.mark.parametrize('stream', [False, True])
def test_a_client_that_leaves_while_its_prompt_is_read_leaves_nothing(make, stream):
    c, go, at = make(threading.Event()), threading.Event(), threading.Event()
    encode = c.engine.chat.encode
    def slowly(*args, **kw):
        at.set()
        assert go.wait(T)
        return encode(*args, **kw)
    c.engine.chat.encode = slowly

    async def scenario():
        caller = Caller(server.make_app(c.host), HELLO | {'stream': stream, 'n': 3})
        await until(at.is_set)
        caller.leave.set()
        await asyncio.wait_for(caller.task, T)                # nobody waits for the prompt
        assert c.engine.asked == []
        go.set()
        await until(lambda: len(c.engine.asked) == 3 and c.host.jobs == {})
        assert c.engine.snapshot()['scheduler']['cancelled'] == 3
    asyncio.run(scenario())


@pytest.mark.parametrize('stream', [False, True])
def test_a_client_that_leaves_between_the_last_token_and_the_end_disturbs_nobody(make, caplog, stream):
    c, at, go = make('<think>hm</think>', 'yes'), threading.Event(), threading.Event()
    letters = c.engine.chat.tokenizer
    encode = letters.encode
    def slowly(text, **kw): # its thoughts are counted at the end
        if text == 'hm':
            at.set()
            assert go.wait(T)
        return encode(text)
    letters.encode = slowly

    async def scenario():
        caller = Caller(server.make_app(c.host), HELLO | {'stream': stream})
        await until(at.is_set)
        caller.leave.set()
        go.set()
        await asyncio.wait_for(caller.task, T)
    asyncio.run(scenario())
    assert c.engine.snapshot()['scheduler']['cancelled'] == 0 and not [r for r in caplog.records if r.levelname == 'ERROR']
    assert c.post(CHAT, json=HELLO).json()['choices'][0]['message']['content'] == 'yes'


def test_a_full_queue_says_when_to_come_back(make):
    never = threading.Event()
    c = make(never, max_queue=2)

    async def scenario():
        app = server.make_app(c.host)
        callers = [Caller(app, HELLO) for _ in range(3)]
        await until(lambda: len(c.host.jobs) == 3)
        late, ready = [Caller(app, HELLO | {'stream': s}) for s in (False, True)], c
        for x in late:
            await asyncio.wait_for(x.task, T)
            assert x.sent[0]['status'] == 429 and int(dict(x.sent[0]['headers'])[b'retry-after']) >= 1
            assert json.loads(x.sent[1]['body'])['error']['code'] == 'queue_full'
        assert len(c.engine.chat.seen) == 3                   # nothing was rendered for those without a place
        assert ready.get('/health/ready').status_code == 503 and ready.get('/health').status_code == 200
        never.set()
        for x in callers: await asyncio.wait_for(x.task, T)
        assert [x.sent[0]['status'] for x in callers] == [200] * 3
    asyncio.run(scenario())
    assert c.host.jobs == {} and c.get('/health/ready').status_code == 200


def test_a_slow_body_is_given_up(make, monkeypatch):
    monkeypatch.setattr(edge, 'BODY_S', .05)

    async def scenario():
        caller = Caller(server.make_app(make('ok').host), HELLO)
        caller.body = None # nothing ever comes
        await asyncio.wait_for(caller.task, T)
        assert caller.sent[0]['status'] == 408 and json.loads(caller.sent[1]['body'])['error']['code'] == 'request_timeout'
    asyncio.run(scenario())


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
def test_a_dead_owner_is_told_at_once(make, monkeypatch):
    def die(): monkeypatch.setattr('mlxspec.scheduler.take', lambda *_: 1 / 0)
    c = make('a', die, 'b')
    got, done = events(c.post(CHAT, json=HELLO | {'stream': True}).text)
    assert not done and got[-1]['error']['code'] == 'engine_stalled'
    for path in ('/health', '/health/ready'): assert c.get(path).status_code == 503
    assert c.get('/health').json()['status'] == 'unavailable' and c.get('/health').json()['error']['code'] == 'engine_stalled'
    assert c.get('/health/live').status_code == 200
    error(c.post(CHAT, json=HELLO), 503, 'engine_stalled')


def test_while_the_model_loads(make):
    c = make()
    c.host.engine = None
    for path in ('/v1/models', '/v1/models/x'): error(c.get(path), 503, 'loading_model')
    r = c.post(CHAT, json=HELLO)
    error(r, 503, 'loading_model')
    assert int(r.headers['retry-after']) >= 1
    assert (c.get('/health').status_code, c.get('/health/live').status_code, c.get('/health/ready').status_code) == (503, 200, 503)
    assert c.get('/v1/internal/mtp-policy').json() == MtpPolicySnapshot.unavailable('worker_not_ready', None).wire()


def test_health_says_what_runs(make):
    c = make('ok')
    c.post(CHAT, json=HELLO)
    h = c.get('/health').json()
    assert h['status'] == 'ok' and h['scheduler']['mode'] == 'serial' and h['scheduler']['active_lane'] == 'plain'
    assert h['observability']['mtp_policy']['reason'] == 'no_mtp_dispatch' and 'schema_version' not in h['observability']['mtp_policy']
    assert 'stand-in' not in c.get('/health/live').text + c.get('/health/ready').text


# --- several choices, completions, tokens

TEXTS = '/v1/completions'


def test_choices_are_asked_with_their_index_and_one_seed(make):
    c = make()
    c.engine.write = lambda prompt, p: (f'{p.index}', ' of', f' {chr(prompt[0])}')
    body = c.post(CHAT, json=HELLO | {'n': 3, 'temperature': 1}).json()
    ChatCompletion.model_validate(body, strict=True)
    assert [(x['index'], x['message']['content']) for x in body['choices']] == [(i, f'{i} of h') for i in range(3)]
    assert body['usage']['prompt_tokens'] == 5 and body['usage']['completion_tokens'] == 9
    seeds = {p.seed for _, p in c.engine.asked}
    assert seeds == {body['metrics']['mlxspec']['seed']} and None not in seeds and [p.index for _, p in c.engine.asked] == [0, 1, 2]
    got, done = events(c.post(CHAT, json=HELLO | {'n': 3, 'stream': True, 'stream_options': {'include_usage': True}}).text)
    for e in got: ChatCompletionChunk.model_validate(e, strict=True)
    said = lambda i: [x for e in got for x in e['choices'] if x['index'] == i]
    for i in range(3):
        assert ''.join(x['delta'].get('content', '') for x in said(i)) == f'{i} of h'
        assert [x['finish_reason'] for x in said(i)] == [None] * (len(said(i)) - 1) + ['stop'] and said(i)[0]['delta']['role'] == 'assistant'
    assert done and got[-1]['usage'] == body['usage'] and c.host.jobs == {}


@pytest.mark.parametrize('stream', [False, True])
def test_one_failed_choice_ends_the_answer(make, stream):
    c = make()
    c.engine.write = lambda prompt, p: ('a', EngineError('The target failed.')) if p.index else ('a', 'b')
    r = c.post(CHAT, json=HELLO | {'n': 3, 'stream': stream})
    if stream:
        got, done = events(r.text)
        assert not done and got[-1]['error']['code'] == 'engine_error' and sum('error' in e for e in got) == 1
    else: error(r, 500, 'engine_error')
    end = time.monotonic() + T
    while c.host.jobs and time.monotonic() < end: time.sleep(.005)
    assert c.host.jobs == {}


def test_several_choices_need_several_places(make):
    c = make('ok', max_queue=3)
    for n, status in ((4, 200), (5, 429), (4, 200)):
        assert c.post(CHAT, json=HELLO | {'n': n}).status_code == status
        c.engine.call(int)                                    # what was cancelled has been looked at
    assert c.host.jobs == {}


def test_prompts_of_completions(make):
    c = make()
    c.engine.write = lambda prompt, p: ('<' + ''.join(map(chr, prompt)), f'{p.index}>')
    r = c.post(TEXTS, json={'prompt': ['ab', [99], 'd'], 'n': 2, 'echo': True})
    Completion.model_validate(r.json(), strict=True)
    assert [x['text'] for x in r.json()['choices']] == ['ab<ab0>', 'ab<ab1>', 'c<c0>', 'c<c1>', 'd<d0>', 'd<d1>']
    assert r.json()['usage']['prompt_tokens'] == 4 and r.json()['id'].startswith('cmpl-')
    got, done = events(c.post(TEXTS, json={'prompt': 'ab', 'stream': True, 'logprobs': 2}).text)
    assert done and ''.join(e['choices'][0]['text'] for e in got) == '<ab0>' and all(e['object'] == 'text_completion' for e in got)
    assert [x for e in got if (lp := e['choices'][0]['logprobs']) for x in lp['text_offset']] == [0, 3]
    assert c.engine.asked[-1][1].max_tokens == 16
    error(c.post(TEXTS, json={'prompt': 'x' * 64}), 400, 'context_length_exceeded', 'prompt')
    error(c.post(TEXTS, json={'prompt': ['x'] * 33}), 400, 'invalid_value', 'prompt')
    error(c.post(TEXTS, json={'messages': []}), 400, 'invalid_value', 'prompt')


def test_tokens_and_back(make):
    c = make(served_name='mine')
    assert c.post('/tokenize', json={'prompt': 'hi', 'return_token_strs': True}).json() == {
        'count': 2, 'max_model_len': 64, 'tokens': [104, 105], 'token_strs': ['h', 'i']}
    assert c.post('/tokenize', json=HELLO).json()['count'] == 5
    assert c.post('/detokenize', json={'tokens': [104, 105], 'model': 'mine'}).json() == {'prompt': 'hi'}
    error(c.post('/detokenize', json={'tokens': [128]}), 400, 'invalid_value', 'tokens[0]')
    error(c.post('/tokenize', json={'prompt': 'hi', 'model': 'x'}), 404, 'model_not_found', 'model')
    for m in c.get('/v1/models').json()['data']: Model.model_validate(m, strict=True)


def test_a_prediction_arrives_and_fields_without_effect_are_named(make):
    c = make('ok')
    r = c.post(CHAT, json=HELLO | {'prediction': {'type': 'content', 'content': [{'type': 'text', 'text': 'o'}, {'type': 'text', 'text': 'k'}]},
                                   'user': 'me', 'x-y': 1})
    assert c.engine.asked[0][1].prediction == 'ok' and r.headers['x-mlxspec-ignored'] == 'user, x-y'
    assert 'x-mlxspec-ignored' not in c.post(CHAT, json=HELLO).headers and r.headers['openai-processing-ms'].isdecimal()


def test_a_large_body_does_not_stop_the_loop(make):
    c = make('ok')
    r = c.post(CHAT, json=HELLO | {'unknown': list(range(200_000))})
    assert r.status_code == 200 and r.headers['x-mlxspec-ignored'] == 'unknown'


lines = st.lists(st.sampled_from(['a', 'é😀', '<think>', '</think>', '<tool_call>', '{"name": "f", "arguments": {"x": 1', '}}', '</tool_call>', '']) |
                 st.just(EngineError('The target failed.')), max_size=8)


@settings(max_examples=30, derandomize=True, deadline=None)
@given(lines, st.integers(1, 3), st.booleans())
def test_every_stream_ends_in_exactly_one_way(script, n, tools):
    engine = StandIn(*script)
    c = TestClient(server.make_app(Host(engine)), base_url='http://127.0.0.1', raise_server_exceptions=False)
    more = {'tools': [{'type': 'function', 'function': {'name': 'f'}}]} if tools else {}
    r = c.post(CHAT, json=HELLO | more | {'n': n, 'stream': True})
    fails = any(isinstance(x, Exception) for x in script)
    if r.status_code == 500: assert fails and r.json()['error']['code'] == 'engine_error'
    else:
        got, done = events(r.text)
        ends = [x['finish_reason'] for e in got for x in e.get('choices', []) if x['finish_reason']]
        errors = [e for e in got if 'error' in e]
        assert done is not fails and (len(ends), len(errors)) == ((0, 1) if fails and n == 1 else (len(ends), 1) if fails else (n, 0))
        assert not errors or got[-1] == errors[0]
    engine.close()


# --- clients that read slowly

async def slow(app, body, read):
    "A caller whose connection takes nothing more after `read` messages."
    caller = Caller(app, body)
    send, blocked = caller.send, asyncio.Event()
    async def stuck(message):
        if len(caller.sent) >= read:
            blocked.set()
            await asyncio.sleep(T)
        await send(message)
    caller.task.cancel()
    caller.task = asyncio.ensure_future(app(caller.scope, caller.receive, stuck))
    await asyncio.wait_for(blocked.wait(), T)
    return caller


def test_a_client_that_stops_reading_is_let_go_after_a_while(make, monkeypatch):
    monkeypatch.setattr(feed, 'SLOW_S', .1)
    c = make('a', threading.Event())
    cut = []
    c.host.hang_up = cut.append

    async def scenario():
        caller = await slow(server.make_app(c.host), HELLO | {'stream': True}, 1)
        await asyncio.wait_for(caller.task, T)
        await until(lambda: c.host.jobs == {})
    asyncio.run(scenario())
    assert c.engine.snapshot()['scheduler']['cancelled'] == 1 and len(cut) == 1 and cut[0].startswith('req_')


def test_what_waits_for_a_client_is_bounded(make, monkeypatch):
    monkeypatch.setattr(feed, 'MAX_UNREAD', 10_000)
    go = threading.Event()
    c = make('a', 'b', 'c', go, *['x' * 100] * 1000, threading.Event())

    async def scenario():
        caller = await slow(server.make_app(c.host), HELLO | {'stream': True, 'max_tokens': 2000}, 2)
        go.set()
        await until(lambda: c.host.jobs == {})                # cancelled, although nothing has timed out
        assert c.engine.snapshot()['scheduler']['cancelled'] == 1
        caller.leave.set()
        caller.task.cancel()
    asyncio.run(scenario())


@contextlib.contextmanager
def over_sockets(host):
    "A real HTTP server for a host, in a thread, and its port."
    sock = serving.listen('127.0.0.1', 0)
    s = serving.Server(server.make_app(host), host, 'error')
    thread = threading.Thread(target=s.run, args=([sock],))
    thread.start()
    try: yield s, sock.getsockname()[1]
    finally:
        s.handle_exit(signal.SIGTERM, None)
        thread.join(T)
        assert not thread.is_alive()


def post(body):
    "The bytes of a request."
    raw = json.dumps(body).encode()
    return b'POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n' % (CHAT.encode(), len(raw)) + raw


def test_streams_end_with_a_word_when_the_server_stops(make, monkeypatch):
    monkeypatch.setattr(serving, 'DRAIN_S', .2)
    c = make('a', threading.Event())
    with over_sockets(c.host) as (s, port):
        conn = http.client.HTTPConnection('127.0.0.1', port, timeout=T)
        conn.request('POST', CHAT, json.dumps(HELLO | {'stream': True}), {'content-type': 'application/json'})
        r = conn.getresponse()
        r.readline()
        s.handle_exit(signal.SIGTERM, None)
        got, done = events('data: {}\n\n' + r.read().decode().partition('\n\n')[2])
        assert not done and got[-1]['error']['code'] == 'server_shutting_down'


def test_a_connection_that_nobody_reads_is_cut(make, monkeypatch, caplog):
    monkeypatch.setattr(feed, 'SLOW_S', .3)
    c = make(*['x' * 100_000] * 200, threading.Event())
    monkeypatch.setattr(feed, 'MAX_UNREAD', 10**9)            # only time counts here
    with over_sockets(c.host) as (s, port), socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(('127.0.0.1', port))
        lazy.sendall(post(HELLO | {'stream': True}))
        end = time.monotonic() + T
        while not c.host.jobs and time.monotonic() < end: time.sleep(.005)
        with socket.create_connection(('127.0.0.1', port), T) as other: # meanwhile others are served
            other.sendall(b'GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n')
            assert b'200 OK' in other.makefile('rb').read()
        while (c.host.jobs or s.server_state.connections) and time.monotonic() < end: time.sleep(.005)
        assert c.host.jobs == {} and not s.server_state.connections
        lazy.settimeout(T)
        got = b''
        with contextlib.suppress(ConnectionError):
            while part := lazy.recv(1 << 20): got += part
        assert not got.endswith(b'0\r\n\r\n') and b'[DONE]' not in got # nobody takes this for a whole answer
        c.engine.script = ('ok',)
        body = json.loads(urllib.request.urlopen(urllib.request.Request(f'http://127.0.0.1:{port}{CHAT}', json.dumps(HELLO).encode(), {
            'content-type': 'application/json'}), timeout=T).read())
        assert body['choices'][0]['message']['content'] == 'ok'
    assert c.engine.snapshot()['scheduler']['cancelled'] == 1 and not [r for r in caplog.records if r.levelname == 'ERROR']


# --- with the real engine, in a process of its own -------------------------------------------------------------------

MLXSPEC = str(Path(sys.executable).with_name('mlxspec'))
COUNT = {'messages': [{'role': 'user', 'content': 'Count from 3 to 12.'}], 'max_tokens': 40, 'seed': 1}


def start(cache, *args):
    "`mlxspec serve` and the URL it prints."
    p = subprocess.Popen([MLXSPEC, 'serve', '--port', '0', *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         env={**os.environ, 'MLXSPEC_BLAS': 'off', 'MLXSPEC_CACHE_DIR': str(cache)})
    line = p.stdout.readline()
    found = re.fullmatch(r'mlxspec serves (.*) at (http://127\.0\.0\.1:\d+)/v1\n', line)
    assert found, (line, p.communicate(timeout=T))
    return p, found[2], found[1]


def stop(p, sig=signal.SIGTERM):
    p.send_signal(sig)
    out, err = p.communicate(timeout=T)
    return p.returncode, out, err


@pytest.fixture(scope='module')
def served(tmp_path_factory):
    p, url, what = start(tmp_path_factory.mktemp('cache'), '--served-model-name', 'mine')
    assert 'demo pair' in what
    yield url
    code, out, err = stop(p)
    assert (code, out, err) == (0, '', '')


@pytest.fixture(scope='module')
def client(served): return openai.OpenAI(base_url=served + '/v1', api_key='none', max_retries=0, timeout=T)


def get(url):
    with urllib.request.urlopen(url, timeout=T) as r: return json.load(r)


def identities(m, completion_tokens):
    m = m['speculative_decoding']
    h = m['acceptance_histogram']
    assert sum(h) == m['num_spec_steps'] and sum(i * n for i, n in enumerate(h)) == m['num_accepted_draft_tokens'] == sum(m['per_step_accepted'])
    assert m['num_accepted_draft_tokens'] <= m['num_draft_tokens'] == sum(m['per_step_drafted'])
    assert m['num_accepted_draft_tokens'] <= completion_tokens


def test_stream_equals_body_and_speculation_changes_nothing(client):
    texts, usages = [], []
    for extra in ({}, {'speculation': {'disable': True}}):
        body = client.chat.completions.create(model='default', **COUNT, extra_body=extra)
        chunks = list(client.chat.completions.create(model='mine', **COUNT, stream=True, stream_options={'include_usage': True}, extra_body=extra))
        streamed = ''.join(c.choices[0].delta.content or '' for c in chunks if c.choices)
        texts += [body.choices[0].message.content, streamed]
        usages += [body.usage, chunks[-1].usage]
        for m in (body.model_extra, chunks[-1].model_extra):
            identities(m['metrics'], body.usage.completion_tokens)
            assert m['metrics']['mlxspec']['seed'] == 1
            assert not extra or m['metrics']['speculative_decoding']['num_draft_tokens'] == m['timings']['draft_n'] == 0
    counts = [(u.prompt_tokens, u.completion_tokens, u.total_tokens, u.completion_tokens_details) for u in usages] # not what came from the cache
    assert len(set(texts)) == 1 and all(c == counts[0] for c in counts) and usages[0].completion_tokens > 0


def test_the_stream_helper_of_the_openai_package_works(client):
    with client.chat.completions.stream(model='default', **COUNT) as stream: final = stream.get_final_completion()
    assert final.choices[0].message.content == client.chat.completions.create(model='default', **COUNT).choices[0].message.content


def test_seeds_count(client):
    say = lambda **kw: client.chat.completions.create(model='default', **COUNT | kw, temperature=1).choices[0].message.content
    assert say(seed=7) == say(seed=7) == say(seed=7, extra_body={'speculation': {'disable': True}})


def test_choices_are_independent_and_the_first_is_the_answer_to_one(client):
    ask = lambda **kw: client.chat.completions.create(model='default', **COUNT | dict(messages=[dict(role='user', content='Write a short story about a fox.')], seed=3,
                                                      temperature=1, max_tokens=24) | kw)
    three, one = ask(n=3), ask()
    say = lambda m: (m.model_extra.get('reasoning_content') or '') + (m.content or '')
    texts = [say(c.message) for c in three.choices]
    assert texts[0] == say(one.choices[0].message) and len(set(texts)) > 1
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    identities(three.model_extra['metrics'], three.usage.completion_tokens)
    got = {}
    for chunk in ask(n=3, stream=True):
        for c in chunk.choices: got[c.index] = got.get(c.index, '') + say(c.delta)
    assert [got[i] for i in range(3)] == texts


def test_a_prediction_changes_the_account_and_nothing_else(tmp_path):
    from mlxspec.engine import Engine
    from mlxspec.tiny import save_tiny
    with Engine.load(save_tiny(tmp_path / 'tiny', 'qwen3'), 'lookup', settings=load_settings({}, {}, []), cache_dir=tmp_path) as engine:
        c = TestClient(server.make_app(Host(engine, make_params=engine.settings.params)), base_url='http://127.0.0.1')
        letters = {str(i): 100 for i in c.post('/tokenize', json=dict(prompt='abcdefgh', add_special_tokens=False)).json()['tokens']}
        ask = lambda **kw: c.post(TEXTS, json=dict(prompt='ab cd', max_tokens=40, ignore_eos=True, temperature=1, seed=2, logit_bias=letters) | kw).json()
        details = lambda r: [r['usage']['completion_tokens_details'][f'{k}_prediction_tokens'] for k in ('accepted', 'rejected')]
        plain = ask()
        text = plain['choices'][0]['text']
        assert details(plain) == [0, 0]
        for guess, right in ((text, True), (text[:20] + 'zz' + text[20:], True), ('zzzzz zzz', False), ([dict(type='text', text=text)], True)):
            r = ask(prediction=dict(type='content', content=guess))
            assert r['choices'] == plain['choices'] and r['usage']['completion_tokens'] == 40
            identities(r['metrics'], 40)
            accepted, rejected = details(r)
            by = r['metrics']['mlxspec']['drafters'].get('prediction', dict(drafted=0, accepted=0))
            assert (accepted, accepted + rejected) == (by['accepted'], by['drafted']) and (accepted > 0) >= right
        n = ask(n=2, prediction=dict(type='content', content=text))
        assert n['choices'][0]['text'] == text != n['choices'][1]['text'] and n['usage']['completion_tokens'] == 80


def test_a_prompt_is_scored_as_if_it_had_been_said(tmp_path):
    "`echo` with `logprobs`, as programs that evaluate models send it: what an answer's tokens had as log-probabilities, they have as a prompt."
    from mlxspec.engine import Engine
    from mlxspec.tiny import save_tiny
    with Engine.load(save_tiny(tmp_path / 'tiny', 'qwen3'), 'lookup', settings=load_settings({}, {}, []), cache_dir=tmp_path) as engine:
        c = TestClient(server.make_app(Host(engine, make_params=engine.settings.params)), base_url='http://127.0.0.1')
        decode, ids = engine.chat.tokenizer.decode, engine.encode('ab cd ab')
        said = engine.generate(ids, max_tokens=12, ignore_eos=True, logprobs=2).tokens
        full = ids + [t.id for t in said]
        ask = lambda **kw: c.post(TEXTS, json=dict(prompt=full, max_tokens=1, ignore_eos=True, echo=True, logprobs=2, seed=1) | kw)
        choice = ask().json()['choices'][0]
        lp, n = choice['logprobs'], len(full)
        assert choice['text'].startswith(decode(full)) and lp['token_logprobs'][0] is lp['top_logprobs'][0] is None
        assert {len(v) for v in lp.values()} == {n + 1} and lp['tokens'] == [decode([t]) for t in full] + lp['tokens'][-1:]
        for got, top, t in zip(lp['token_logprobs'][len(ids):-1], lp['top_logprobs'][len(ids):-1], said, strict=True):
            assert abs(got - t.logprob) < 1e-3 and max(top.values()) == got # they were said greedily
        assert lp['text_offset'] == sorted(lp['text_offset']) and lp['text_offset'][-1] == len(decode(full))
        got, done = events(ask(stream=True).text)
        parts = [e['choices'][0]['logprobs'] for e in got if e['choices'] and e['choices'][0]['logprobs']]
        assert done and {k: sum((p[k] for p in parts), []) for k in lp} == lp and ''.join(e['choices'][0]['text'] for e in got) == choice['text']
        both = ask(prompt=[full, ids], n=2, speculation={'disable': True}).json()['choices']
        assert [x['logprobs']['token_logprobs'][1] for x in both] == [lp['token_logprobs'][1]] * 4 and both[0] == choice
        error(ask(prompt=[1] * 600), 400, 'context_length_exceeded', 'prompt')
        for wrong in ([10**12], [-1], [1, 264], [[1], [2**62]]):
            for more in ({}, {'logprobs': None}, {'stream': True}): error(ask(prompt=wrong, **more), 400, 'invalid_value', 'prompt')
        assert ask().json()['choices'] == [choice]


def test_completions_of_the_real_model(client):
    r = client.completions.create(model='mine', prompt=['One, two,', 'Monday,'], max_tokens=8, logprobs=3, echo=False, stop='zzz')
    assert [c.index for c in r.choices] == [0, 1] and all(c.finish_reason in ('stop', 'length') for c in r.choices)
    for c in r.choices:
        lp = c.logprobs
        assert len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset) > 0
        assert all(t in top and top[t] == v for t, v, top in zip(lp.tokens, lp.token_logprobs, lp.top_logprobs, strict=True))
        assert lp.text_offset == sorted(lp.text_offset) and lp.text_offset[0] == 0
    chunks = list(client.completions.create(model='mine', prompt='One, two,', max_tokens=8, stream=True, echo=True))
    assert ''.join(c.choices[0].text for c in chunks if c.choices) == 'One, two,' + r.choices[0].text


def test_tokens_of_the_real_model(served):
    ask = lambda path, body: json.load(urllib.request.urlopen(urllib.request.Request(served + path, json.dumps(body).encode(), {
        'content-type': 'application/json'}), timeout=T))
    t = ask('/tokenize', {'prompt': 'Zwölf 😀', 'return_token_strs': True})
    assert t['count'] == len(t['tokens']) == len(t['token_strs']) and ask('/detokenize', {'tokens': t['tokens']}) == {'prompt': 'Zwölf 😀'}
    assert ask('/tokenize', {'messages': COUNT['messages']})['count'] > t['count'] / 2


def test_logprobs_of_the_real_model(client):
    c = client.chat.completions.create(model='default', **COUNT | {'max_tokens': 5}, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(c) == 5 and all(len(t.top_logprobs) == 3 and t.logprob <= 0 and t.top_logprobs[0].logprob >= t.logprob for t in c)


def test_errors_reach_openai_clients_with_their_text(client):
    with pytest.raises(openai.NotFoundError, match='There is no model'): client.chat.completions.create(model='gpt-4', **COUNT)
    with pytest.raises(openai.BadRequestError, match='temperature') as e: client.chat.completions.create(model='default', temperature=9, **COUNT)
    assert (e.value.param, e.value.code, e.value.type) == ('temperature', 'invalid_value', 'invalid_request_error') and e.value.request_id
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model='default', messages=[{'role': 'user', 'content': 'word ' * 5000}])
    assert e.value.code == 'context_length_exceeded'


def test_metrics_of_the_real_model_add_up(served, client):
    body = client.chat.completions.create(model='default', **COUNT)
    with urllib.request.urlopen(served + '/metrics', timeout=T) as r: families = list(text_string_to_metric_families(r.read().decode()))
    samples = [x for f in families for x in f.samples]
    of = lambda name: {tuple(x.labels.values()): x.value for x in samples if x.name == f'mlxspec:{name}'}
    drafted, accepted = (of(f'spec_decode_num_{w}_tokens_total') for w in ('draft', 'accepted'))
    places = [v for _, v in sorted(of('spec_decode_num_accepted_tokens_per_pos_total').items(), key=lambda x: int(x[0][0]))]
    assert set(accepted) == set(drafted) and all(accepted[k] <= drafted[k] for k in drafted)
    assert sum(accepted.values()) == sum(places) > 0 and places == sorted(places, reverse=True)
    assert all(of('spec_decode_num_drafts_total')[k] <= drafted[k] for k in drafted)
    assert sum(of('generation_tokens_total').values()) >= body.usage.completion_tokens and of('mlx_active_memory_bytes')[()] > 0
    answered = sum(of('request_success_total').values())
    assert answered == of('time_to_first_token_seconds_count')[()] - sum(of('request_cancelled_total').get((s,), 0) for s in ('prefill', 'decode')) > 0
    assert {x.labels['phase'] for x in samples if x.name == 'mlxspec:spec_step_seconds_count'} == {'draft', 'verify', 'commit'}
    for f in families:
        for x in f.samples:
            if x.name.endswith('_bucket') and x.labels['le'] == '+Inf':
                assert x.value == next(y.value for y in f.samples if y.name == x.name.replace('_bucket', '_count') and y.labels.items() <= x.labels.items())


WORDS = [*re.findall("return f?'(.+)'", inspect.getsource(budget.why)), *re.findall("why = f'(.+)'", inspect.getsource(gate))] # of both gates


@pytest.mark.parametrize('reason', [*WORDS, None])
def test_transitions_have_reasons_from_a_closed_set(reason):
    assert len(WORDS) == len(CAUSES) and len({cause(w) for w in WORDS}) == len(CAUSES)
    ledger, stats, done = Ledger(), RequestStats(), Future()
    ledger.open()
    entry = ledger.open()
    entry.stats = stats
    stats.choice.switches.append({'at': 1, 'from': 'mtp 4', 'to': 'plain 1', 'reason': reason or 'a new gate has moods'})
    done.set_result(None)
    entry.end(done)
    (x,) = [x for f in text_string_to_metric_families(ledger.text().decode()) for x in f.samples if x.name.endswith('spec_gate_transitions_total')]
    assert set(x.labels) == {'from', 'to', 'reason'} and (x.labels['from'], x.labels['to']) == ('mtp', 'plain')
    assert (x.labels['reason'] in CAUSES) is (reason is not None)


def test_health_policy_models(served, client):
    h = get(served + '/health')
    assert h['status'] == 'ok' and set(h['scheduler']) >= {'mode', 'active_lane', 'batch_histogram'} and h['scheduler']['owner']['alive']
    p = get(served + '/v1/internal/mtp-policy')
    assert set(p) == set(MtpPolicySnapshot.unavailable('worker_not_ready', None).wire()) and p['state'] in STATES
    assert p['reason'] != 'worker_not_ready' and h['observability']['mtp_policy']['gpu_vendor'] == p['gpu_vendor']
    assert [m.id for m in client.models.list()] == ['mine', 'mlxspec-demo']


@pytest.mark.parametrize('stream', [True, False])
def test_a_client_that_hangs_up_frees_its_place(served, stream):
    before = get(served + '/health')['scheduler']['cancelled']
    body = json.dumps(COUNT | {'max_tokens': 3000, 'ignore_eos': True, 'stream': stream}).encode()
    host, port = served.removeprefix('http://').split(':')
    with socket.create_connection((host, int(port)), T) as s:
        s.sendall(b'POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n' % (CHAT.encode(), len(body)) + body)
        if stream: s.recv(200)
        else:
            while not get(served + '/health')['scheduler']['running']: time.sleep(.01)
    end = time.monotonic() + T
    while (now := get(served + '/health')['scheduler'])['running'] and time.monotonic() < end: time.sleep(.01)
    assert not now['running'] and now['cancelled'] == before + 1


def test_requests_of_many_clients_keep_their_own_answers(served, client):
    alone = {n: client.chat.completions.create(model='default', **COUNT | {'messages': [{'role': 'user', 'content': f'Count from {n} to 20.'}]}) for n in range(4)}
    got = {}

    def ask(i, n):
        got[i] = client.chat.completions.create(model='default', **COUNT | {'messages': [{'role': 'user', 'content': f'Count from {n} to 20.'}]})
    threads = [threading.Thread(target=ask, args=(i, i % 4)) for i in range(8)]
    for t in threads: t.start()
    for t in threads: t.join(T)
    assert all(got[i].choices[0].message.content == alone[i % 4].choices[0].message.content for i in range(8))


@pytest.mark.parametrize('sig', [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_cleanly_and_the_port_is_free(sig, tmp_path):
    p, url, _ = start(tmp_path)
    port = int(url.rpartition(':')[2])
    assert get(url + '/health/ready') == {'status': 'ok'}
    assert stop(p, sig) == (0, '', '')
    serving.listen('127.0.0.1', port).close()


def refused(*args, code):
    done = subprocess.run([MLXSPEC, 'serve', *args], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, '') and done.stderr.startswith('mlxspec: ') and done.stderr.count('\n') == 1, done
    return done.stderr


def test_what_cannot_be_served_is_refused(tmp_path):
    with socket.create_server(('127.0.0.1', 0)) as s:
        assert str(s.getsockname()[1]) in refused('--port', str(s.getsockname()[1]), code=3)
    assert './gone' in refused('--model', './gone', code=2)
    assert 'not an address' in refused('--host', 'no such name', code=2)
    (tmp_path / 'empty').mkdir()
    assert 'config.json' in refused('--model', str(tmp_path / 'empty'), code=2)
    (tmp_path / 'empty' / 'config.json').write_text('{')
    assert 'config.json' in refused('--model', str(tmp_path / 'empty'), code=2)
    (tmp_path / 'empty' / 'config.json').write_text('{"model_type": "llama"}')
    assert 'empty' in refused('--port', '0', '--model', str(tmp_path / 'empty'), code=2) # found while loading


