"""Exactness: machines that differ, made on purpose; the promise that a text keeps wherever the probe says so.

No test assumes what a processor does. Inexact machines are a target that is off by one unit in the last place, or OpenBLAS with
another kernel set and number of threads in a process of its own, where only the promise is tested and not the verdict."""
import json
import logging
import os
import re
import subprocess
import sys

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec import cli, pairing
from mlxspec.config import Settings
from mlxspec.core import PairError, Params
from mlxspec.device import Device
from mlxspec.engine import Engine
from mlxspec.exactness import (Difference, Exactness, Table, Trial, answers, decline_sentence, difference, finish, first_contexts, next_trial, not_run,
                               random_ids)
from mlxspec.strategies import STRATEGIES, OneWay, row_by_row
from mlxspec.target import Target
from mlxspec.tiny import byte_tokenizer, save_tiny, tiny_model

DECLINE = re.compile(r'verify block position \d+ differs from the single-token chain in \d+ of \d+ logit bytes\.'
                     r'( Row-wise attention did not make it exact either\.)?( Padding did not make it consistent either\.)?')
CPU = Device('cpu-x86_64-Unknown-0c', 'Unknown', None, None, None, False)
BOTH = STRATEGIES[:2]


@pytest.fixture(scope='module', autouse=True)
def uncompiled(): mx.disable_compile()


def off_by_one(model, least=2, row=None):
    "One unit in the last place of one logit of one row (None: of every row), in forwards of at least `least` rows."
    base = type(model)
    def call(self, ids, **kw):
        out = base.__call__(self, ids, **kw)
        if not least <= ids.shape[1] <= 16: return out # a prompt is read as ever
        bits = mx.view(out, mx.int32)
        rows = slice(None) if row is None else min(row, ids.shape[1] - 1)
        bits[:, rows, 7] += 1
        return mx.view(bits, mx.float32)
    model.__class__ = type(f'OffByOne{least}{row}', (base,), {'__call__': call, '__module__': base.__module__})
    return model


def target(kind='llama', dtype=mx.float32, **fault):
    model = tiny_model(kind, dtype)
    return Target(off_by_one(model, **fault) if fault else model, byte_tokenizer(), dict(max_position_embeddings=200), kind)


def probed(t, k=8, **kw):
    x = Exactness(t, k, **kw)
    finish(x.probe())
    return x


@pytest.mark.parametrize('least', range(2, 9))
def test_blocks_are_as_wide_as_they_are_exact(least):
    x = probed(target(least=least))
    assert x.declined == (least == 2)
    assert [x.level(k, 50) for k in range(1, 9)] == ['identical' if k < least else 'none' for k in range(1, 9)]
    assert x.max_width(50) == max(1, least - 1) and x.max_width(50, 2) == min(2, max(1, least - 1))


@pytest.mark.parametrize('row', range(3))
def test_the_first_wrong_row_is_named(row):
    x = probed(target(least=row + 1 if row else 2, row=row), k=row + 2)
    first = next(t.first for t in x.trials if t.width == row + 2 and t.strategy == 'block')
    assert first == Difference(row, 1, 264 * 4)
    if row < 2: assert DECLINE.fullmatch(x.decline_detail) and f'position {row} differs' in x.decline_detail


@pytest.mark.parametrize('kind', ('llama', 'qwen3', 'gemma2', 'gemma3', 'qwen3_5', 'lfm2'))
@pytest.mark.parametrize('dtype', (mx.float32, mx.bfloat16))
def test_every_kind_of_cache_is_probed_to_the_end(kind, dtype):
    x = probed(target(kind, dtype), k=4)
    assert {t.width for t in x.trials} == {2, 3, 4} and {t.context for t in x.trials} == set(first_contexts(x.target, 4))
    assert all(re.fullmatch('identical|none', x.level(k, n)) for k in range(1, 5) for n in (1, 16, 100, 180))
    cache = x.target.make_cache() # nothing of the probe stays behind
    assert x.target.ways.strategy(2, 0) == 'block' and not any(getattr(c, 'offset', 0) for c in cache)


def test_a_rollback_that_leaves_something_is_not_exact():
    "The state after a rejection is tried, not only the first block."
    t, written = target(), []
    keep_one_more = t.transaction
    def transaction(cache, rows):
        txn = keep_one_more(cache, rows)
        commit = txn.commit
        def wrong(keep):
            commit(keep)
            if 0 < keep < rows:
                for c in cache: c.keys = c.keys + mx.where(mx.arange(c.keys.shape[2])[:, None] == c.offset - 1, 1e-3, 0) # the last row that stays
            written.append(keep)
        txn.commit = wrong
        return txn
    t.transaction = transaction
    assert probed(t, 4).declined and written


