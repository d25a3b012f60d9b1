"""The policy of a server that really runs: every state, every precedence, golden bodies, and what requests tell meanwhile.

The first half asks `mlxspec serve` in a process of its own, one per state, with a tiny target and a random head. The second half builds the
same application in this process, which is quicker, for all combinations of the environment."""
import contextlib
import http.server
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.testclient import TestClient
from test_policy import CONTRACT, EXAMPLES, GPU, WHY

from mlxspec import cli, pairing, policy_cli, server, serving
from mlxspec.config import Settings, load_settings
from mlxspec.core import ConfigError, Params
from mlxspec.engine import Engine
from mlxspec.evidence import Estimate, Sample
from mlxspec.hints import HINT_VERSION, Hint, HintFile, all_hints, encode, hint_dir, seal
from mlxspec.policy import MtpPolicySnapshot, say
from mlxspec.tiny import save_tiny, save_tiny_mtp

T = 60  # seconds after which a wait counts as a hang
MLXSPEC = str(Path(sys.executable).with_name('mlxspec'))
WIRE = set(MtpPolicySnapshot.unavailable('worker_not_ready', None).wire())
EST = Estimate(1.34, 1.21, 1.48, 10.2, 7.6, 2.9, (.8, .6), .625)
ENABLE = Hint('enable', 'measured', .63, 4, 4, EST, 1.77e9, 'tiny', 'head')


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
    "Directories of a target and a head."
    root = tmp_path_factory.mktemp('models')
    return save_tiny(root/'tiny', 'qwen3'), save_tiny_mtp(root/'head')


def get(url):
    with urllib.request.urlopen(url, timeout=T) as r: return json.load(r)


# What one can do to a target before the server starts: `mlxspec` with a machine that is not this one.
MACHINES = dict(
    memory_bound='''
import time
def forward(self, *args, **kw): # reading the weights takes 10 ms, whatever the number of rows
    time.sleep(.01)
    return original(self, *args, **kw)
original, target.Target.forward = target.Target.forward, forward
''',
    inexact='''
def __call__(self, ids, **kw): # the last bit of one logit per row differs where there are several rows
    out = original(self, ids, **kw)
    if ids.shape[1] == 1: return out
    bits = mx.view(out, mx.int32)
    bits[..., 7] += 1
    return mx.view(bits, mx.float32)
original, qwen3.Model.__call__ = qwen3.Model.__call__, __call__
''')
LAUNCH = '''
import sys
import mlxspec
from mlxspec import cli, target
import mlx.core as mx
from mlx_lm.models import qwen3
{}
sys.exit(cli.main(sys.argv[1:]))
'''


class Served:
    "`mlxspec serve` in a process of its own."
    def __init__(self, cache, tiny, *args, drafter=None, machine=None, **env):
        with socket.create_server(('127.0.0.1', 0)) as s: port = s.getsockname()[1]
        self.url, env = f'http://127.0.0.1:{port}', {f'MLXSPEC_{k}': v for k, v in env.items()}
        pair = ['--model', tiny[0], '--drafter', drafter or tiny[1]] if tiny else [] # else the demo pair
        program = [sys.executable, '-c', LAUNCH.format(MACHINES[machine])] if machine else [MLXSPEC]
        command = [*program, 'serve', '--port', str(port), *pair, *args]
        self.p = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env={**os.environ, 'MLXSPEC_CACHE_DIR': str(cache), **env})

    def __enter__(self): return self
    def __exit__(self, *_):
        if self.p.poll() is None: self.p.kill()
        self.p.communicate()

    def first(self):
        "What the endpoint says as soon as anybody answers."
        end = time.monotonic() + T
        while time.monotonic() < end and self.p.poll() is None:
            with contextlib.suppress(urllib.error.URLError, ConnectionError): return self.policy()
            time.sleep(.01)
        raise AssertionError(self.p.communicate())

    def ready(self):
        "Wait until the model is loaded; once."
        hang = threading.Timer(T, self.p.kill)
        hang.start()
        line = self.p.stdout.readline()
        hang.cancel()
        assert re.fullmatch(r'mlxspec serves .* at .*\n', line), (line, self.p.communicate(timeout=T))
        return self

    def policy(self):
        body = get(self.url + '/v1/internal/mtp-policy')
        assert set(body) == WIRE and body['schema_version'] == 1
        return body

    def ask(self, n=48, **more):
        body = dict(messages=[dict(role='user', content='ab cd')], max_tokens=n, ignore_eos=True) | more
        r = urllib.request.Request(self.url + '/v1/chat/completions', json.dumps(body).encode(), {'content-type': 'application/json'})
        return get(r)

    def stop(self):
        self.p.send_signal(signal.SIGTERM)
        out, err = self.p.communicate(timeout=T)
        assert self.p.returncode == 0, err
        return [line for line in err.splitlines() if not line.startswith('mlxspec: measuring which verify widths ')]


def state(body): return body['reason'] or body['state'], body['mtp_enabled']
def drafted(answer): return answer['metrics']['speculative_decoding']['num_draft_tokens']
def adds_up(answer):
    m, ours = answer['metrics']['speculative_decoding'], answer['metrics']['mlxspec']
    assert sum(ours['arms'].values()) == m['num_spec_steps'] + ours['plain_steps'] and ours['arms'].get('plain', 0) == ours['plain_steps']
    return ours


