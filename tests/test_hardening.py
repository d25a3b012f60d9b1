"The server against broken and hostile clients: raw sockets to a real process around an obedient engine (tools/obedient.py)."
import contextlib
import http.client
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

OBEDIENT = Path(__file__).parent.parent/'tools'/'obedient.py'
T = 30  # seconds after which a wait counts as a hang
KEY = 'kéy-for-tests'
CHAT, TEXTS = '/v1/chat/completions', '/v1/completions'
BEARER = 'Bearer ' + KEY.encode().decode('latin-1')
SECRET = 'Dear-Ms-Smith'


def chat(text='hello', **more): return dict(messages=[dict(role='user', content=text)], seed=7) | more


def start(*args, **env):
    "A server in a process of its own, and its port."
    keep = {k: v for k, v in os.environ.items() if not k.startswith('MLXSPEC_')}
    p = subprocess.Popen([sys.executable, str(OBEDIENT), '--hurry', '--port', '0', *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         text=True, env=keep | env)
    line = p.stdout.readline()
    found = re.search(r':(\d+)/v1$', line)
    assert found, (line, p.communicate(timeout=T))
    return p, int(found[1])


def end(p, sig=signal.SIGTERM):
    p.send_signal(sig)
    out, err = p.communicate(timeout=T)
    return p.returncode, out, err


class Caller:
    "What tests do to one server."
    def __init__(self, port, key=BEARER): self.port, self.key = port, key
    def connect(self): return socket.create_connection(('127.0.0.1', self.port), T)

    def talk(self, raw, finish=True):
        "Send bytes, and read all that comes until the server closes."
        with self.connect() as s:
            s.settimeout(T)
            s.sendall(raw)
            if finish: s.shutdown(socket.SHUT_WR)
            got = b''
            try:
                while part := s.recv(1 << 20): got += part
            except ConnectionError: pass
            return got

    def head(self, method, path, headers):
        pairs = {'host': 'localhost', 'authorization': self.key, 'connection': 'close', **headers}
        lines = [f'{method} {path} HTTP/1.1', *(f'{k}: {v}' for k, v in pairs.items() if v is not None), '', '']
        return '\r\n'.join(lines).encode('latin-1')

    def ask(self, method='POST', path=CHAT, body=None, **headers): # -> status, headers, body
        "One request over a socket of its own."
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sized = {} if raw is None or 'transfer-encoding' in headers else {'content-length': str(len(raw))}
        typed = {} if raw is None else {'content-type': 'application/json'}
        return parsed(self.talk(self.head(method, path, typed | sized | headers) + (raw or b''), False))

    def good(self): # the choices
        status, _, body = self.ask(body=chat())
        assert status == 200, body
        return json.dumps(json.loads(body)['choices'])


def parsed(got):
    "The response in some bytes."
    head, _, body = got.partition(b'\r\n\r\n')
    status, *lines = head.decode('latin-1').split('\r\n')
    headers = {k.lower(): v for k, _, v in (x.partition(': ') for x in lines)}
    if headers.get('transfer-encoding') == 'chunked':
        body = b''.join(re.findall(rb'[0-9a-f]+\r\n((?:(?!\r\n[0-9a-f]+\r\n).)*)\r\n', body, re.S))
    return int(status.split()[1]), headers, body


def is_error(answer, status, code, param=...):
    "An error body in OpenAI's shape, and nothing that tells of the inside."
    got, headers, body = answer
    assert got == status, answer
    e = json.loads(body)['error']
    assert set(e) == {'message', 'type', 'param', 'code'} and e['message'] and e['code'] == code, e
    assert param is ... or e['param'] == param, e
    assert not re.search(rb'Traceback|Error\(|/mlxspec/|site-packages|' + SECRET.encode(), body)
    return headers


@pytest.fixture(scope='module')
def server():
    p, port = start('--log-level', 'debug', '--allow-origin', 'https://my.page', '--max-body', '200000', MLXSPEC_API_KEY=KEY)
    c = Caller(port)
    c.p, c.first = p, c.good()
    yield c
    code, out, err = end(p)
    assert (code, out) == (0, '') and SECRET not in err and KEY not in err, err


@pytest.fixture
def c(server):
    "The server, which answers afterwards what it answered at first, to the byte."
    yield server
    assert server.good() == server.first


# --- the ten faults of the stock stack

@pytest.mark.parametrize('value', ['NaN', '1e999', '-Infinity'])
def test_1_numbers_that_are_none(c, value):
    raw = json.dumps(chat(temperature=0)).replace('"temperature": 0', f'"temperature": {value}').encode()
    is_error(c.ask(body=raw), 400, 'invalid_value', 'temperature')


def test_2_half_a_character(c):
    for stream in (False, True):
        is_error(c.ask(body=chat('a\ud800', stream=stream)), 400, 'invalid_value', 'messages[0].content')


@pytest.mark.parametrize(('field', 'value'), [('max_tokens', True), ('max_tokens', '5'), ('max_tokens', 1.5), ('temperature', True), ('seed', 2**70)])
def test_3_types_are_strict(c, field, value): is_field_error(c.ask(body=chat(**{field: value})), field)


def is_field_error(answer, field): is_error(answer, 400, json.loads(answer[2])['error']['code'], field)


def test_4_every_error_has_one_shape(c):
    headers = is_error(c.ask('GET', '/nowhere'), 404, 'unknown_url')
    assert headers['x-request-id'].startswith('req_')
    assert 'POST' in is_error(c.ask('GET', CHAT), 405, 'method_not_allowed')['allow']
    is_error(c.ask(body=b'{}'), 400, 'invalid_value', 'messages')
    is_error(c.ask(body=b'x' * 200_001), 413, 'request_too_large')
    is_error(c.ask(body=b'4e20\r\n' + b' ' * 20_000 + b'\r\n', **{'transfer-encoding': 'chunked'}), 408, 'request_timeout')
    big = b''.join(b'4e20\r\n' + b' ' * 20_000 + b'\r\n' for _ in range(11))
    is_error(c.ask(body=big, **{'transfer-encoding': 'chunked'}), 413, 'request_too_large')
    is_error(c.ask(body=chat(), **{'content-type': 'text/plain'}), 415, 'unsupported_media_type')
    is_error(parsed(c.talk(b'SSH-2.0-hello\r\n\r\n')), 400, 'invalid_value')
    is_error(parsed(c.talk(c.head('POST', CHAT, {'content-length': '3', 'transfer-encoding': 'chunked'}) + b'abc')), 400, 'invalid_value')


def test_5_stalled_heads_and_bodies(c):
    is_error(parsed(c.talk(b'POST /v1/chat/completions HTTP/1.1\r\nHost: loc', False)), 408, 'request_timeout')
    assert c.talk(b'', False) == b''
    is_error(parsed(c.talk(c.head('POST', CHAT, {'content-type': 'application/json', 'content-length': '100'}) + b'{"a"', False)), 408, 'request_timeout')
    c.talk(c.head('POST', CHAT, {'content-type': 'application/json', 'content-length': '100'}) + b'{"a"')  # half closed: no more will come
    early = c.head('POST', '/nowhere', {'content-length': '100', 'connection': 'keep-alive'}) + b'{"a"'    # answered before it was read
    is_error(parsed(c.talk(early, False)), 404, 'unknown_url')


def test_6_long_heads(c):
    is_error(c.ask('GET', '/health', cookie='x' * 100_000), 431, 'headers_too_large')
    is_error(c.ask('GET', '/health', **{f'x-{i}': '1' for i in range(10_000)}), 431, 'headers_too_large')
    is_error(c.ask('GET', '/health', **{f'x-{i}': '1' for i in range(300)}), 431, 'headers_too_large')


def test_7_names_of_others(c):
    for name in ('evil.example', 'localhost.evil.example', '127.0.0.1.', ''):
        is_error(c.ask('GET', '/health', host=name), 421, 'host_not_allowed')
    is_error(parsed(c.talk(b'GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n')), 421, 'host_not_allowed')
    assert c.ask('GET', '/health', host='[::1]:80')[0] == 200


def test_8_errors_of_streams(c):
    is_error(c.ask(body=chat('fail', stream=True)), 500, 'engine_error')
    status, _, body = c.ask(body=chat(f'fail later {SECRET}', stream=True))
    events = re.findall(r'data: (.*)', body.decode())
    assert status == 200 and '[DONE]' not in events and json.loads(events[-1])['error']['code'] == 'engine_error' and SECRET not in events[-1]
    assert sum('"error"' in e for e in events) == 1


def test_10_slashes_and_pages(c):
    for path in (CHAT + '/', '//v1/chat/completions', '/v1/v1/chat/completions', '/chat/completions'):
        got = c.ask(path=path, body=chat())
        is_error(got, 404, 'unknown_url')
        assert b'base_url must end in /v1' in got[2] and path.encode() in got[2]
    for path in ('/docs', '/redoc', '/openapi.json'): is_error(c.ask('GET', path), 404, 'unknown_url')


# --- bad requests, row by row

DEEP = b'{"messages":[{"role":"user","content":"a"}],"x":' + b'[' * 5000 + b']' * 5000 + b'}'
USER = dict(role='user', content='a')
NESTED = {}
for _ in range(65): NESTED = dict(type='object', properties=dict(a=NESTED))
DEEPER = NESTED
for _ in range(135): DEEPER = dict(type='object', properties=dict(a=DEEPER))
SCHEMAS = dict(number=3, loop={'$ref': '#'}, lookahead=dict(type='string', pattern='(?=a)b'), consts=dict(enum=list(range(20_000))), fine=dict(type='object'))
REGEXES = '(a+)+b', '(a*)*b', '(.*a){25}', '((a{1,9}){1,9}){1,9}'
TOOL = [dict(type='function', function=dict(name='f', parameters=NESTED))]
ROWS = [
    *((f'1 {b[:8]!r}', b, 'invalid_json', None) for b in (b'', b'{bad', b'[]', b'null', b'{} {}', b'\x00')),
    *((f'2 {b[:8]!r}', b, 'invalid_json', None) for b in (b'"\xff"', b'{"a":"\xff"}', '{}'.encode('utf-16'))),
    ('4 nested', b'[' * 100_000, 'invalid_json', None), ('4 unknown', DEEP, 'invalid_json', None),
    ('4 schema', chat(tools=TOOL), 'invalid_value', 'tools[0].function'),
    ('9 none', dict(messages=[]), 'invalid_value', 'messages'), ('9 role', dict(messages=[dict(role='cook', content='a')]), 'invalid_value', 'messages[0].role'),
    ('9 content', dict(messages=[dict(role='user')]), 'invalid_value', 'messages[0].content'),
    ('9 image', dict(messages=[USER, USER, dict(role='user', content=[dict(type='image_url')])]), 'unsupported_parameter', 'messages[2].content[0]'),
    ('12 audio', chat(audio={}), 'unsupported_parameter', 'audio'), ('12 n', chat(n=9), 'unsupported_parameter', 'n'),
    ('12 store', chat(store=True), 'unsupported_parameter', 'store'),
    ('13 context', chat('x' * 4096), 'context_length_exceeded', 'messages'), ('13 more', chat('x' * 4097), 'context_length_exceeded', 'messages'),
    ('14 0', chat(max_tokens=0), 'invalid_value', 'max_tokens'), ('14 -1', chat(max_tokens=-1), 'invalid_value', 'max_tokens'),
    ('16 empty', chat(stop=''), 'invalid_value', ...), ('16 [empty]', chat(stop=['']), 'invalid_value', 'stop[0]'),
    ('16 17', chat(stop=['x'] * 17), 'invalid_value', 'stop'), ('16 long', chat(stop='x' * 90_000), 'invalid_value', ...),
    ('17 key', chat(logit_bias=dict(abc=1)), 'invalid_value', ...), ('17 vocab', chat(logit_bias={str(0x110000): 1}), 'invalid_value', ...),
    ('17 -5', chat(logit_bias={'-5': 1}), 'invalid_value', ...), ('17 101', chat(logit_bias={'5': 101}), 'invalid_value', ...),
    ('17 many', chat(logit_bias={str(i): 1 for i in range(1025)}), 'invalid_value', 'logit_bias'),
    ('18 21', chat(logprobs=True, top_logprobs=21), 'invalid_value', 'top_logprobs'), ('18 alone', chat(top_logprobs=2), 'invalid_value', 'top_logprobs'),
    *((f'20 {n}', chat(response_format=dict(type='json_schema', json_schema=dict(name='a', schema=x))), 'unsupported_parameter', 'response_format')
      for n, x in SCHEMAS.items()),
    ('20 deep', chat(response_format=dict(type='json_schema', json_schema=dict(name='a', schema=DEEPER))), 'invalid_value', ...),
    *((f'21 {f} {x}', chat(**{f: x}), 'unsupported_parameter', f) for f in ('guided_regex', 'regex') for x in REGEXES),
    ('21 structured', chat(structured_outputs=dict(regex=REGEXES[0])), 'unsupported_parameter', 'structured_outputs'),
    ('21 grammar', chat(guided_grammar='root ::= root'), 'unsupported_parameter', 'guided_grammar'),
    ('21 tool_choice', chat(tools=TOOL[:0], tool_choice='required'), 'unsupported_parameter', 'tool_choice'),
    ('24 kwargs', chat(chat_template_kwargs=dict(tokenize=True)), 'invalid_value', 'chat_template_kwargs.tokenize'),
    ('24 long', chat(chat_template_kwargs=dict(x='y' * 90_000)), 'invalid_value', ...)]
TEXT_ROWS = [('26 list', dict(prompt=['a'] * 10_000), ..., 'prompt'), ('26 vocab', dict(prompt=[0x110000]), 'invalid_value', 'prompt'),
             ('26 negative', dict(prompt=[-1]), 'invalid_value', ...)]


@pytest.mark.parametrize(('name', 'path', 'body', 'code', 'param'), [(n, CHAT, *r) for n, *r in ROWS] + [(n, TEXTS, *r) for n, *r in TEXT_ROWS],
                         ids=[r[0] for r in ROWS + TEXT_ROWS])
def test_bad_requests(c, name, path, body, code, param):
    got = c.ask(path=path, body=body)
    is_error(got, 400, json.loads(got[2])['error']['code'] if code is ... else code, param)


@pytest.mark.parametrize('more', [dict(max_tokens=1.0), dict(max_tokens=10**12), dict(temperature=0), dict(frequency_penalty=1)])
def test_6_numbers_that_are_fine(c, more): assert c.ask(body=chat(**more))[0] == 200


def test_8_odd_characters_come_back(c):
    text = '\0 \ufffe 😀é'
    for stream in (False, True):
        status, _, body = c.ask(body=chat(text, stream=stream))
        assert status == 200
        if not stream: assert json.loads(body)['choices'][0]['message']['content'] == text + '7.'
        else: assert ''.join(x['delta'].get('content') or '' for e in re.findall(r'data: (\{.*)', body.decode()) for x in json.loads(e)['choices']) == text + '7.'


def test_10_models(c):
    got = c.ask(body=chat(model='gpt-5'))
    is_error(got, 404, 'model_not_found', 'model')
    assert b'stand-in' in got[2]


def kilobytes(c): return int(re.search(r'VmRSS:\s+(\d+)', Path(f'/proc/{c.p.pid}/status').read_text())[1])


@pytest.mark.skipif(not Path('/proc/self/status').exists(), reason='reads memory from /proc')
def test_22_many_schemas_leave_nothing(c):
    "A thousand distinct schemas, in small bodies on one connection, take no memory."
    conn = http.client.HTTPConnection('127.0.0.1', c.port, timeout=T)
    def send(first, n):
        for i in range(first, first + n):
            schema = dict(name=f'n{i}', schema=dict(const=f'{i}' * 50))
            raw = json.dumps(chat(response_format=dict(type='json_schema', json_schema=schema)))
            conn.request('POST', CHAT, raw, {'content-type': 'application/json', 'authorization': c.key})
            r = conn.getresponse()
            assert r.status == 400 and b'response_format' in r.read()
    send(0, 200)
    before = kilobytes(c)
    send(200, 1000)
    assert kilobytes(c) - before < 4096


def test_13_the_last_place_of_the_context(c):
    choice = json.loads(c.ask(body=chat('x' * 4095, max_tokens=1))[2])['choices'][0]
    assert choice['finish_reason'] == 'length'


def test_14_without_max_tokens_the_end_is_the_engines(c):
    body = json.loads(c.ask(body=chat('stream 600 0'))[2])
    assert (body['choices'][0]['finish_reason'], body['usage']['completion_tokens']) == ('stop', 600)


def test_25_predictions_change_no_text(c):
    for text in ('', 'x' * 5000, 'hello7.', 'something else'):
        choices = json.loads(c.ask(body=chat(prediction=dict(type='content', content=text)))[2])['choices']
        assert json.dumps(choices) == c.first


KEYS = [('none', {}), ('wrong', {'authorization': 'Bearer nope'}), ('bare', {'authorization': BEARER[7:]}), ('other', {'authorization': 'Bearer \xe9'}),
        ('long', {'authorization': 'Bearer ' + 'x' * 2**20}), ('empty', {'authorization': 'Bearer '}), ('x', {'x-api-key': 'nope'})]


@pytest.mark.parametrize(('name', 'headers'), KEYS, ids=[k for k, _ in KEYS])
def test_29_wrong_keys(c, name, headers):
    for method, path, body in (('POST', CHAT, chat()), ('GET', '/metrics', None), ('GET', '/v1/models', None), ('GET', '/v1/internal/mtp-policy', None)):
        got = c.ask(method, path, body, **{'authorization': None, **headers})
        if name == 'long' and got[0] == 431: continue # cut off before it was a head
        assert is_error(got, 401, 'invalid_api_key')['www-authenticate'] == 'Bearer'
        assert got[2] == c.ask('GET', '/metrics', authorization='Bearer x')[2] # whatever is wrong, the same is said


def test_29_right_keys(c):
    for headers in ({'authorization': 'bearer ' + BEARER[7:]},
                    {'authorization': None, 'x-api-key': BEARER[7:]}):
        assert c.ask('GET', '/v1/models', **headers)[0] == 200


def test_29_health_without_the_key_says_one_word(c):
    assert json.loads(c.ask('GET', '/health', authorization=None)[2]) == {'status': 'ok'}
    assert 'scheduler' in json.loads(c.ask('GET', '/health')[2])
    for path in ('/health/live', '/health/ready'): assert json.loads(c.ask('GET', path, authorization=None)[2]) == {'status': 'ok'}


def test_30_pages(c):
    page = 'https://my.page'
    for origin in ('https://evil.example', 'null', 'http://localhost:3000'):
        is_error(c.ask(body=chat(), origin=origin), 403, 'origin_not_allowed')
        is_error(c.ask('OPTIONS', origin=origin, **{'access-control-request-method': 'POST'}), 403, 'origin_not_allowed')
    status, headers, _ = c.ask('OPTIONS', origin=page, authorization=None, **{'access-control-request-method': 'POST'})
    assert status == 204 and headers['access-control-allow-origin'] == page
    assert c.ask(body=chat(), origin=page)[1]['access-control-allow-origin'] == page
    assert not any(k.startswith('access-control') for k in c.ask(body=chat())[1])
    assert c.ask(body=chat(), origin=f'http://localhost:{c.port}', host=f'localhost:{c.port}')[0] == 200 # a page of ours


# --- clients that leave, or do not read; engines that fail

def waiting(c): return json.loads(c.ask('GET', '/health')[2])['scheduler']


def until(condition):
    last = time.monotonic() + T
    while not condition():
        assert time.monotonic() < last
        time.sleep(.02)


def test_33_clients_that_leave(c):
    before = waiting(c)['cancelled']
    long = chat('stream 100000 2', stream=True, max_tokens=10**6)
    calls = [c.connect() for _ in range(3)]
    for s in calls: s.sendall(c.head('POST', CHAT, {'content-type': 'application/json', 'content-length': str(len(json.dumps(long)))}) + json.dumps(long).encode())
    assert b'200' in calls[0].recv(100)
    for s in reversed(calls): s.close() # two that wait, and one that reads
    until(lambda: waiting(c)['cancelled'] == before + 3 and not waiting(c)['running'])


def test_34_a_client_that_does_not_read(c):
    before = waiting(c)['cancelled']
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        s.connect(('127.0.0.1', c.port))
        raw = json.dumps(chat('flood', stream=True, max_tokens=10**6)).encode()
        s.sendall(c.head('POST', CHAT, {'content-type': 'application/json', 'content-length': str(len(raw))}) + raw)
        until(lambda: waiting(c)['running'] == 0 and not waiting(c)['queue_depth']['foreground'])
        assert c.good() == c.first
    assert waiting(c)['cancelled'] - before <= 1


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize(('word', 'code'), [('fail', 'engine_error'), ('memory', 'out_of_memory')])
def test_38_engines_that_fail(c, word, code, stream): is_error(c.ask(body=chat(word, stream=stream)), 500, code)


# --- the end

def a_stream(c, text='stream 100000 5'):
    "A stream of which something was read, and the rest of it as a file."
    s = c.connect()
    raw = json.dumps(chat(text, stream=True, max_tokens=10**6)).encode()
    s.sendall(c.head('POST', CHAT, {'content-type': 'application/json', 'content-length': str(len(raw))}) + raw)
    f = s.makefile('rb')
    while b'data:' not in f.readline(): pass
    return f


def test_9_a_signal_ends_streams_with_a_word():
    p, port = start()
    c = Caller(port, None)
    a_stream(c).close() # a client that leaves is no error in anybody's log
    until(lambda: not waiting(c)['running'])
    f = a_stream(c)
    code, out, err = end(p)
    assert (code, out, err) == (0, '', '') and b'server_shutting_down' in f.read()
    socket.create_server(('127.0.0.1', port)).close() # the port is free


def test_40_a_second_interrupt_ends_it_at_once():
    p, port = start()
    c = Caller(port, None)
    f, waits = a_stream(c), c.connect()
    raw = json.dumps(chat()).encode()
    waits.sendall(c.head('POST', CHAT, {'content-type': 'application/json', 'content-length': str(len(raw))}) + raw)
    until(lambda: waiting(c)['queue_depth']['foreground'] == 1)
    p.send_signal(signal.SIGINT)
    time.sleep(.15)
    code, out, err = end(p, signal.SIGINT)
    assert (code, out, err) == (130, '', '')
    assert b'server_shutting_down' in f.read()
    is_error(parsed(waits.makefile('rb').read()), 503, 'server_shutting_down')


def test_40_after_a_kill_the_next_server_takes_the_port():
    p, port = start()
    f = a_stream(Caller(port, None))
    p.kill()
    p.communicate(timeout=T)
    with contextlib.suppress(ConnectionError): assert b'[DONE]' not in f.read()
    p, again = start('--port', str(port))
    assert again == port and json.loads(Caller(port, None).ask(body=chat())[2])['choices'][0]['message']['content'] == 'hello7.'
    assert end(p)[0] == 0


def test_36_more_sockets_than_places():
    "One active, eight waiting: of 60 callers at once exactly those are served, and all the others learn when to come back."
    p, port = start('--max-queue', '8')
    c = Caller(port, None)
    good = c.good()
    active = a_stream(c)
    raw = json.dumps(chat(stream=True)).encode()
    calls = [c.connect() for _ in range(60)]
    for s in calls: s.sendall(c.head('POST', CHAT, {'content-type': 'application/json', 'content-length': str(len(raw))}) + raw)
    until(lambda: waiting(c)['queue_depth']['foreground'] == 8)
    assert c.ask('GET', '/health/live')[0] == 200 and c.ask('GET', '/health/ready')[0] == 503
    until(lambda: len(select.select(calls, [], [], 0)[0]) == 52)
    for s in (full := select.select(calls, [], [], 0)[0]):
        assert int(is_error(parsed(s.makefile('rb').read()), 429, 'queue_full')['retry-after']) >= 1
    active.close()
    for s in calls:
        if s not in full: assert b'[DONE]' in s.makefile('rb').read()
    assert c.good() == good and end(p) == (0, '', '')


def test_a_dead_owner_ends_the_server():
    p, port = start()
    c = Caller(port, None)
    body = c.ask(body=chat('die', stream=True))[2]
    assert b'engine_stalled' in body and b'[DONE]' not in body
    status, _, health = c.ask('GET', '/health')
    assert (status, json.loads(health)['error']['code']) == (503, 'engine_stalled') and c.ask('GET', '/health/ready')[0] == 503
    out, err = p.communicate(timeout=T)
    assert (p.returncode, out) == (70, '') and err.count('\n') == 1 and err.startswith('mlxspec: '), err


def test_without_a_key_it_stays_at_home(tmp_path):
    def refused(*args):
        done = subprocess.run([sys.executable, str(OBEDIENT), *args], capture_output=True, text=True, timeout=T)
        assert (done.returncode, done.stdout) == (2, '') and done.stderr.count('\n') == 1, done
        return done.stderr
    assert 'api-key-file' in refused('--host', '0.0.0.0', '--port', '0')
    (tmp_path/'key').write_text('\n')
    assert 'empty' in refused('--api-key-file', str(tmp_path/'key'))
    assert 'MLXSPEC_API_KEY' in refused('--api-key', KEY) and KEY not in refused('--api-key', KEY)


# --- what is counted

def scrape(c):
    "All samples of /metrics by name, and of each name by label."
    status, headers, body = c.ask('GET', '/metrics')
    assert status == 200 and headers['content-type'].startswith('text/plain')
    found = {}
    for family in text_string_to_metric_families(body.decode()):
        for x in family.samples: found.setdefault(x.name.removeprefix('mlxspec:'), {})[tuple(x.labels.values())] = x.value
    return found


NAMES = '''request_success_total request_failure_total request_cancelled_total num_requests_running num_requests_waiting prompt_tokens_total
    generation_tokens_total prefix_cache_hit_tokens_total time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds
    request_queue_time_seconds spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
    spec_decode_num_accepted_tokens_per_pos_total spec_gate_mode spec_gate_transitions_total spec_measured_speedup spec_step_seconds
    owner_thread_heartbeat_age_seconds mlx_active_memory_bytes mlx_peak_memory_bytes'''.split()


def test_every_name_is_explained(c):
    families = list(text_string_to_metric_families(c.ask('GET', '/metrics')[2].decode()))
    names = {f.name.removeprefix('mlxspec:') + ('_total' if f.type == 'counter' else '') for f in families}
    assert names == set(NAMES) and all(f.documentation for f in families)
    buckets = {x.labels['le'] for f in families if f.name == 'mlxspec:time_to_first_token_seconds' for x in f.samples if x.name.endswith('_bucket')}
    assert len(buckets - {'+Inf'}) == 16 and {'0.001', '60.0'} < buckets


def grown(c, name, *label):
    "A function that says how much a counter has grown."
    value = lambda: scrape(c).get(name, {}).get(label, 0)
    before = value()
    return lambda: value() - before


def test_what_happens_is_counted(c):
    good, bad, gone = grown(c, 'request_success_total', 'stop'), grown(c, 'request_failure_total', 'engine_error'), grown(c, 'request_cancelled_total', 'decode')
    refused, tokens = grown(c, 'request_failure_total', 'invalid_json'), grown(c, 'generation_tokens_total')
    c.good(), c.ask(body=chat('fail')), c.ask(body=b'{'), a_stream(c).close()
    until(lambda: gone() == 1)
    assert (good(), bad(), refused()) == (1, 1, 1) and tokens() >= len('hello7.')
    m = scrape(c)
    assert m['time_to_first_token_seconds_bucket'][('+Inf',)] == m['time_to_first_token_seconds_count'][()] > 0
    assert m['num_requests_running'][()] == m['num_requests_waiting'][()] == 0 and m['owner_thread_heartbeat_age_seconds'][()] < T
    assert sum(m['spec_gate_mode'].values()) == 1