def test_a_block_that_writes_something_else_is_not_exact():
    "Logits may be equal to the byte while a last bit of a key is not; later blocks would pay for it."
    t = target()
    forward = t.forward
    def wrong(ids, cache, hidden=False):
        out = forward(ids, cache, hidden)
        if 1 < ids.shape[1] <= 8:
            mx.eval(out.logits)
            keys = mx.view(cache[-1].keys, mx.int32)
            keys[0, 0, cache[-1].offset - 1, 0] += 1
            cache[-1].keys = mx.view(keys, mx.float32)
        return out
    t.forward = wrong
    x = probed(t, 2)
    assert x.declined and x.trials[0].first.differing == 1


def blocks_that_differ(t, x, top, k=8):
    "Blocks the table calls identical that are not, at every length of the context up to `top`: (tokens in the cache, rows)."
    ids, cache, chain, wrong = random_ids(top + k, t.vocab_size, 5), t.make_cache(), t.make_cache(), []
    t.ways = x
    said = [t.step(mx.array([[i]]), chain).logits[0] for i in ids]
    for n in range(top):
        for rows in (r for r in range(2, k + 1) if x.level(r, n) == 'identical'):
            with t.transaction(cache, rows) as txn:
                if difference((txn.forward(mx.array([ids[n:n + rows]])).logits[0], mx.concatenate(said[n:n + rows]))): wrong.append((n, rows))
        t.step(mx.array([[ids[n]]]), cache)
    return wrong


def other_kernels(monkeypatch, t, least, period=1):
    "Attention over so many keys or more, if a multiple of `period`, is rounded differently."
    home, = t.attention
    attend = home.scaled_dot_product_attention
    def other(queries, keys, values, cache, scale, mask, **kw):
        out, n = row_by_row(attend)(queries, keys, values, cache=cache, scale=scale, mask=mask, **kw), keys.shape[2]
        return mx.view(mx.view(out, mx.int32) + 1, mx.float32) if n >= least and n % period == 0 else out
    monkeypatch.setattr(home, 'scaled_dot_product_attention', other)


@pytest.mark.parametrize('kind, least, period', [('llama', 32, 1), ('gemma3', 77, 1), ('qwen3_5', 64, 16), ('llama', 4, 4)])
def test_kernels_that_change_between_two_contexts(monkeypatch, kind, least, period):
    "Wherever the kernels change: no block that is called identical differs, at any length."
    t = target(kind)
    other_kernels(monkeypatch, t, least, period)
    x = probed(t, 4)
    assert not x.declined and x.strategy(4, 100) == 'row_attention' and not blocks_that_differ(t, x, 100, 4)


def test_without_the_sweep_nobody_would_know(monkeypatch):
    "The kernels of the test above, unseen by walks at 16 and 184 tokens."
    from mlxspec import exactness
    t = target()
    other_kernels(monkeypatch, t, 77)
    found = next(s for s in probed(t, 4).trials if s.first)
    assert (found.keys, found.strategy) == (77, 'block')
    monkeypatch.setattr(exactness, 'sweep_all', lambda *a: iter(()))
    x = probed(t, 4)
    assert x.strategy(4, 100) == 'block' and {n + k for n, k in blocks_that_differ(t, x, 100, 4)} == {77, 78, 79}


@pytest.mark.parametrize('kind', ('llama', 'gemma3', 'qwen3_5'))
def test_blocks_are_run_the_way_of_their_own_length(kind):
    "Strategies change with the context: who asks for one names the tokens that are really in the cache."
    import harness as h
    asked = []
    class Spy(OneWay):
        def strategy(self, k, kv_len): asked.append((k, kv_len)); return 'row_attention' if kv_len % 2 else 'block'
        def max_width(self, kv_len, at_most): asked.append((0, kv_len)); return at_most
    t = target(kind)
    t.ways, ids = Spy(), h.Case(kind).ids
    want = h.run(h.target(kind), ids).output
    r = h.run(t, ids, 4, [h.drafter('liar1', t, want)])
    assert r.output == want and r.stats.rounds
    rounds = [n for k, n in asked if k > 1]
    assert rounds == [*range(len(ids) - 1, len(ids) - 1 + 2 * len(rounds), 2)] and {n for k, n in asked if k == 0} == set(rounds)


