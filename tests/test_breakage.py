"What breaks other engines: broken directories, prompts of everything, ids that no model has, forks, loops that went away."
import asyncio
import json
import logging
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import harness as h
import mlx.core as mx
import numpy as np
import platformdirs
import pytest
from test_lanes import Floors

from mlxspec import Engine, policy_cli, stream_generate
from mlxspec.config import MODES, config_files
from mlxspec.core import ConfigError, EngineError, MlxspecError, ModelError, Params, RequestError
from mlxspec.hints import hint_dir
from mlxspec.scheduler import ModelWorkScheduler
from mlxspec.target import Target
from mlxspec.tiny import byte_tokenizer, save_tiny, tiny_model

pytestmark = pytest.mark.usefixtures('quiet')


def say(name, **keys): # change a JSON file; None takes a key away
    def change(d):
        old = json.loads((d/name).read_text())
        (d/name).write_text(json.dumps({k: v for k, v in (old | keys).items() if v is not None}))
    return change


def put(name, data): return lambda d: (d/name).write_bytes(data)
def cut(name, n): return lambda d: (d/name).write_bytes((d/name).read_bytes()[:n])
def config(**keys): return say('config.json', **keys)


BROKEN = dict(
    empty_config=put('config.json', b''), list_config=put('config.json', b'[]'), null_config=put('config.json', b'null'), bare_config=put('config.json', b'{}'),
    binary_config=put('config.json', b'\xff\0'), cut_weights=cut('model.safetensors', 20000), cut_header=cut('model.safetensors', 1000),
    empty_weights=cut('model.safetensors', 0), no_weights=lambda d: (d/'model.safetensors').unlink(), cut_tokenizer=cut('tokenizer.json', 100),
    no_tokenizer=lambda d: (d/'tokenizer.json').unlink(), binary_tokenizer_config=put('tokenizer_config.json', b'\xff'),
    strange_type=config(model_type='../x'), no_type=config(model_type=None), no_layers=config(num_hidden_layers=None), other_size=config(hidden_size=64),
    other_vocabulary=config(vocab_size=100), more_layers=config(num_hidden_layers=3), fewer_layers=config(num_hidden_layers=1), no_heads=config(num_attention_heads=0),
    untied=config(tie_word_embeddings=False), text_as_number=config(rope_theta='x'), text_as_dict=config(rope_scaling='x'), eos_text=config(eos_token_id='x'),
    context_text=config(max_position_embeddings='12'), generation_list=put('generation_config.json', b'[]'), own_code=config(model_file='x.py'))


@pytest.mark.parametrize('how', BROKEN)
def test_a_broken_directory_is_one_sentence(how, tmp_path):
    BROKEN[how](save_tiny(tmp_path/'tiny', 'llama'))
    with pytest.raises(ModelError) as e: Target.load(tmp_path/'tiny')
    text = str(e.value)
    assert 'tiny' in text and '\n' not in text and text.endswith('.') and not text.endswith((':.', ': .')) and len(text) < 300


@pytest.fixture(scope='module')
def engine(tmp_path_factory):
    with Engine.from_model(tiny_model('llama'), byte_tokenizer(), cache_dir=tmp_path_factory.mktemp('cache')) as e: yield e


@pytest.mark.parametrize('prompt', [None, 5, b'abc', [True, False], [1.0], [1, 'a'], [[1]], {'role': 'user'}, (i for i in [1]), {1, 2},
                                    np.array([1, 2]), mx.array([1]), '\ud800', [{'role': 'user', 'content': '\udc00'}], [2**70], [-1], [264], [], ''])
def test_a_prompt_of_something_else_is_refused(engine, prompt):
    with pytest.raises(RequestError): engine.generate(prompt, max_tokens=2)
    with pytest.raises(RequestError): next(engine.stream(prompt, max_tokens=2))