# ---- states, for real

@pytest.fixture(scope='module')
def life(tiny, tmp_path_factory):
    "A server from its first breath to a verdict: what the endpoint said on the way, the answers, the log, and the cache it leaves."
    cache, seen = tmp_path_factory.mktemp('cache'), dict(answers=[], bodies=[])
    with Served(cache, tiny, '--log-level', 'info') as s:
        seen['first'] = s.first()
        s.ready()
        seen['bodies'].append(s.policy())
        seen['short'], seen['after_short'] = s.ask(4), s.policy()
        seen['off'], seen['after_off'] = s.ask(speculation=dict(disable=True)), s.policy()
        while seen['bodies'][-1]['state'] == 'profiling' and len(seen['answers']) < 40:
            seen['answers'].append(s.ask())
            seen['bodies'].append(s.policy())
        seen['last'], seen['health'] = s.ask(), get(s.url + '/health')
        seen['shown'] = subprocess.run([MLXSPEC, 'policy', 'show', '--url', s.url + '/v1'], capture_output=True, text=True)
        seen['log'] = s.stop()
    return seen | dict(cache=cache)


def test_while_the_model_loads_nobody_knows(life):
    body = life['first']
    assert state(body) == ('worker_not_ready', None) and say(body) == 'the model is still loading'
    assert [k for k in CONTRACT if body[k] is not None] == ['schema_version', 'state', 'reason', 'samples', 'samples_required']


def test_profiling_counts_qualifying_samples(life):
    start, bodies = life['bodies'][0], [b for b in life['bodies'] if b['state'] == 'profiling']
    assert state(start) == ('profiling', True) and start['acceptance_rate'] is None
    assert (start['target'], start['drafter'], start['block_size']) == ('tiny', 'head', 3) and start['hardware']
    assert life['after_short'] == life['after_off'] == start                         # too short, and not the policy's business
    assert [b['samples'] for b in bodies] == list(range(len(bodies))) and len(bodies) >= 2
    for b in bodies:
        assert b['samples_remaining'] == b['samples_required'] - b['samples'] >= 1 and b['mtp_enabled']
        assert say(b) == f'measuring: {b["samples"]} of {b["samples_required"]} single-request generations done'
        assert (b['estimated_speedup'] is None) == (b['samples'] == 0)


def test_a_random_head_is_declined(life):
    body = life['bodies'][-1]
    assert state(body) == ('settled', False) and body['verdict'] == 'decline' and body['settled_by'] == 'measured' and not body['restored']
    assert body['samples'] >= 2 and body['samples_remaining'] is None and body['speedup_high'] < 1
    assert body['exactness']['level'] == 'identical'
    assert 'measured, MTP is off' in life['shown'].stdout and life['shown'].stdout.startswith('tiny with head, on ') and not life['shown'].stderr


def test_requests_tell_which_arm_ran_and_why(life):
    for answer in life['answers']:
        ours = adds_up(answer)
        assert set(ours['arms']) == {'plain', 'qwen3_5_mtp'} and ours['no_draft_reasons']['profiling'] and ours['level'] == 'identical'
        assert set(ours['gate']) == {'switches', 'looks', 'tps', 'rival_tps', 'regret_tokens'}
    assert adds_up(life['off'])['arms'] == {'plain': 48} and life['off']['metrics']['mlxspec']['no_draft_reasons'] == {'disabled': 48}
    assert adds_up(life['last'])['arms'] == {'plain': 48} and life['last']['metrics']['mlxspec']['no_draft_reasons'] == {'policy': 48}
    texts = {a['choices'][0]['message']['content'] for a in (*life['answers'], life['off'], life['last'])}
    assert len(texts) == 1                                                           # whatever ran


def test_health_tells_the_same(life):
    h, body = life['health'], life['bodies'][-1]
    assert h['observability']['mtp_policy'] == {'status': body['state']} | {
        k: v for k, v in body.items() if k not in ('schema_version', 'state', 'samples_remaining')}
    gate = h['speculation']['gate']
    assert gate['gate'] == 'budget' and set(gate['steps']) == {'plain', 'qwen3_5_mtp'} and gate['last_switches'] == []
    assert not [line for line in life['log'] if 'WARNING' in line or 'ERROR' in line]


def test_a_restart_has_the_verdict_at_once(life, tiny):
    with Served(life['cache'], tiny) as s:
        again, old = s.ready().policy(), life['bodies'][-1]
        assert {k for k in WIRE if again[k] != old[k]} == {'restored'} and again['restored']
        assert not drafted(s.ask(12)) and s.stop() == []


def test_where_rounds_cost_what_a_step_costs_the_demo_head_is_enabled(tmp_path):
    with Served(tmp_path, None, machine='memory_bound') as s:
        bodies = [s.ready().policy()]
        while bodies[-1]['state'] == 'profiling' and len(bodies) <= 20: # bounds the test; four samples are enough for so clear a case
            s.ask(40, messages=[dict(role='user', content=f'Count from {len(bodies)} to {len(bodies) + 30}.')])
            bodies.append(s.policy())
        body = bodies[-1]
        assert state(body) == ('settled', True) and (body['verdict'], body['settled_by'], body['restored']) == ('enable', 'measured', False)
        assert body['samples'] >= body['samples_required'] and body['speedup_low'] > 1.03 and body['plain_ms_per_token'] > 10
        answer = s.ask(40)
        assert drafted(answer) and adds_up(answer)['no_draft_reasons'].get('policy') is None
        assert s.stop() == []


