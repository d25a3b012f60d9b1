"""Faults of models, drafters and machines, seen through HTTP with a real engine: what the client is told, and that the next good request is
answered as if nothing had happened. (The server's own faults are in test_hardening.py.)"""
import contextlib
import itertools
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest
from starlette.testclient import TestClient

from mlxspec import server
from mlxspec.config import load_settings
from mlxspec.core import Proposal
from mlxspec.engine import Engine
from mlxspec.host import Host
from mlxspec.tiny import save_tiny, save_tiny_mtp

pytestmark = pytest.mark.usefixtures('quiet')
T = 60  # seconds after which a wait counts as a hang
TEXTS, CHAT = '/v1/completions', '/v1/chat/completions'
MLXSPEC = str(Path(sys.executable).with_name('mlxspec'))


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    "Directories of a target and a head."
    d = tmp_path_factory.mktemp('models')
    save_tiny(d/'target', 'qwen3'), save_tiny_mtp(d/'head')
    return d


class Client:
    "An engine behind the application, without sockets."
    def __init__(self, engine):
        self.engine = engine
        self.http = TestClient(server.make_app(Host(engine, make_params=engine.settings.params)), base_url='http://127.0.0.1', raise_server_exceptions=False)

    def post(self, more, **fields):
        return self.http.post(TEXTS, json=dict(prompt='ab cd ab cd', max_tokens=24, ignore_eos=True, seed=1) | fields | more)
    def ask(self, **more): return self.post(more).json()
    def get(self, path): return self.http.get(path).json()
    def reasons(self, answer): return answer['metrics']['mlxspec']['no_draft_reasons']


@pytest.fixture
def opened(root, tmp_path):
    with contextlib.ExitStack() as stack:
        def open_(drafter='none', **options):
            e = Engine.load(root/'target', drafter and str(root/drafter if (root/drafter).exists() else drafter), settings=load_settings({}, {}, []), cache_dir=tmp_path, **options)
            stack.enter_context(e)
            c = Client(e)
            stack.enter_context(c.http) # one event loop for all its requests, as in a server
            return c
        yield open_


# ---- row 37: drafters that fail

def raises(real): return lambda *a: 1 / 0
def wrong_shape(real): return lambda self, states, ks, laws: [Proposal(mx.zeros((2, 3), dtype=mx.int32), ('x',) * 3)]
def no_ids(real): return lambda self, states, ks, laws: [Proposal([10**9] * k, (self.kind,) * k) for k in ks]
def nothing(real): return lambda *a: None
def slow(real): return lambda *a: time.sleep(.02) or real(*a)


@pytest.mark.parametrize('how', [raises, wrong_shape, no_ids, nothing, slow])
@pytest.mark.parametrize('drafter', ['target', 'head'])
def test_37_a_drafter_that_fails_changes_no_text(opened, monkeypatch, drafter, how):
    c = opened(drafter, mtp_gate='force')
    made = type(c.engine._plan.drafters.made[0])
    plain = [c.ask(speculation=dict(disable=True), temperature=t)['choices'] for t in (0, 1)]
    with monkeypatch.context() as m:
        m.setattr(made, 'propose', how(made.propose))
        for t in (0, 1):
            r = c.ask(temperature=t)
            assert r['choices'] == plain[t]
            why, accepted = c.reasons(r), r['metrics']['speculative_decoding']['num_accepted_draft_tokens']
            if how in (raises, wrong_shape, nothing): assert why['drafter_failed'] and not r['timings']['draft_n'], why
            if how is no_ids: assert not accepted
    for t in (0, 1):
        again = c.ask(temperature=t)
        assert again['choices'] == plain[t] and 'drafter_failed' not in c.reasons(again) and (again['timings']['draft_n'] or how is slow)


def test_37_a_slow_drafter_is_parked(opened, monkeypatch):
    c = opened('target', mtp_gate='budget')
    made = type(c.engine._plan.drafters.made[0])
    plain = c.ask(speculation=dict(disable=True), max_tokens=120)['choices']
    monkeypatch.setattr(made, 'propose', slow(made.propose))
    r = c.ask(max_tokens=120)
    assert r['choices'] == plain and c.reasons(r)['parked'] > 60
    assert c.get('/health')['speculation']['gate']['arm'] == 'plain'