def test_a_law_that_depends_on_how_many_rows_it_sees(monkeypatch):
    "Noise of a block that differs from the noise of its rows in one place."
    from mlxspec import exactness
    def wrong(keys, vocab, gumbel=exactness.gumbel): return gumbel(keys, vocab) + (mx.arange(vocab) == 7) * (len(keys) > 2) * 1e-3
    monkeypatch.setattr(exactness, 'gumbel', wrong)
    monkeypatch.setattr(exactness, '_laws', {})
    assert [probed(target(), 4).level(k, 50) for k in (2, 3, 4)] == ['identical', 'none', 'none']


# --- engines on a machine that is not exact

def engine(least=2, **options):
    model = off_by_one(tiny_model('llama'), least)
    return Engine.from_model(model, byte_tokenizer(), mtp_gate='force', draft_block_size=6, **options)


def texts(e, **params):
    ids = e.encode('one two three one two three one two')
    runs = [e.generate(ids, max_tokens=30, ignore_eos=True, **params), e.generate(ids, max_tokens=30, ignore_eos=True, speculate=False, **params)]
    return [[t.id for t in r.tokens] for r in runs], runs[0].stats


def test_an_inexact_verify_blocks_every_drafter(caplog):
    with engine() as e:
        (with_, without), s = texts(e)
        spec = e.snapshot()['speculation']
    assert with_ == without and (s.drafted, s.level, s.warning) == (0, 'identical', None)
    assert set(s.reasons) == {'exactness_declined'} and spec['drafters'] == [] and DECLINE.fullmatch(spec['detail'])
    assert [r.getMessage() for r in caplog.records if r.levelname == 'WARNING'] == [spec['detail']]
    with pytest.raises(PairError, match='Speculation is required: verify block position'): engine(speculation='required')


def test_allowed_all_the_same_it_says_so_everywhere(caplog):
    with engine(mtp_allow_inexact=True) as e:
        _, s = texts(e)
        plain = e.generate('one two', max_tokens=3, speculate=False).stats
        spec = e.snapshot()['speculation']
    assert s.drafted and s.level == 'none' == spec['exactness']['level']
    assert re.search(r'The probe saw \d+ argmax flips in \d+ rows; the smallest top-2 gap was [\d.e-]+\.$', s.warning)
    assert s.warning in [r.getMessage() for r in caplog.records]
    assert (plain.level, plain.warning) == ('identical', None)


def test_padded_texts_agree_with_each_other():
    "consistent: the same text with drafts and without, at every K, greedy and sampled."
    found = set()
    for k in (2, 5, 8):
        for drafter in ('lookup', 'none'):
            model = off_by_one(tiny_model('llama'), 2)
            with Engine.from_model(model, byte_tokenizer(), mtp_gate='force', draft_block_size=k, exactness='consistent', drafter=drafter) as e:
                for params in (dict(), dict(temperature=.2, seed=1)):
                    (a, b), s = texts(e, **params)
                    assert a == b and s.level == 'consistent' and bool(s.drafted) == (drafter == 'lookup')
                    found.add((bool(params), tuple(a)))
    assert len(found) == 2


def test_padding_is_no_cure_when_rows_of_a_block_differ():
    x = probed(target(row=0), 3, mode='consistent')
    assert x.declined and x.rows == 1 and x.decline_detail.endswith('Padding did not make it consistent either.')


def test_a_wide_block_is_cut_where_only_narrow_ones_are_exact():
    with engine(least=4) as e:
        (with_, without), s = texts(e)
        assert with_ == without and s.rounds and max(s.per_step_drafted) <= 2 and s.level == 'identical'


def test_a_longer_request_probes_further_first():
    with Engine.from_model(tiny_model('llama'), byte_tokenizer(), mtp_gate='force', draft_block_size=2, config=dict(model_type='llama')) as e:
        x = e._plan.exactness
        before = x.table.known
        for _ in e.stream('one two three one two three', max_tokens=1500): break
        assert x.table.known[:len(before)] == before and x.table.known[-1] >= 1500 and x.max_width(1500) == 2
        assert e.generate('one two', max_tokens=1500, ignore_eos=False, speculate=False).stats.phases.get('probe') is None


# --- the memo