def test_an_enable_is_restored_and_drafts(life, tiny, tmp_path):
    (key, hint), = all_hints(hint_dir(life['cache']))
    assert (hint.target, hint.drafter, hint.verdict) == ('tiny', 'head', 'decline')
    HintFile(hint_dir(tmp_path), key).save(ENABLE)
    with Served(tmp_path, tiny, MTP_GATE='force') as s:
        body = s.ready().policy()
        assert state(body) == ('settled', True) and body['restored'] and body['verdict'] == 'enable'
        assert (body['acceptance_rate'], body['samples'], body['estimated_speedup']) == (.63, 4, 1.34)
        answer = s.ask()
        assert drafted(answer) and answer['choices'] == life['off']['choices']
        assert adds_up(answer)['arms']['qwen3_5_mtp'] > 20 and get(s.url + '/health')['speculation']['gate'] == {'gate': 'force'}
        assert s.policy() == body and s.stop() == []
    with Served(tmp_path, tiny, '--draft-block-size', '2') as s: # measured at one K, it says nothing about another
        assert state(s.ready().policy()) == ('profiling', True) and s.policy()['block_size'] == 2


@pytest.mark.parametrize('want, args, env', [
    (('no_mtp_dispatch', False), ['--drafter', 'lookup'], dict(ENABLE_MTP_B1='1')),
    (('adaptive_disabled', True), [], dict(MTP_ADAPTIVE='off', ENABLE_MTP_B1='on')),
    (('forced', False), ['--draft-block-size', '4'], dict(ENABLE_MTP_B1=' NO ', DRAFT_BLOCK_SIZE='5')),
    (('forced', True), ['--mtp-gate', 'force'], dict(ENABLE_MTP_B1='yes', MTP_GATE='off'))], ids=lambda v: v[0] if isinstance(v, tuple) else '')
def test_states_without_a_measurement(want, args, env, tiny, tmp_path):
    with Served(tmp_path, tiny, *args, **env) as s:
        body = s.ready().policy()
        assert state(body) == want and body['samples'] == 0 and body['verdict'] is body['acceptance_rate'] is None
        assert body['block_size'] == (None if body['reason'] else 4 if '4' in args else 3)
        heads = [adds_up(s.ask())['arms'].get('qwen3_5_mtp', 0) for _ in range(2)]
        assert all(heads) if want == ('forced', True) else want[1] or not any(heads)
        assert s.policy() == body and s.stop() == []
    assert not hint_dir(tmp_path).exists()                                           # neither read nor written


def test_a_pair_that_is_not_exact_is_declined_whatever_anybody_pins(tiny, tmp_path):
    with Served(tmp_path, tiny, EXACTNESS='off', ENABLE_MTP_B1='1') as s:
        body = s.ready().policy()
        assert state(body) == ('exactness_declined', False) and body['decline_detail'] == 'exactness probe did not run: MLXSPEC_EXACTNESS is off.'
        assert (body['target'], body['block_size'], body['verdict']) == ('tiny', 3, None)
        assert say(body) == 'MTP configured but vetoed; running classic decode: ' + body['decline_detail']
        answer = s.ask(12)
        assert not drafted(answer) and answer['metrics']['mlxspec']['no_draft_reasons'] == {'exactness_declined': 12}
        warned, = s.stop()
        assert warned.endswith(': ' + body['decline_detail']) and 'WARNING' in warned # one line, exactly this sentence


def test_a_machine_that_is_off_by_a_bit_is_declined_with_the_bytes(tiny, tmp_path):
    with Served(tmp_path, tiny, machine='inexact', ENABLE_MTP_B1='1') as s:
        body, answer = s.ready().policy(), s.ask(12)
        assert state(body) == ('exactness_declined', False) and not drafted(answer) and body['samples'] == 0
        assert re.fullmatch(r'verify block position \d differs from the single-token chain in \d+ of \d+ logit bytes\. '
                            r'Row-wise attention did not make it exact either\.', body['decline_detail'])
        warned, = s.stop()
        assert warned.endswith(': ' + body['decline_detail']) and 'WARNING' in warned # one line, exactly this sentence


def test_inexact_may_be_allowed_and_is_told(tiny, tmp_path):
    with Served(tmp_path, tiny, EXACTNESS='off', MTP_ALLOW_INEXACT='true') as s:
        assert state(s.ready().policy()) == ('profiling', True)
        ours = adds_up(s.ask())
        assert ours['level'] == 'none' and 'may change the text' in ours['warning'] and ours['arms']['qwen3_5_mtp']
        assert len(s.stop()) == 1


