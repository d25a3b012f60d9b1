"Memory: what ends gives it back, whoever needs too much is alone with it, and the sum that is made at the start counts everything."
import gc
import random
import time
import weakref
from concurrent.futures import wait

import harness as h
import mlx.core as mx
import pytest

from mlxspec.answer import Request, Seat
from mlxspec.core import EngineError, MlxspecError, Params
from mlxspec.drafters.base import Guest
from mlxspec.engine import Engine
from mlxspec.rounds import Running
from mlxspec.sequence import Sequence
from mlxspec.target import Target
from mlxspec.tiny import byte_tokenizer, tiny_model

pytestmark = pytest.mark.usefixtures('quiet')


def engine(kind='llama', **options):
    return Engine.from_model(tiny_model(kind, mx.bfloat16), byte_tokenizer(), **dict(drafter='lookup', mtp_gate='force', idle_grace_s=0.) | options)


def alive(): return [o for o in gc.get_objects() if isinstance(o, Request | Seat | Running | Sequence | Guest)]


def at_rest(e): # bytes, with an empty prefix store
    while any((s := e.snapshot())['scheduler']['queue_depth'].values()) or s['scheduler']['running'] or not s['prefix']['cut']: time.sleep(.005)
    e.call(e._plan.prefix.shelf.records.clear)
    e.call(mx.clear_cache)
    return mx.get_active_memory()


@pytest.mark.parametrize('mode', ['serial', 'mtp_batch', *(pytest.param(m, marks=pytest.mark.slow) for m in ('cooperative', 'ar_batch', 'mtp_cohort_experimental', 'hyper'))])
def test_sixty_requests_leave_nothing(mode, tmp_path):
    "Answered, stopped inside a block, withdrawn, failed, unknown: without the garbage collector the memory is back when they have ended, and with it no object is left."
    rng, kinds = random.Random(mode), ['normal'] * 20 + ['stop'] * 10 + ['cancel'] * 10 + ['fail'] * 10 + ['miss'] * 10
    rng.shuffle(kinds)
    def broken(chunk): raise ValueError('on purpose')
    others = {id(o): o for o in alive()} # what tests before this one keep
    with engine(scheduler_mode=mode, max_active_requests=4, cache_dir=tmp_path, prefix_cache_bytes=1 << 20) as e:
        def ask(i, kind):
            prompt = [257, *(b'ab cd ef ' * 5), *([i] * 9 if kind == 'miss' else [])]
            params = Params(max_tokens=24, ignore_eos=True, stop=('a', 'e') if kind == 'stop' else ())
            job = e.submit(prompt, params, broken if kind == 'fail' else None)
            if kind == 'cancel': job.cancel()
            return job.future
        wait([ask(0, 'normal') for _ in range(4)], 60) # all widths are known afterwards
        for kind in ('normal', 'stop', 'cancel', 'fail', 'miss'): wait([ask(1, kind)], 60)
        gc.collect()
        before = at_rest(e)
        gc.disable()
        try:
            for i in range(0, 60, 4): wait([ask(i + j, k) for j, k in enumerate(kinds[i:i + 4])], 60)
            assert at_rest(e) <= before * 1.02
        finally: gc.enable()
        gc.collect()
        assert not [o for o in alive() if id(o) not in others]
        s = e.snapshot()['scheduler']
        assert s['failed'] == 11 and s['completed']['foreground'] + s['cancelled'] == 4 + 4 + 50


def test_a_failed_request_does_not_wait_for_the_garbage_collector(tmp_path):
    "Whoever holds its future, with the error in it, holds none of its arrays."
    seen, gone = [], []
    with engine(cache_dir=tmp_path) as e:
        def broken(chunk):
            gone.append(weakref.ref(next(iter(e._floor.seats.values())).run))
            raise seen.pop()
        gc.disable()
        try:
            for error in (ValueError('a fault'), EngineError('a sentence')):
                seen.append(error)
                future = e.submit([65], Params(max_tokens=9), broken).future
                assert isinstance(future.exception(60), MlxspecError) and not e.call(gone[-1])
        finally: gc.enable()


@pytest.mark.parametrize('mode', ['serial', 'mtp_batch'])
def test_an_allocation_that_fails_ends_one_request(mode, tmp_path, monkeypatch):
    with engine(scheduler_mode=mode, max_active_requests=2, cache_dir=tmp_path) as e:
        want = [t.id for t in e.generate([66] * 5, max_tokens=30, ignore_eos=True).tokens]
        def short(chunk): raise RuntimeError('[malloc] Unable to allocate 99 bytes.')
        bad, good = e.submit([65] * 5, Params(max_tokens=30, ignore_eos=True), short), e.submit([66] * 5, Params(max_tokens=30, ignore_eos=True))
        assert isinstance(bad.future.exception(60), MlxspecError)
        assert [t.id for t in good.future.result(60).tokens] == want and e.alive


def test_prompts_are_read_in_chunks_by_target_and_drafter(tmp_path, monkeypatch):
    sizes, read = {}, Target.prefill
    def seen(self, ids, *args, **kwargs):
        sizes.setdefault(self.name, []).append(ids.shape[1])
        return read(self, ids, *args, **kwargs)
    with engine(drafter='none', prefill_chunk_tokens=16, prefix_cache_bytes=0, cache_dir=tmp_path) as e:
        t = e._target
        small = e.call(h.DraftModel, e.call(Target, tiny_model('llama', num_hidden_layers=1), t.tokenizer, {}, 'small'), t, 4)
        object.__setattr__(e._plan.drafters, 'made', (small,))
        monkeypatch.setattr(Target, 'prefill', seen)
        e.submit([i % 250 for i in range(300)], Params(max_tokens=4, ignore_eos=True)).future.result(60)
        monkeypatch.undo()
    assert max(sizes[t.name]) == 16 and max(sizes['small']) <= 256 and sum(sizes['small']) >= 299


def test_an_engine_that_is_closed_gives_everything_back(tmp_path):
    "Also one that did not get so far."
    def once():
        with engine(cache_dir=tmp_path) as e: e.generate('ab ab ab', max_tokens=9)
    def refused():
        with pytest.raises(MlxspecError): engine(cache_dir=tmp_path, memory_limit=1e-6)
    once()
    gc.collect()
    before = mx.get_active_memory()
    for load in (once, refused, once):
        load()
        gc.collect()
        assert mx.get_active_memory() <= before + 4096


def test_the_pool_of_freed_buffers_has_a_bound(tmp_path):
    "Whoever has set a smaller one keeps it."
    old = mx.set_cache_limit(123)
    try:
        with engine(cache_dir=tmp_path): assert mx.set_cache_limit(1 << 60) == 123
        with engine(cache_dir=tmp_path, memory_limit=.8): assert mx.set_cache_limit(old) == 10**8
    finally: mx.set_cache_limit(old)


def test_the_start_says_what_it_costs(tmp_path, caplog):
    with caplog.at_level('INFO', 'mlxspec'), engine(cache_dir=tmp_path, drafter='lookup', memory_limit=.8): pass
    (line,) = [r.getMessage() for r in caplog.records if 'GB' in r.getMessage()]
    assert all(w in line for w in ('target', 'caches', 'verify buffers', '512 tokens', '0.80 GB'))