def test_the_memo_is_keyed_by_what_a_verdict_depends_on(tmp_path, monkeypatch):
    t = Target.load(save_tiny(tmp_path / 'tiny', 'llama'))
    s, drafters = Settings(cache_dir=tmp_path / 'cache', draft_block_size=3), (pairing.build('lookup', t),)
    runs = []
    step = Target.step
    monkeypatch.setattr(Target, 'step', lambda *a, **k: (runs.append(1), step(*a, **k))[1])
    def forwards(s=s, machine=CPU):
        runs.clear()
        pairing.make_exactness(t, drafters, machine, s)
        return len(runs)
    first = forwards()
    assert first and forwards() == 0
    assert forwards(s.replace(draft_block_size=4)) and forwards(machine=Device('cpu-arm64-Unknown-0c', 'Unknown', None, None, None, False))
    assert forwards(s.replace(cache_dir=tmp_path / 'other'))
    versions = dict(mlx='0.99.0')
    monkeypatch.setattr(pairing, 'version', lambda name: versions.get(name, '1.0'))
    assert forwards() == first and forwards() == 0 # a new library is a new machine
    monkeypatch.setattr(pairing.blas, 'report', lambda: pairing.blas.BlasReport('auto', 'libother.so', 'Core', 3))
    assert forwards() == first and forwards() == 0
    for p in (tmp_path / 'cache' / 'exactness').glob('*.json'): p.write_text('{"trials": [')
    logging.disable(logging.WARNING)
    assert forwards() == first
    logging.disable(logging.NOTSET)


# --- sentences and the table

def trial(context, width, strategy, exact): return Trial(context, width, strategy, None if exact else Difference(1, 12, 8192), 1., .01, 8, 0, .5, None)


def test_sentences():
    one = [trial(16, 2, 'block', False)]
    assert decline_sentence(one) == 'verify block position 1 differs from the single-token chain in 12 of 8192 logit bytes.'
    assert decline_sentence([*one, trial(16, 2, 'row_attention', False)]) == decline_sentence(one) + ' Row-wise attention did not make it exact either.'
    assert decline_sentence([*one, trial(1056, 3, 'block', True)]) is not None # only the short context counts
    assert decline_sentence([*one, trial(16, 3, 'block', True)]) is None
    assert not_run('K is 1') == 'exactness probe did not run: K is 1.'


exactness = st.dictionaries(st.tuples(st.sampled_from([8, 16, 300, 1056]), st.sampled_from(BOTH)), st.booleans())


@settings(max_examples=30, derandomize=True, deadline=None)
@given(exactness, st.integers(1, 4))
def test_a_width_is_always_decided_and_never_beyond_what_was_seen(exact, n):
    contexts, trials = [8, 16, 300, 1056][:n], []
    while todo := next_trial(trials, contexts, 4, BOTH):
        assert todo not in [(t.context, t.strategy) for t in trials]
        trials.append(trial(todo[0], 4, todo[1], exact.get(todo, False)))
    table = Table.of(trials, 4)
    for kv_len in (1, 8, 9, 16, 17, 299, 301, 1056, 1057, 5000):
        s = table.exact(4, kv_len)
        near = {max((c for c in contexts if c <= kv_len), default=contexts[0]), min((c for c in contexts if c >= kv_len), default=contexts[-1])}
        if s: assert kv_len <= contexts[-1] + 4 and all(exact.get((c, s)) for c in near)
    for i, c in enumerate(contexts[:len(table.known)]): # what is exact everywhere is found
        for s in BOTH:
            if all(exact.get((c, s)) for c in contexts): assert (i, 4) in table.ways or c not in table.known


def test_the_cheapest_exact_strategy_wins():
    trials = [trial(16, 2, s, True) for s in ('row_attention', 'block')]
    assert answers(trials) == {(0, 2): 'block'}


# --- the command

def test_command(tmp_path, capsys, monkeypatch):
    args = ['probe', '--model', str(save_tiny(tmp_path / 'tiny', 'llama')), '--draft-block-size', '3', '--cache-dir', str(tmp_path / 'cache'), '--json']
    assert cli.main(args) == 0
    body = json.loads(capsys.readouterr().out)
    assert body['identical'] and {(t['width'], t['strategy']) for t in body['trials']} == {(k, s) for k in (2, 3) for s in BOTH}
    assert all(t['cost'] > 0 and t['step_s'] > 0 for t in body['trials']) and list((tmp_path / 'cache' / 'exactness').glob('*.json'))
    load = Target.load
    monkeypatch.setattr(Target, 'load', lambda path, **kw: Target(off_by_one(load(path).model), byte_tokenizer(), dict(max_position_embeddings=200), 'fake'))
    assert cli.main(args[:-1]) == 1
    assert DECLINE.fullmatch(capsys.readouterr().out.strip().splitlines()[-1])
    assert cli.main(['probe', '--model', str(tmp_path / 'nowhere')]) == 2