def test_37_the_policy_names_what_starves_it(opened, monkeypatch):
    c = opened('head')
    made = type(c.engine._plan.drafters.made[0])
    monkeypatch.setattr(made, 'propose', raises(made.propose))
    plain = c.ask(speculation=dict(disable=True))['choices']
    for _ in range(12): assert c.ask()['choices'] == plain
    p = c.get('/v1/internal/mtp-policy')
    assert (p['state'], p['starved_by'], p['samples']) == ('profiling', 'drafter_failed', 0)


# ---- row 42: models that are not whole, or do not fit

def refused(*args):
    done = subprocess.run([MLXSPEC, 'serve', '--port', '0', *map(str, args)], capture_output=True, text=True, timeout=T)
    assert (done.returncode, done.stdout) == (2, '') and done.stderr.startswith('mlxspec: ') and done.stderr.count('\n') == 1, done
    return done.stderr


def test_42_a_missing_shard(tmp_path):
    path = save_tiny(tmp_path/'tiny', 'llama')
    weights = mx.load(str(path/'model.safetensors'))
    names = sorted(weights)
    (path/'model.safetensors').unlink()
    for i in range(2): mx.save_safetensors(str(path/f'model-0000{i + 1}-of-00002.safetensors'), {k: weights[k] for k in names[i::2]})
    index = dict(metadata={}, weight_map={k: f'model-0000{i % 2 + 1}-of-00002.safetensors' for i, k in enumerate(names)})
    (path/'model.safetensors.index.json').write_text(json.dumps(index))
    (path/'model-00002-of-00002.safetensors').unlink()
    assert 'tiny' in refused('--model', path)


def test_42_another_vocabulary(root, tmp_path):
    small = save_tiny(tmp_path/'small', 'llama', vocab_size=5000)
    said = refused('--model', root/'target', '--drafter', small, '--speculation', 'required')
    assert 'small' in said and 'target' in said and '5000' in said


def test_42_without_a_template_there_are_completions(tmp_path):
    path = save_tiny(tmp_path/'tiny', 'llama')
    for f in ('chat_template.jinja', 'chat_template.json'): (path/f).unlink(missing_ok=True)
    config = json.loads((path/'tokenizer_config.json').read_text())
    config.pop('chat_template', None)
    (path/'tokenizer_config.json').write_text(json.dumps(config))
    with Engine.load(path, 'lookup', settings=load_settings({}, {}, []), cache_dir=tmp_path) as engine:
        c = Client(engine)
        for stream in (False, True):
            r = c.http.post(CHAT, json=dict(messages=[dict(role='user', content='a')], stream=stream))
            assert r.status_code == 400 and 'chat template' in r.json()['error']['message'] and r.json()['error']['param'] == 'messages'
        assert c.post({}).status_code == 200


# ---- row 44: the same bytes in any company

@pytest.mark.parametrize('mode', ['serial', 'mtp_batch'])
def test_44_the_same_seed_says_the_same(opened, mode):
    "Alone, in a crowd, after requests that were cancelled, with drafts and without, with its prompt in the cache and not; greedy and drawn."
    c = opened('head', scheduler_mode=mode, **dict(max_active_requests=4) if mode != 'serial' else {})
    long = 'the quick brown fox jumps over the lazy dog ' * 7
    asked = [dict(prompt=p, temperature=t, seed=s) for p in (long, 'ab cd') for t, s in ((0, 1), (1, 2), (.7, 3))]
    alone = [c.ask(**a)['choices'] for a in asked]
    for speculate in (True, False):                           # again: now the long prompt is found
        again = [c.ask(**a, speculation=dict(disable=not speculate)) for a in asked]
        assert [r['choices'] for r in again] == alone
    assert again[0]['usage']['prompt_tokens_details']['cached_tokens'] > 0
    with ThreadPoolExecutor(12) as crowd:
        others = [crowd.submit(c.ask, prompt=f'{i} of them', temperature=1, max_tokens=60) for i in range(4)]
        jobs = [c.engine.submit(c.engine.encode('leave'), c.engine.settings.params(max_tokens=4000, ignore_eos=True)) for _ in range(3)]
        mine = [crowd.submit(c.ask, **a) for a in asked]
        for j in jobs: j.cancel()
        assert [f.result(T)['choices'] for f in mine] == alone
        for f in others: f.result(T)
    assert [c.ask(**a)['choices'] for a in asked] == alone


# ---- row 38: targets that fail, memory that does not suffice