def test_ids_that_the_model_does_not_have_never_reach_a_kernel(tmp_path):
    for i, ids in enumerate(([10**9, 258], -1, 10**9)):
        path = save_tiny(tmp_path/str(i), 'llama')
        config(eos_token_id=ids)(path)
        t = Target.load(path)
        assert t.eos <= {258}
        with Engine.load(path, cache_dir=tmp_path/'cache') as e: assert e.generate([65], max_tokens=4, min_tokens=3).stats.completion_tokens >= 3
    model, tok = tiny_model('llama'), byte_tokenizer()
    for prompt, more in (([264], {}), ([-1], {}), ([True], {}), (5, {}), ([], {}), ([65], dict(logit_bias={264: 1})), ([65], dict(logit_bias={-1: 1}))):
        with pytest.raises((ConfigError, RequestError)): next(stream_generate(model, tok, prompt, 2, repetition_penalty=1.3, **more))


def test_a_forked_process_is_told_at_once():
    scheduler = ModelWorkScheduler()
    assert scheduler.submit_foreground(int, '5').result(10) == 5 and scheduler.alive
    pid = os.fork()
    if pid == 0: # nothing of pytest may go on here
        signal.alarm(20)
        error = scheduler.submit_foreground(int, '5').exception(5)
        os._exit(7 if 'fork' in str(error) and not scheduler.alive and scheduler.shutdown() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert scheduler.submit_foreground(int, '6').result(10) == 6 and scheduler.shutdown()


def test_the_owner_cannot_wait_for_itself(engine):
    for wait in (lambda: engine.generate([65]), lambda: next(engine.stream([65])), lambda: engine.call(int)):
        with pytest.raises(EngineError, match='cannot wait for itself'): engine.call(wait)
    assert engine.call(engine.submit, [65], Params(max_tokens=2)).future.result(60).stats.completion_tokens == 2


def test_an_event_loop_that_went_away_is_no_failure(engine, caplog):
    logging.getLogger('mlxspec').setLevel(logging.WARNING)
    async def leave():
        async for _ in engine.astream([65, 66], max_tokens=400, ignore_eos=True): return
    before = engine.snapshot()['scheduler']['failed']
    for _ in range(3): asyncio.run(leave())
    engine.generate([65], max_tokens=1)
    assert not caplog.records and engine.snapshot()['scheduler']['failed'] == before


NUMBERS = dict(temperature=(1e-300, 1e-39, 2), top_p=(1e-300, 1e-9, 0), top_k=(1, 10**9), min_p=(1e-320, 1), seed=(-10**30, 2**64),
               repetition_penalty=(.001, 100), repetition_context_size=(1, 2**16), max_tokens=(10**30,), min_tokens=(10**9,))


@pytest.mark.parametrize('name, value', [(n, v) for n, vs in NUMBERS.items() for v in vs])
def test_extreme_numbers_change_nothing_about_the_text(engine, name, value):
    more = dict(max_tokens=12, temperature=1., seed=3, repetition_penalty=1.2) | {name: value}
    prompt = [97, 98, 97, 98, 97]
    if name == 'max_tokens': prompt *= 101 # the context ends it
    a, b = (engine.generate(prompt, speculate=s, **more) for s in (True, False))
    assert [t.id for t in a.tokens] == [t.id for t in b.tokens] and a.text == b.text and a.finish_reason == b.finish_reason


@pytest.mark.parametrize('name', ['~nobody-of-this-name/x', 'a' * 5000, 'a/' * 2500, 'x\0y'])
def test_a_path_that_can_be_none(name, tmp_path, monkeypatch):
    for options in (dict(model=name), dict(drafter=name)):
        with pytest.raises(MlxspecError) as e: Engine.load(**options, cache_dir=tmp_path)
        assert '\n' not in str(e.value)


def test_a_user_without_a_home(monkeypatch, tmp_path):
    def homeless(*_): raise RuntimeError('could not determine the home directory')
    monkeypatch.setattr(platformdirs, 'user_config_path', homeless), monkeypatch.setattr(Path, 'home', homeless), monkeypatch.chdir(tmp_path)
    assert config_files(None) == []
    with Engine.from_model(tiny_model('llama'), byte_tokenizer()) as e: assert e.generate([65], max_tokens=2).stats.completion_tokens == 2
    assert policy_cli.show(hint_dir()).startswith('Nothing is stored') and policy_cli.clear(hint_dir()) == '0 stored verdicts removed.'


def test_verdicts_that_nobody_may_read(monkeypatch):
    def forbidden(*_): raise PermissionError(13, 'Permission denied')
    monkeypatch.setattr(policy_cli, 'all_hints', forbidden)
    for ask in (policy_cli.show, policy_cli.export):
        with pytest.raises(ConfigError, match='Cannot read .*: Permission denied'): ask(Path('x'))


LLAMA3 = dict(rope_type='llama3', factor=8., low_freq_factor=1., high_freq_factor=4., original_max_position_embeddings=64)


@pytest.mark.parametrize('kind, more', [('gemma4', {}), ('llama', dict(rope_scaling=LLAMA3))])
def test_a_model_with_lazy_arrays_that_are_no_parameters_may_change_threads(kind, more, tmp_path):
    with Engine.from_model(tiny_model(kind, **more), byte_tokenizer(), cache_dir=tmp_path) as e:
        assert e.generate([65, 66], max_tokens=3, ignore_eos=True).stats.completion_tokens == 3


def test_what_the_device_cannot_compute_is_no_model_for_it(monkeypatch):
    def forward(*_, **__): raise RuntimeError('[GatherMM::eval] Currently only supports float32.')
    monkeypatch.setattr(Target, 'forward', forward)
    with pytest.raises(ModelError, match='^odd does not run as a language model: .*only supports float32.$'): Target(tiny_model('llama'), byte_tokenizer(), {}, 'odd')


# --- two engines in one process ---------------------------------------------------------------------------------------

@pytest.mark.parametrize('kind', ['llama', 'qwen3_5'])
def test_engines_at_work_at_once_do_not_hear_each_other(kind):
    "Each is probed, and each records and takes back what its own thread runs."
    def answers(seeds):
        with Engine.from_model(tiny_model(kind), byte_tokenizer(), mtp_gate='force', drafter='lookup') as e:
            level = e.snapshot()['speculation']['reason']
            runs = [e.generate([65, 66, 67] * 4, max_tokens=24, temperature=1.0, seed=s, ignore_eos=True) for s in seeds]
            return level, [[t.id for t in r.tokens] for r in runs], sum(r.stats.drafted for r in runs)
    alone = answers(range(4))
    with ThreadPoolExecutor(3) as pool: together = list(pool.map(answers, [range(4)] * 3))
    assert alone[0] is None and alone[2] > 0
    assert together == [alone] * 3


@pytest.mark.parametrize('mode', MODES)
def test_a_grammar_that_raises_ends_its_own_request(mode):
    "In the middle of a step that it shares with others, in a block of drafts too."
    want = h.run(h.target('llama'), b'abc', max_tokens=12).output
    f = Floors(mode, h.target('llama'))
    def bad(output):
        if len(output) > 3: raise ValueError('lost')
    def ask(prompt, mask=None): return f.request(prompt, Params(max_tokens=12, ignore_eos=True), [h.drafter('oracle', h.target('llama'), want)], mask=mask)
    victim, *others = ask(b'abd', bad), ask(b'abc'), ask(b'abc')
    for r in (victim, *others): f.floor.enter(r)
    f.run()
    assert isinstance(victim.future.exception(0), EngineError) and len(victim.seq.emitted) <= 4
    assert all([t.id for t in r.future.result(0).tokens] == want for r in others)


def test_a_head_that_fails_for_all_at_once_costs_no_text(monkeypatch):
    "It drafts for several sequences in one call, which raises; each goes on without its drafts, and is asked again later."
    target, f = h.target('llama'), Floors('mtp_batch', h.target('llama'))
    head, calls = h.drafter('mtp', target, []), []
    propose = head.propose
    def raises(states, ks, laws):
        calls.append(len(states))
        if len(states) > 1: raise ValueError('on purpose')
        return propose(states, ks, laws)
    monkeypatch.setattr(head, 'propose', raises)
    prompts = [b'abc', b'de', b'fgh']
    rs = [f.request(p, Params(max_tokens=h.N, ignore_eos=True), [head]) for p in prompts]
    for r in rs: f.floor.enter(r)
    f.run()
    assert [[t.id for t in r.future.result(0).tokens] for r in rs] == [h.run(target, p).output for p in prompts]
    assert max(calls) == 3 and len(calls) > 2