def test_starvation_says_who_holds_back(tiny, tmp_path):
    with Served(tmp_path, tiny, '--mtp-gate', 'off') as s:
        assert s.ready().policy()['starved_by'] == 'gate_off'
        answer = s.ask()
        assert not drafted(answer) and answer['metrics']['mlxspec']['no_draft_reasons'] == {'gate_off': 48}
        body = s.policy()
        assert state(body) == ('profiling', True) and (body['samples'], body['starved_by']) == (0, 'gate_off')
        assert say(body) == 'measuring: 0 of 4 single-request generations done; held back by gate_off'
        assert s.stop() == []


def test_the_demo_pair_is_settled_within_forty_short_requests(tmp_path):
    say = lambda n: [dict(role='user', content=f'Count from {n} to {n + 14}.')]
    with Served(tmp_path, None) as s:
        bodies = [s.ready().policy()]
        while bodies[-1]['state'] == 'profiling' and len(bodies) <= 40:
            adds_up(s.ask(64, messages=say(len(bodies)), ignore_eos=False))
            bodies.append(s.policy())
        body = bodies[-1]
        assert (body['target'], body['drafter'], body['state']) == ('mlxspec-demo', 'mlxspec-demo-mtp', 'settled') and len(bodies) - 1 >= body['samples']
        assert s.stop() == []
    with Served(tmp_path, None, MTP_GATE='force') as s:
        again, answer = s.ready().policy(), s.ask(64, messages=say(7), ignore_eos=False)
        assert {k for k in WIRE if again[k] != body[k]} == {'restored'}
        assert ('qwen3_5_mtp' in adds_up(answer)['arms']) == (body['verdict'] == 'enable') and drafted(answer) # lookup drafts anyway


def test_show_asks_a_server_with_a_key(tiny, tmp_path, monkeypatch, capsys):
    def ask(what, *args, key=None):
        monkeypatch.setenv('MLXSPEC_API_KEY', key or '')
        code = cli.main(['policy', what, '--url', s.url, *args])
        return code, ''.join(capsys.readouterr())
    (tmp_path/'key').write_text('sesame \nand a remark\n')
    with Served(tmp_path, tiny, MTP_ADAPTIVE='off', API_KEY='sesame') as s:
        s.ready()
        for what, words in (('show', 'not measured: MLXSPEC_MTP_ADAPTIVE is off, MTP is off'), ('export', '"reason": "adaptive_disabled"')):
            code, text = ask(what)
            assert code == 2 and 'asks for an API key; set MLXSPEC_API_KEY or give --api-key-file.' in text
            code, text = ask(what, key='wrong')
            assert code == 2 and 'does not accept the API key' in text and 'wrong' not in text
            assert ask(what, key='sesame')[0] == ask(what, '--api-key-file', str(tmp_path/'key'))[0] == 0
            assert words in ask(what, key='sesame')[1]
        code, text = ask('show', '--api-key', 'sesame')                              # everybody could read it there
        assert code == 2 and 'set MLXSPEC_API_KEY instead' in text and 'sesame' not in text
        code, text = ask('show', key='se\nsame')
        assert code == 2 and 'characters that no request can carry' in text and 'same' not in text
        assert s.stop() == []


def test_a_key_goes_no_further_than_the_server_that_was_named():
    heard = []
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            heard.append((self.server is elsewhere, self.headers['Authorization']))
            self.send_response(200 if self.server is elsewhere else 302)
            self.send_header('Location', f'http://127.0.0.1:{elsewhere.server_port}/')
            self.end_headers()
            self.wfile.write(b'{}')
        def log_message(self, *args): pass
    with http.server.HTTPServer(('127.0.0.1', 0), Answers) as named, http.server.HTTPServer(('127.0.0.1', 0), Answers) as elsewhere:
        for s in (named, elsewhere): threading.Thread(target=s.serve_forever, daemon=True).start()
        assert policy_cli.read_live(f'http://127.0.0.1:{named.server_port}', b'sesame', T) == {}
        for s in (named, elsewhere): s.shutdown()
    assert heard == [(False, 'Bearer sesame'), (True, None)]


# ---- in this process

@pytest.fixture(scope='module')
def cache(tmp_path_factory): return tmp_path_factory.mktemp('shared-cache')


@contextlib.contextmanager
def application(tiny, cache, given=None, drafter=None, **env):
    "The application as `serve` builds it, and its engine."
    environ = dict(MLXSPEC_MODEL=str(tiny[0]), MLXSPEC_DRAFTER=drafter or str(tiny[1]), MLXSPEC_CACHE_DIR=str(cache))
    settings = load_settings(given, environ | {f'MLXSPEC_{k}': v for k, v in env.items()}, [])
    with Engine.load(settings=settings) as engine:
        host = server.Host(engine, make_params=settings.params)
        client = TestClient(server.make_app(host), base_url='http://127.0.0.1')
        client.engine, client.policy = engine, lambda: client.get('/v1/internal/mtp-policy').json()
        yield client


SET = dict(drafter=dict(drafter='lookup'), mode=dict(SCHEDULER_MODE='ar_batch'), exactness=dict(EXACTNESS='off'), allowed=dict(MTP_ALLOW_INEXACT='1'), adaptive=dict(MTP_ADAPTIVE='0'),
           on=dict(ENABLE_MTP_B1='1'), off=dict(ENABLE_MTP_B1='0'), hint={}, gate=dict(MTP_GATE='off'), forced=dict(MTP_GATE='force'))
