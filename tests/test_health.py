"""What /health says of the scheduler, in every mode: all of the contract, nothing that did not happen, one unit; and what a real server
does with requests that wait, wait too long, are too many, or are left. (Told in nbs/30_scheduler.ipynb and nbs/30_admission.ipynb.)"""
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import wait
from pathlib import Path

import mlx.core as mx
import pytest
from test_server import CHAT, T, get, make, start, stop  # noqa: F401  (a fixture)

from mlxspec.config import MODES
from mlxspec.core import Params
from mlxspec.engine import Engine
from mlxspec.scheduler import LANES
from mlxspec.tiny import byte_tokenizer, tiny_model

OBEDIENT = Path(__file__).parent.parent/'tools'/'obedient.py'
pytestmark = pytest.mark.usefixtures('quiet')
SEEN = dict(serial='plain mtp', cooperative='plain mtp', ar_batch='plain plain_batch', mtp_batch='plain mtp plain_batch mtp_batch',
            mtp_cohort_experimental='plain mtp cohort', hyper='plain mtp hyper')


@pytest.mark.parametrize('mode', MODES)
def test_the_picture_of_the_scheduler(mode, tmp_path):
    with Engine.from_model(tiny_model('llama', mx.bfloat16), byte_tokenizer(), scheduler_mode=mode, drafter='lookup', mtp_gate='force', cache_dir=tmp_path) as e:
        s = e.snapshot()['scheduler']
        assert set(s) == set('mode active_lane queue_depth running waits completed failed cancelled drops pinned_bytes batch_histogram rows_histogram keepalive owner'.split())
        assert (s['mode'], s['active_lane'], s['batch_histogram'], s['rows_histogram'], s['drops']) == (mode, 'idle', {}, {}, {})
        assert s['queue_depth'] == s['completed'] == dict(foreground=0, postcommit=0, persistence=0)
        assert s['waits'] == dict(count=0, mean=None, p50=None, p95=None)
        assert set(s['keepalive']) == set('armed beats errors last_error last_beat_age_s last_beat_duration_s warm'.split())
        assert set(s['owner']) == {'alive', 'ready', 'stalled', 'beat_age_s'} and s['owner']['ready']
        lanes = set()
        jobs = [e.submit([*b'ab cd ab cd ', 65 + i], Params(max_tokens=30, ignore_eos=True), lambda chunk: lanes.add(e.snapshot()['scheduler']['active_lane'])) for i in range(3)]
        late = e.submit([65], Params(max_tokens=400, ignore_eos=True))
        wait([j.future for j in jobs], T)
        late.cancel()
        wait([late.future], T)
        e.call(int) # the owner has looked up since
        s = e.snapshot()['scheduler']
        assert lanes <= set(LANES) and s['active_lane'] in (*SEEN[mode].split(), 'prefill')
        # one unit: a step counts once for each request that took part
        steps = [j.stats.plain_steps + j.stats.rounds for j in jobs]
        all_steps = sum(steps) + late.stats.plain_steps + late.stats.rounds
        assert sum(int(w) * n for w, n in s['batch_histogram'].items()) == all_steps
        if mode in ('serial', 'cooperative', 'hyper'): assert set(s['batch_histogram']) == {'1'}
        if mode == 'serial': assert sum(s['rows_histogram'].values()) == sum(j.stats.rounds for j in (*jobs, late))
        if mode == 'ar_batch': assert s['rows_histogram'] == {}
        assert all(int(r) > 1 for r in s['rows_histogram'])
        assert (s['completed']['foreground'], s['cancelled'], s['failed'], s['running'], s['queue_depth']['foreground']) == (3, 1, 0, 0, 0)
        assert s['waits']['count'] in (3, 4) and 0 <= s['waits']['p50'] <= s['waits']['p95']
        assert set(e.snapshot()) == {'scheduler', 'speculation', 'prefix'}


# ---- a real server with one place and one chair, little patience and small chunks

@pytest.fixture(scope='module')
def served(tmp_path_factory):
    p, url, _ = start(tmp_path_factory.mktemp('cache'), '--scheduler-mode', 'serial', '--max-queue', '1', '--queue-timeout-s', '2', '--prefill-chunk-tokens', '16', '--mtp-gate', 'force')
    yield url
    assert stop(p) == (0, '', '')


LONG = dict(messages=[dict(role='user', content='Count from 1 to 90.')], max_tokens=3000, ignore_eos=True, stream=True)
GOOD = dict(messages=[dict(role='user', content='Count from 3 to 9.')], seed=1)


def post(url, body):
    "Status, headers, body."
    try:
        with urllib.request.urlopen(urllib.request.Request(url + CHAT, json.dumps(body).encode(), {'content-type': 'application/json'}), timeout=T) as r: return r.status, r.headers, json.load(r)
    except urllib.error.HTTPError as e: return e.code, e.headers, json.load(e)