# --- real libraries, in processes of their own

MACHINE = '''
import json, sys
import mlxspec
from mlxspec import blas
import mlx.core as mx
mx.disable_compile()
from mlxspec.core import Params
from mlxspec.drafters import scripted as sc
from mlxspec.exactness import Exactness, difference, finish
from mlxspec.rounds import open_running, prefill_step, step
from mlxspec.sequence import Sequence
from mlxspec.target import Target
from mlxspec.text import TextStream
from mlxspec.tiny import byte_tokenizer, tiny_model

mode = sys.argv[1]
model = tiny_model('llama', hidden_size=128, intermediate_size=344, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
t = Target(model, byte_tokenizer(), dict(max_position_embeddings=200), 'm')
x = Exactness(t, 8, mode)
finish(x.probe())
t.ways = x

def run(k, drafters=()):
    params = Params(max_tokens=48, ignore_eos=True)
    seq = Sequence(t.tokenizer.encode('one two three four'), params, TextStream(t.tokenizer.detokenizer), frozenset())
    r = open_running(t, seq, drafters)
    while not prefill_step(t, r): pass
    while not seq.finish: step(t, r, k)
    return seq

want = run(1).output
groups, kept = {}, {}
for k in range(2, 9):
    for script in (sc.oracle, sc.liar(1), sc.half(.5)):
        seq = run(k, [sc.Scripted(want, script)])
        groups.setdefault(tuple(seq.output), []).append(k)
        if script is sc.oracle: kept[k] = [seq.stats.accepted, seq.stats.drafted]
ids = [(7 * i * i + i) % 264 for i in range(48)] # what the table calls exact is so at every length of the context, byte for byte
cache, chain, bytes_ = t.make_cache(), t.make_cache(), []
said = [t.step(mx.array([[i]]), chain).logits[0] for i in ids]
for n in range(40):
    for k in (k for k in (2, 3, 5, 8) if x.level(k, n) != 'none'):
        with t.transaction(cache, k) as txn:
            if difference((txn.forward(mx.array([ids[n:n + k]])).logits[0], mx.concatenate(said[n:n + k]))): bytes_.append((n, k))
    t.step(mx.array([[ids[n]]]), cache)
print(json.dumps(dict(summary=x.summary(), detail=x.decline_detail, wrong=bytes_, groups=list(groups.values()), same=list(groups) == [tuple(want)],
                      kept=kept, widths=[k for k in range(2, 9) if x.level(k, 50) != 'none'])))
'''


def machine(mode='auto', **env):
    done = subprocess.run([sys.executable, '-c', MACHINE, mode], capture_output=True, text=True, env=os.environ | env)
    if done.returncode < 0: pytest.skip('this processor cannot run those kernels')
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_reference_blas_is_exact_at_every_width():
    r = machine(MLXSPEC_BLAS='off')
    assert r['same'], r['groups']
    if sys.platform == 'linux': assert r['widths'] == list(range(2, 9)) and r['summary']['strategy'] == 'block'


@pytest.mark.parametrize('mode', ('auto', 'consistent'))
@pytest.mark.parametrize('core, threads', [('', ''), ('Prescott', '1'), ('Haswell', '1'), ('Haswell', '2'), ('SkylakeX', '2')])
def test_whatever_the_kernels_the_text_stays(mode, core, threads):
    "The set of texts over {plain, K = 2..8} has one member, and a drafter that knows the text is never contradicted."
    r = machine(mode, MLXSPEC_BLAS='auto', OPENBLAS_CORETYPE=core, OPENBLAS_NUM_THREADS=threads)
    if 'openblas' not in r['summary']['blas']: pytest.skip('no OpenBLAS here')
    assert r['same'], f'K by text: {r["groups"]}'
    assert not r['wrong'], f'(context, K): {r["wrong"]}'
    assert all(a == d for a, d in r['kept'].values())
    assert (r['detail'] is None) == bool(r['widths'])
    if r['detail']: assert DECLINE.fullmatch(r['detail']) and r['kept']['8'] == [0, 0]
    if mode == 'consistent' and r['summary']['level'] == 'consistent': assert r['widths'] == list(range(2, 9))


@pytest.mark.slow
def test_parameters_of_a_request_do_not_change_the_level():
    with Engine.from_model(tiny_model('llama'), byte_tokenizer(), mtp_gate='force') as e:
        job = e.submit(e.encode('one two one two'), Params(max_tokens=20, temperature=.7, seed=3, accept_law='rejection'))
        assert job.future.result().stats.level == 'none' # the distribution is kept, not the text