# Pairs of conditions, and for the veto every triple; what is one variable twice or needs a probe that did not run is left out.
WORLDS = [w for n in range(4) for w in itertools.combinations(SET, n)
          if not {'on', 'off'} <= {*w} and not {'gate', 'forced'} <= {*w} and (n < 3 or {'exactness', 'allowed'} <= {*w})]


def expected(w):
    "The list of the contract, from the strongest down."
    pin = True if 'on' in w else False if 'off' in w else None
    if 'drafter' in w or 'mode' in w: return 'no_mtp_dispatch', False
    if 'exactness' in w and 'allowed' not in w: return 'exactness_declined', False
    if 'adaptive' in w: return 'adaptive_disabled', bool(pin)                        # no Apple GPU: the static default is off
    if pin is not None: return 'forced', pin
    return ('settled', True) if 'hint' in w else ('profiling', True)


@pytest.fixture(scope='module')
def hinted(tiny, tmp_path_factory):
    "A cache with an enable for every way to be exact."
    cache = tmp_path_factory.mktemp('hinted')
    for env in ({}, dict(EXACTNESS='off', MTP_ALLOW_INEXACT='1')):
        with pytest.MonkeyPatch.context() as m, contextlib.ExitStack() as stack:
            m.setattr('mlxspec.device.detect', amd)
            stack.enter_context(application(tiny, cache, **env)).engine._plan.pilot.policy.hints.save(ENABLE)
    return cache


@pytest.mark.parametrize('world', WORLDS, ids='-'.join)
def test_precedence(world, tiny, cache, hinted, monkeypatch):
    monkeypatch.setattr('mlxspec.device.detect', amd)
    env = dict(itertools.chain.from_iterable(SET[c].items() for c in world))
    with application(tiny, hinted if 'hint' in world else cache, **env) as c:
        body = c.policy()
        assert state(body) == expected(world) and set(body) == WIRE
        assert [body[k] for k in GPU] == ['Amd', 'AMD Radeon 8060S Graphics', 'gfx1151'] # in every state
        assert body['starved_by'] == ('gate_off' if 'gate' in world and body['state'] == 'profiling' else None)
        assert c.get('/health').json()['observability']['mtp_policy']['status'] == body['state']
    assert not any(h.verdict != 'enable' for _, h in all_hints(hint_dir(cache)))


def amd(): return cpu(gpu_vendor='Amd', gpu_device='AMD Radeon 8060S Graphics', gpu_architecture='gfx1151')


def cpu(**more):
    from mlxspec.device import Device
    return Device(**dict(hardware='cpu-x86_64-Unknown-0c', gpu_vendor='Unknown', gpu_device=None, gpu_architecture=None, memory_bytes=None,
                         compiles=False) | more)


@pytest.mark.parametrize('given, env, k', [({}, {}, 3), ({}, '4', 4), (dict(draft_block_size='2'), '4', 2), ({}, ' ', 3)])
def test_the_flag_beats_the_variable_for_k(given, env, k, tiny, cache):
    with application(tiny, cache, given, **(dict(DRAFT_BLOCK_SIZE=env) if env else {})) as c: assert c.policy()['block_size'] == k


@pytest.mark.parametrize('word, pin', [('1', True), (' TRUE ', True), ('Yes', True), ('on', True), ('0', False), ('False', False), ('no', False), ('OFF', False)])
def test_words_for_yes_and_no(word, pin, tiny, cache):
    with application(tiny, cache, ENABLE_MTP_B1=word) as c: assert state(c.policy()) == ('forced', pin)


@pytest.mark.parametrize('name', ['MTP_ADAPTIVE', 'ENABLE_MTP_B1', 'MTP_ALLOW_INEXACT', 'DRAFT_BLOCK_SIZE', 'EXACTNESS', 'MTP_GATE'])
def test_a_wrong_word_is_an_error_at_start(name):
    with pytest.raises(ConfigError, match=f'MLXSPEC_{name} must be '): load_settings({}, {f'MLXSPEC_{name}': 'maybe'}, [])
    assert load_settings({}, {f'MLXSPEC_{name}': '  '}, []) == load_settings({}, {}, [])


@pytest.mark.parametrize('said, want', [('', 'auto'), ('  ', 'auto'), (' Off ', 'off'), ('OFF', 'off'), ('AUTO', 'auto')])
def test_the_variable_decides_which_blas_is_loaded_and_nothing_else_does(said, want, tmp_path):
    "No flag, no file: it is read before anything else. What is bound is part of what a verdict is about."
    (tmp_path/'mlxspec.toml').write_text('max_tokens = 3')
    code = ("import mlxspec; from mlxspec import blas; from mlxspec.config import load_settings; s = load_settings(); blas.require(); "
            "print(blas.report().choice, blas.report().library == 'bundled', s.max_tokens, blas.report().label)")
    out = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, env={**os.environ, 'MLXSPEC_BLAS': said}, capture_output=True, text=True)
    choice, bundled, tokens, label = out.stdout.split()
    assert (choice, tokens, out.stderr) == (want, '3', '') and (want == 'auto' or bundled == str(sys.platform == 'linux')) and label
    assert cli.main(['serve', '--blas', 'off']) == 2
    (tmp_path/'mlxspec.toml').write_text('blas = "off"')
    with pytest.raises(ConfigError, match='set MLXSPEC_BLAS instead'): load_settings({}, {}, [tmp_path/'mlxspec.toml'])