FAULTS = dict(raises=(ValueError('no such kernel'), 'engine_error'), memory=(MemoryError(), 'out_of_memory'),
              malloc=(RuntimeError('[metal::malloc] Attempting to allocate 9 bytes'), 'out_of_memory'))


@pytest.mark.parametrize(('name', 'mode'), [*((n, 'serial') for n in FAULTS), ('malloc', 'mtp_batch')])
def test_38_a_target_that_fails_ends_one_request(opened, monkeypatch, name, mode):
    "The request learns it; where memory was short, the states of earlier prompts are dropped; the next good request is answered as ever."
    c, (fault, code), say = opened('head', scheduler_mode=mode), FAULTS[name], []
    good = dict(prompt='the quick brown fox jumps over the lazy dog ' * 7)
    first, target, submit = c.ask(**good)['choices'], c.engine._target, c.engine.submit
    def fails(real):
        def call(*args, **more):
            if say: raise fault
            return real(*args, **more)
        return call
    for f in ('forward', 'step'): monkeypatch.setattr(target, f, fails(getattr(target, f)))
    def after_some(prompt, params, on_chunk): # the fault comes after the first tokens
        return submit(prompt, params, lambda chunk: (on_chunk(chunk), say.append(1)))
    for stream, early in itertools.product((False, True), (False, True)): # early: while the prompt is read
        assert c.get('/health')['prefix']['entries'] == 1
        with monkeypatch.context() as m:
            if early: say.append(1)
            else: m.setattr(c.engine, 'submit', after_some)
            r = c.post(dict(stream=stream), prompt='ab cd')
        error = json.loads(r.text.split('data: ')[-1])['error'] if stream and not early else r.json()['error']
        assert error['code'] == code and 'kernel' not in r.text and r.status_code == (200 if stream and not early else 500) and '[DONE]' not in r.text
        say.clear()
        health = c.get('/health')
        assert health['status'] == 'ok' and health['prefix']['entries'] == (code != 'out_of_memory') and not health['scheduler']['running']
        assert c.ask(**good)['choices'] == first


# ---- row 41: what is remembered on disk

def no_space(*args): raise OSError(28, 'No space left on device')


DAMAGE = dict(cut=lambda p: p.write_bytes(p.read_bytes()[:len(p.read_bytes()) // 2]), empty=lambda p: p.write_bytes(b''), binary=lambda p: p.write_bytes(b'\xff\0' * 99),
              version=lambda p: p.write_text(p.read_text().replace('"version":1', '"version":99').replace('"version": 1', '"version": 99')),
              directory=lambda p: (p.unlink(), p.mkdir()), full_disk=lambda p: p.unlink())


@pytest.mark.parametrize('how', DAMAGE)
def test_41_damaged_memories_stop_no_server(opened, monkeypatch, tmp_path, how):
    "Two servers at once on a directory whose files are damaged, or cannot be written: both start, measure again and say the same."
    c = opened('head')
    first = c.ask(temperature=1)['choices']
    c.engine.close()
    files = [p for p in tmp_path.rglob('*.json') if p.is_file()]
    assert files
    for p in files: DAMAGE[how](p)
    if how == 'full_disk': monkeypatch.setattr('os.replace', no_space)
    for c in [opened('head'), opened('head')]:
        assert c.ask(temperature=1)['choices'] == first and c.get('/health')['status'] == 'ok'
        assert c.get('/v1/internal/mtp-policy')['state'] == 'profiling'


def test_choices_wait_for_the_first_however_long_its_answer(opened, monkeypatch):
    "Who else stands in line that long is told that it took too long."
    c = opened(queue_timeout_s=.3)
    step = c.engine._target.step
    monkeypatch.setattr(c.engine._target, 'step', lambda *a, **kw: time.sleep(.03) or step(*a, **kw))
    with ThreadPoolExecutor(2) as crowd:
        several = crowd.submit(c.post, dict(n=2), prompt=['ab', 'cd'], max_tokens=20)
        while c.get('/health')['scheduler']['queue_depth']['foreground'] < 3: time.sleep(.01)
        late = c.post({}, max_tokens=1)
        assert late.status_code == 503 and late.json()['error']['code'] == 'queue_timeout' and int(late.headers['retry-after']) >= 1
        assert [x['finish_reason'] for x in several.result(T).json()['choices']] == ['length'] * 4