def opened(url, body): # a socket on which a request was sent
    host, port = url.removeprefix('http://').split(':')
    s, raw = socket.create_connection((host, int(port)), T), json.dumps(body).encode()
    s.sendall(b'POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n' % (CHAT.encode(), len(raw)) + raw)
    return s


def until(url, true):
    end = time.monotonic() + T
    while not true(s := get(url + '/health')['scheduler']):
        assert time.monotonic() < end, s
        time.sleep(.005)
    return s


def answer(url):
    status, _, body = post(url, GOOD)
    assert status == 200
    return body['choices'][0]['message']['content']


def test_too_many_too_long_and_gone_from_the_queue(served):
    want, before = answer(served), until(served, lambda s: not s['running'])
    with opened(served, LONG) as first:
        assert b'200 OK' in first.recv(100)
        got = []
        waiting = threading.Thread(target=lambda: got.append(post(served, GOOD)))
        waiting.start()
        until(served, lambda s: s['queue_depth']['foreground'] == 1)
        status, headers, body = post(served, GOOD) # no chair is left
        assert (status, body['error']['code']) == (429, 'queue_full') and 1 <= int(headers['retry-after']) <= 120
        waiting.join(T)
        status, headers, body = got[0]             # two seconds are over
        assert (status, body['error']['code']) == (503, 'queue_timeout') and int(headers['retry-after']) >= 1
        for stream in (True, False):
            with opened(served, GOOD | dict(stream=stream)): until(served, lambda s: s['queue_depth']['foreground'] == 1)
            until(served, lambda s: s['queue_depth']['foreground'] == 0 and s['running'] == 1) # the chair is free while the place is not
        assert get(served + '/health')['scheduler']['active_lane'] in ('mtp', 'plain')
    now = until(served, lambda s: not s['running']) # and now the place, in the middle of drafts
    assert now['cancelled'] == before['cancelled'] + 3 and now['failed'] == before['failed'] + 1
    assert now['completed']['foreground'] == before['completed']['foreground']
    assert answer(served) == want


@pytest.mark.parametrize('stream', [True, False])
def test_a_prompt_that_nobody_waits_for_is_not_read_on(served, stream):
    want, before = answer(served), get(served + '/health')
    long = dict(messages=[dict(role='user', content=f'{stream} ' + ' '.join(f'{i} red' for i in range(450)))], max_tokens=2, stream=stream)
    with opened(served, long): until(served, lambda s: s['running'] and s['active_lane'] == 'prefill')
    s = until(served, lambda s: not s['running'])
    assert s['active_lane'] == 'prefill' and s['cancelled'] == before['scheduler']['cancelled'] + 1 # it never came to a token
    assert get(served + '/health')['prefix']['entries'] == before['prefix']['entries'] and answer(served) == want


@pytest.mark.skipif(not hasattr(fcntl, 'F_SETPIPE_SZ'), reason='pipes have a size on Linux')
def test_a_log_that_nobody_reads_holds_up_nobody():
    "The pipe behind standard error is full; requests fail, each with some lines in the log, and good ones are answered."
    r, w = os.pipe()
    fcntl.fcntl(w, fcntl.F_SETPIPE_SZ, 4096)
    p = subprocess.Popen([sys.executable, str(OBEDIENT), '--port', '0'], stdout=subprocess.PIPE, stderr=w, text=True)
    try:
        url = f'http://127.0.0.1:{p.stdout.readline().rpartition(":")[2].split("/")[0]}'
        say = lambda text: post(url, dict(messages=[dict(role='user', content=text)]))
        assert [say('fail')[0] for _ in range(40)] == [500] * 40
        assert say('hello')[0] == 200 and get(url + '/health')['scheduler']['owner']['ready']
    finally: p.kill()
    p.communicate(timeout=T)
    os.close(w)
    assert len(os.read(r, 10_000)) > 2000 # it was full
    os.close(r)


def test_an_owner_that_does_not_move_is_alive_and_not_ready(make):  # noqa: F811
    stuck, go = threading.Event(), threading.Event()
    def step(): stuck.set(), go.wait(T)
    c = make('a', step, 'b')
    c.engine.sched._dog.stall_s = .05
    job = c.engine.submit([65], Params(), lambda chunk: None)
    assert stuck.wait(T)
    end = time.monotonic() + T
    while c.get('/health/ready').status_code == 200 and time.monotonic() < end: time.sleep(.01)
    assert [c.get(p).status_code for p in ('/health', '/health/ready', '/health/live')] == [503, 503, 200]
    assert c.get('/health').json()['error']['code'] == 'engine_stalled' and c.post(CHAT, json=GOOD).status_code == 503
    go.set()
    job.future.result(T)
    while c.get('/health').status_code != 200 and time.monotonic() < end: c.engine.call(int)
    assert [c.get(p).status_code for p in ('/health', '/health/ready', '/health/live')] == [200, 200, 200]