@pytest.mark.parametrize('said, name, want', [(' OFF ', 'exactness', 'off'), ('Force', 'mtp_gate', 'force'), ('Consistent', 'exactness', 'consistent')])
def test_words_are_read_in_any_case(said, name, want): assert getattr(load_settings({}, {f'MLXSPEC_{name.upper()}': said}, []), name) == want


def test_the_cache_dir_decides_which_verdict_is_found(tiny, cache, hinted, monkeypatch):
    monkeypatch.setattr('mlxspec.device.detect', amd)
    for where, want in ((hinted, 'settled'), (cache, 'profiling')):
        with application(tiny, where) as c: assert c.policy()['state'] == want


def test_the_endpoint_does_not_wait_for_the_owner_thread(tiny, cache):
    with application(tiny, cache) as c:
        want, busy, go = c.policy(), threading.Event(), threading.Event()
        owner = threading.Thread(target=c.engine.call, args=(lambda: (busy.set(), go.wait(T)),), daemon=True)
        owner.start()
        assert busy.wait(T)
        try: answers = [c.get('/v1/internal/mtp-policy') for _ in range(5)]
        finally: go.set()
        owner.join(T)
        assert [(r.status_code, r.json()) for r in answers] == [(200, want)] * 5


# ---- a hint file that is not what it should be

def cut(f): f.path.write_bytes(f.path.read_bytes()[:99])
def newer(f): f.path.write_bytes(seal(dict(verdict='enable', strange=[1]), f.key, HINT_VERSION + 1))
def foreign(f): f.path.write_bytes(encode(ENABLE, replace(f.key, target='another')))
def a_directory(f): (f.path.unlink(), f.path.mkdir())
def a_file_in_the_way(f): (shutil.rmtree(f.path.parent), f.path.parent.write_text('not a directory'))
def unreadable(f): f.path.chmod(0)
def read_only(f): (f.path.unlink(), f.path.parent.chmod(0o500))


@pytest.fixture
def stored(hinted, tmp_path, monkeypatch):
    "A cache with an enable, of the test's own."
    monkeypatch.setattr('mlxspec.device.detect', amd)
    shutil.copytree(hinted, tmp_path/'cache')
    (key,) = [k for k, _ in all_hints(hint_dir(tmp_path/'cache')) if k.strategy != 'none']
    return HintFile(hint_dir(tmp_path/'cache'), key)


def decline(p): # on the owner thread
    while p.profiling: p.record(Sample(.010, .050, 25, 30, (3, 2)))


@pytest.mark.parametrize('harm, words, kept', [
    (cut, 'is ignored (not JSON) and measured again', True), (newer, 'is ignored (version 2, not 1) and measured again', True),
    (foreign, 'is ignored (another pairing, machine or version) and measured again', True), (a_directory, 'in memory only: ', False),
    (a_file_in_the_way, 'in memory only: ', False),
    *(pytest.param(*p, marks=pytest.mark.skipif(os.name == 'nt' or os.geteuid() == 0, reason='the superuser may do everything')) for p in (
        (unreadable, 'in memory only: ', True), (read_only, 'in memory only: ', False)))], ids=lambda v: getattr(v, '__name__', ''))
def test_trouble_with_the_file_is_one_warning_and_a_new_measurement(harm, words, kept, tiny, stored, caplog):
    cache = stored.path.parent.parent
    harm(stored)
    try:
        with application(tiny, cache) as c:
            assert state(c.policy()) == ('profiling', True)
            c.engine.call(decline, c.engine._plan.pilot.policy)
            assert state(c.policy()) == ('settled', False) and len(request(c.engine, 9).future.result(T).tokens) == 9
        said = [r.getMessage() for r in caplog.records if r.levelname == 'WARNING']
        assert len(said) == 1 and words in said[0]
        with application(tiny, cache) as c: assert state(c.policy()) == (('settled', False) if kept else ('profiling', True))
    finally: stored.path.parent.chmod(0o700)


@pytest.mark.skipif(os.name == 'nt', reason='no limits')
def test_a_disk_without_room_is_one_warning_and_the_old_file_stays(tiny, stored, caplog):
    "The system refuses the write half-way, as a full disk does."
    import resource
    stored.save(replace(ENABLE, verdict='decline', written_at=1.))                   # too old to be believed, but there
    before = {x.name: x.read_bytes() for x in stored.path.parent.iterdir()}
    with application(tiny, stored.path.parent.parent) as c:
        p, limits = c.engine._plan.pilot.policy, resource.getrlimit(resource.RLIMIT_FSIZE)
        assert p.profiling
        old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        try: c.engine.call(decline, p)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, old)
        assert state(c.policy()) == ('settled', False)
    assert {x.name: x.read_bytes() for x in stored.path.parent.iterdir()} == before
    said = [r.getMessage() for r in caplog.records if r.levelname == 'WARNING']
    assert len(said) == 1 and 'in memory only' in said[0] and 'File too large' in said[0]


def test_two_servers_at_once_share_a_cache(tiny, tmp_path):
    "Both measure; the later verdict is kept whole, and the next server has it."
    with Served(tmp_path, tiny) as a, Served(tmp_path, tiny) as b:
        for s in (a, b): s.ready()
        for _ in range(40):
            bodies = [s.policy() for s in (a, b)]
            if all(x['state'] == 'settled' for x in bodies): break
            for s in (a, b): s.ask()
        assert [state(x) for x in bodies] == [('settled', False)] * 2
        assert a.stop() == b.stop() == []
    assert {p.suffix for p in hint_dir(tmp_path).iterdir() if p.name != '.lock'} == {'.json'} # nothing half written, nothing put aside
    with application(tiny, tmp_path) as c:
        again = c.policy()
        assert any({k for k in WIRE if again[k] != x[k]} == {'restored'} for x in bodies)


# ---- who is measured

def request(engine, n, on_chunk=lambda chunk: None, **more):
    return engine.submit(engine.encode([dict(role='user', content='ab cd')]), Params(max_tokens=n, ignore_eos=True, **more), on_chunk)


@pytest.mark.parametrize('mode', ['cooperative', 'mtp_batch', 'mtp_cohort_experimental'])
def test_only_requests_that_were_alone_are_samples(mode, tiny, tmp_path):
    with application(tiny, tmp_path, SCHEDULER_MODE=mode) as c:
        others = []
        def another(chunk): # somebody comes when there is evidence enough
            if not others and job.stats.completion_tokens > 90: others.append(request(c.engine, 24))
        job = request(c.engine, 140, another)
        job.future.result(T), others[0].future.result(T)
        crowd = [request(c.engine, 48) for _ in range(4)]
        for j in crowd: j.future.result(T)
        assert job.stats.arms['qwen3_5_mtp'] and c.policy()['samples'] == 0
        for _ in range(6):
            if c.policy()['samples']: break                                          # the first may be too short to tell
            assert request(c.engine, 96).future.result(T).text.startswith(crowd[0].future.result(T).text[:40])
        assert c.policy()['samples'] == 1


@pytest.mark.parametrize('drafter', [(), ('prediction',)], ids=['by itself', 'configured'])
def test_a_prediction_is_used_while_the_head_is_measured(drafter, tiny, tmp_path):
    with application(tiny, tmp_path, drafter=','.join([*drafter, str(tiny[1])]), MTP_GATE='force') as c:
        want = request(c.engine, 48).future.result(T)
        assert c.policy()['samples'] == 1                                            # nothing was predicted: measured as ever
        r = request(c.engine, 48, prediction=tuple(t.id for t in want.tokens)).future.result(T)
        assert r.text == want.text and r.stats.arms['prediction'] and 'profiling' not in r.stats.reasons
        assert r.stats.sources['prediction'][1] > 24
        assert (c.policy()['state'], c.policy()['samples']) == ('profiling', 1)


# ---- what a verdict depends on

def test_the_key_changes_with_everything_that_was_measured(tiny, tmp_path, monkeypatch):
    s, head = Settings(), lambda path: SimpleNamespace(path=path)
    target = lambda path, adapter=None, mode='': SimpleNamespace(path=path, name='tiny', adapter=adapter, kv=SimpleNamespace(mode=mode))
    key = lambda **kw: pairing.hint_key(**dict(target=target(tiny[0]), head=head(tiny[1]), machine=cpu(), k=3, s=s) | kw).name
    others = dict(target=target(save_tiny(tmp_path/'tiny', 'qwen3', seed=9)), head=head(save_tiny_mtp(tmp_path/'head', seed=9)), # of the same names
                  machine=cpu(hardware='M5-16c'), k=4, strategy='row_attention')
    keys = [key(), key(target=target(tiny[0], mode='q8')), key(target=target(tiny[0], tiny[1])), *(key(**{name: value}) for name, value in others.items()),
            *(key(s=s.replace(**o)) for o in (dict(quantize_drafter=4), dict(quantize_drafter=8), dict(compile=True), dict(compile=False)))]
    for name, value in dict(version=lambda package: 'next' if package == 'mlx' else version(package), kernels=lambda machine: 'another BLAS').items():
        with monkeypatch.context() as m:
            m.setattr(pairing, name, value)
            keys.append(key())
    with monkeypatch.context() as m:
        m.setattr(pairing, 'version', lambda package: 'next' if package == 'mlx-lm' else version(package))
        keys.append(key())
    assert len(set(keys)) == len(keys) == 15 and keys[0] == key()
    gpu = cpu(hardware='cuda-sm_90-Unknown-0c', gpu_device='a GPU')
    assert pairing.kernels(gpu) == '' and pairing.kernels(cpu()) == pairing.blas.report().label


def test_steps_are_timed_by_a_clock_that_nobody_sets(tiny, tmp_path, monkeypatch):
    "The time of day stands still, then runs backwards: samples come all the same."
    day = itertools.chain([1.7e9] * 50, itertools.count(1.7e9, -60))
    with application(tiny, tmp_path) as c:
        monkeypatch.setattr(time, 'time', lambda: next(day))
        for _ in range(6):
            if c.policy()['samples']: break
            request(c.engine, 96).future.result(T)
        monkeypatch.undo()
        body = c.policy()
        assert body['samples'] == 1 and body['starved_by'] is None and body['plain_ms_per_token'] > 0 and body['spec_ms_per_token'] > 0


def test_the_gpu_is_known_while_the_model_loads(monkeypatch):
    monkeypatch.setattr('mlxspec.device.detect', amd)
    with socket.create_server(('127.0.0.1', 0)) as s: port = s.getsockname()[1]
    loaded, told = threading.Event(), []
    def load(settings):
        loaded.wait(T)
        raise ConfigError('That is enough.')
    def client():
        while not told: # from the first answer on
            with contextlib.suppress(urllib.error.URLError, ConnectionError): told.append(get(f'http://127.0.0.1:{port}/v1/internal/mtp-policy'))
        loaded.set()
    asking = threading.Thread(target=client, daemon=True)
    asking.start()
    with pytest.raises(ConfigError, match='That is enough'): serving.serve(Settings(port=port), load)
    asking.join(T)
    assert state(told[0]) == ('worker_not_ready', None) and set(told[0]) == WIRE
    assert [told[0][k] for k in GPU] == ['Amd', 'AMD Radeon 8060S Graphics', 'gfx1151']


# ---- golden bodies

@pytest.fixture
def apple(monkeypatch, tmp_path):
    "An injected device, and a tiny pair in directories with the names of the contract's examples."
    def pair(target, drafter, hardware):
        m = cpu(hardware=hardware, gpu_vendor='Apple', gpu_device='Apple M5 Max', gpu_architecture='applegpu_g17s')
        monkeypatch.setattr('mlxspec.device.detect', lambda: m)
        return save_tiny(tmp_path/target, 'qwen3'), save_tiny_mtp(tmp_path/drafter)
    return pair


def golden(client, name):
    snap, want = EXAMPLES[name]
    body = client.policy()
    assert {k: body[k] for k in CONTRACT} == want and list(body)[:len(CONTRACT)] == CONTRACT
    assert {k: body[k] for k in GPU} == {k: getattr(snap, k) for k in GPU}


def test_golden_bodies(apple, tmp_path, monkeypatch):
    pair, k = apple('Gemma4-12B', 'Gemma4-12B-MTP', 'M5-16c'), dict(DRAFT_BLOCK_SIZE='4')
    with application(pair, tmp_path, **k) as c:
        policy = c.engine._plan.pilot.policy
        for kept in ((20, 13, 10), (20, 14, 10)): c.engine.call(policy.record, Sample(.010, .018, 25, 25 + sum(kept), kept))
        golden(c, 'profiling')                                                       # 87 of 150 drafts: .58 as it is
        policy.hints.save(replace(ENABLE, acceptance_rate=.62, estimate=EST._replace(kept=(.8, .6, .5))))
    with application(pair, tmp_path, **k) as c: golden(c, 'settled')
    with application(pair, tmp_path, drafter='lookup') as c: golden(c, 'no_drafter')
    with application(pair, tmp_path, MTP_ADAPTIVE='off') as c: assert state(c.policy()) == ('adaptive_disabled', True) # the static default of an M5
    monkeypatch.setattr('mlxspec.exactness.Exactness.decline_detail', WHY)
    pair = apple('gemma-4-31b-it-4bit', 'gemma-4-31b-it-assistant-bf16', 'M5-40c')
    with application(pair, tmp_path, **k) as c: golden(c, 'declined')


# ---- offline only

def test_num_draft_tokens_never_reaches_the_key(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv('MLXSPEC_CACHE_DIR', str(tmp_path))
    with application(tiny, tmp_path) as c: c.engine._plan.pilot.policy.hints.save(replace(ENABLE, verdict='decline', written_at=time.time()))
    files = lambda: {p.name: p.read_bytes() for p in hint_dir(tmp_path).iterdir() if p.suffix == '.json'}
    before, touched = files(), []
    for call in ('load', 'save'): monkeypatch.setattr(HintFile, call, lambda self, *a: touched.append(asdict(self.key)))
    for n in (1, 2, 5):
        assert cli.main(['generate', '-p', 'ab cd', '--model', str(tiny[0]), '--drafter', str(tiny[1]), '--json', '--max-tokens', '60',
                         '--mtp-gate', 'force', '--num-draft-tokens', str(n)]) == 0
        m = json.loads(capsys.readouterr().out)['metrics']['speculative_decoding']
        assert max(m['per_step_drafted']) == n                                       # K = N + 1, for this run
    assert not touched and files() == before
    monkeypatch.undo()
    with application(tiny, tmp_path) as c: assert (c.policy()['block_size'], state(c.policy())) == (3, ('settled', False))


@pytest.mark.parametrize('args, words', [(['serve', '--num-draft-tokens', '3'], 'num-draft-tokens'), (['generate', '-p', 'x', '--num-draft-tokens', '16'], 'between 0 and 15'),
                                         (['generate', '-p', 'x', '--num-draft-tokens', 'x'], 'num-draft-tokens')])
def test_num_draft_tokens_belongs_to_generate(args, words, capsys):
    assert cli.main(args) == 2 and words in capsys.readouterr().err
    assert 'num_draft_tokens' not in cli.TABLE                                       # no variable, no key in a file
