"""Requests that share a target: in every mode each says what it says alone, whatever its neighbours ask for, do or suffer.

Most cases drive a floor step by step, without a thread: the order of events is then the same every time. Which events meet which
mode, kind of cache, drafter and number of requests is chosen pairwise (`harness.pairs`)."""
import asyncio
import itertools
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import harness as h
import mlx.core as mx
import pytest
from test_numbers import poison

import mlxspec.batch
from mlxspec.admission import Admission
from mlxspec.answer import Plan, Request
from mlxspec.company import APART, EVERY, TOGETHER, Company, Meeting
from mlxspec.config import MODES, SHARED
from mlxspec.core import Cancelled, ConfigError, EngineError, NumericalError, Params, RequestError
from mlxspec.drafters import scripted as sc
from mlxspec.drafters.lookup import Lookup
from mlxspec.engine import Engine
from mlxspec.exactness import Difference, finish
from mlxspec.gate import GateStep, Step
from mlxspec.lanes import Floor, check_mode, make_mode
from mlxspec.pilot import Pilot, Rules
from mlxspec.policy import MtpPolicy
from mlxspec.ragged import Ragged
from mlxspec.sequence import Sequence
from mlxspec.strategies import OneWay
from mlxspec.target import Target
from mlxspec.text import TextStream
from mlxspec.tiny import byte_tokenizer, tiny_model

pytestmark = pytest.mark.usefixtures('quiet', 'short')


@pytest.fixture(scope='module')
def short():
    "Batches are tried at contexts that these requests can reach, and not far beyond."
    with pytest.MonkeyPatch.context() as m:
        m.setattr('mlxspec.company.LONG', 120)
        yield

K = 4
# one way of asking per request: sampled and greedy, masked, penalised, biased, with log-probabilities, ended by a token, ended by a string
ASKS = (dict(shape='bare'), dict(shape='bare', temperature=1.), dict(shape='mask', temperature=.6), dict(shape='logprobs'),
        dict(shape='everything', temperature=1.7), dict(shape='ends'), dict(shape='stop', temperature=1.), dict(shape='repetition'))
AXES = dict(
    mode=MODES, kind=('llama', 'gemma3', 'qwen3_5', 'lfm2'), dtype=('float32', 'bfloat16'), drafter=('liar1', 'half', 'broken', 'oov', 'lookup', 'mtp', 'self', 'eagle3', 'dflash', 'draft_model', 'prediction'),
    n=(1, 2, 3, 4, 8), event=('together', 'one by one', 'cancelled', 'raises', 'not finite'), gate=('force', 'changing'), way=(APART, TOGETHER))


@dataclass(frozen=True)
class Case:
    "Some requests and what happens to them."
    mode: str = 'mtp_batch'
    kind: str = 'llama'
    dtype: str = 'float32'
    drafter: str = 'liar1'
    n: int = 3
    event: str = 'together'
    gate: str = 'force'
    way: str = APART

    def __str__(self): return '-'.join(str(getattr(self, a)) for a in AXES)


def cases(): # as harness.pairs, for these axes
    original, h.Case = h.Case, Case
    try: return h.pairs(AXES, seed=1)
    finally: h.Case = original


class Changing:
    "A gate that changes its mind every three steps, about K and whose drafts too."
    timeline = ()
    def __init__(self): self.n = 0
    def note_depth(self, depth): pass
    def record(self, r, rows=()): assert not rows or sum(d for d, _ in rows) == r.drafted and len(rows) == r.width
    def snapshot(self): return {}
    def pinned_step(self, width, ks): return Step(GateStep.MeasureVerify, min(next(iter(ks.values()))), next(iter(ks)))
    def next_step(self, width, ks, context):
        self.n += 1
        if self.n // 3 % 2: return Step(GateStep.MeasureDecode)
        arm = list(ks)[self.n % len(ks)]
        return Step(GateStep.MeasureVerify, ks[arm][self.n % len(ks[arm])], arm)


@cache
def company(target: Target, way: str) -> Company: # shapes are learned once per target
    c = Company(target, K, (way,))
    assert way in c.abilities.ways
    return c


class Floors:
    "A floor driven by hand."
    def __init__(self, mode, target, places=8, gate=None, way=APART, queue=32, clean=None, # the target without its fault
                 clock=None, # None: every step takes the same time
                 beside=None): # a Company; None: one that has been tried
        self.target, self.widths, self.lanes = target, Counter(), []
        self.pilot = Pilot(MtpPolicy(None), gate)
        plan = Plan(K, 8, SimpleNamespace(made=(), reason=None), self.pilot)
        m = make_mode(mode, target, plan, beside or company(clean or target, way), 8, lambda width, rows: self.widths.update([width]))
        m._clock = clock or itertools.count().__next__ # the order of events does not depend on the machine
        self.floor = Floor(target, m, Admission(places if mode in SHARED else 1, queue, 60., lambda r: r.gone))
        self.steps = None

    def request(self, ids, params, drafters=(), ends=(), on_chunk=None, mask=None, prefix=None):
        plan = Plan(K, 8, SimpleNamespace(made=tuple(drafters), reason=None), self.pilot, prefix=prefix)
        seq = Sequence(list(ids), params, TextStream(self.target.tokenizer.detokenizer, params.stop), frozenset(ends))
        return Request(seq, plan, on_chunk, mask=mask)

    def step(self): # False: the floor is empty
        self.steps = self.steps or self.floor.serve()
        if (lane := next(self.steps, None)) is None: self.steps = None
        else: self.lanes.append(lane)
        return lane is not None

    def run(self):
        while self.step(): pass


def ask(c: Case, i: int): # arguments of `h.run` for the i-th request, and what it says alone
    how, prompt = ASKS[i % len(ASKS)], i % len(h.PROMPTS)
    args, alone = h.request(c.kind, c.dtype, how.get('temperature', 0.), how['shape'], prompt)
    ids = h.Case(c.kind, c.dtype, prompt=prompt).ids
    return ids, args, alone


def submitted(f: Floors, c: Case, i: int, **more):
    ids, args, alone = ask(c, i)
    args = dict(max_tokens=h.N) | {k: v for k, v in args.items() if k not in ('ends', 'mask')}
    guess = [h.drafter(c.drafter, h.target(c.kind, c.dtype), alone.output)] if c.mode != 'ar_batch' else []
    r = f.request(ids, Params(**args), guess, ask(c, i)[1].get('ends', ()), mask=ask(c, i)[1].get('mask'), **more)
    f.floor.enter(r)
    return r, alone


def same(r: Request, alone) -> None:
    "Everything a client can see is as it is alone, and the account is right."
    got, s = r.future.result(0), r.seq.stats
    assert [t.id for t in got.tokens] == alone.output
    assert (got.text, got.finish_reason) == (alone.text, alone.seq.finish)
    assert [(e.id, e.logprob, e.top) for e in got.tokens] == alone.said
    n = len(alone.output)
    assert n == s.completion_tokens and 0 <= s.accepted <= s.drafted and n <= s.accepted + s.rounds + s.plain_steps <= n + 1


class Pebble(Exception): pass


@pytest.mark.parametrize('c', cases(), ids=str)
def test_each_says_what_it_says_alone(c):
    target, victim = h.target(c.kind, c.dtype), None
    if c.event == 'not finite': # a token that nobody else uses makes the model compute no numbers
        used = {t for i in range(c.n) for a in [ask(c, i)] for t in (*a[0], *a[2].output)}
        bad = next(t for t in range(264) if t not in used)
        target = Target(poison(tiny_model(c.kind, getattr(mx, c.dtype)), bad), byte_tokenizer(), {}, c.kind)
    f = Floors(c.mode, target, gate=Changing() if c.gate == 'changing' else None, way=c.way, clean=h.target(c.kind, c.dtype))
    rng, served = random.Random(str(c)), []
    if c.event in ('raises', 'not finite', 'cancelled'): # the victim comes first, or in the middle
        def throw(chunk):
            if len(victim.seq.emitted) > 4: raise Pebble()
        def join():
            if c.event == 'not finite':
                r = f.request([65, 66, bad, 67], Params(max_tokens=9, ignore_eos=True))
                f.floor.enter(r)
                return r
            return submitted(f, c, c.n, on_chunk=throw if c.event == 'raises' else None)[0]
        victim = join()
    for i in range(c.n):
        served.append(submitted(f, c, i))
        if c.event == 'one by one':
            for _ in range(rng.randint(1, 6)): f.step()
    for _ in range(rng.randint(3, 9)): f.step()
    if c.event == 'cancelled': f.floor.cancel(victim)
    f.run()
    for r, alone in served: same(r, alone)
    if victim:
        want = dict(cancelled=Cancelled, raises=EngineError).get(c.event, NumericalError)
        e = victim.future.exception(0)
        assert isinstance(e, want) or c.event == 'cancelled' and e is None # it had ended before
    assert not f.floor.seats and f.floor.room.active == 0
    assert sum(f.widths.values()) >= 1 and max(f.widths) <= (c.n + 1 if c.mode in SHARED[1:] else 1)
    levels = {r.seq.stats.level for r, _ in served}
    if not (c.way == TOGETHER and c.kind == 'gemma3'): # windows are not swept, so nothing is promised for one attention over them
        assert 'none' not in levels, [r.seq.stats.warning for r, _ in served]


@pytest.mark.parametrize('mode', MODES[2:5])
def test_batches_are_batches(mode):
    "Eight equal requests decode eight at a time; drafts that are right save steps for all of them."
    c = Case(mode, drafter='oracle', n=8)
    f = Floors(mode, h.target('llama'), clock=lambda: 0.) # reading takes no time, so it comes first
    served = [submitted(f, c, 0) for _ in range(8)]
    f.run()
    for r, alone in served: same(r, alone)
    assert f.widths.most_common(1)[0][0] == 8
    if mode != 'ar_batch': assert f.widths[8] < h.N / 2


@pytest.mark.parametrize('mode', MODES[2:5])
@pytest.mark.parametrize('kind', AXES['kind'])
def test_somebody_comes_and_somebody_goes_in_every_round(mode, kind):
    "Each stays for a few tokens, under a law of its own."
    f, c, served = Floors(mode, h.target(kind), places=4), Case(mode, kind, drafter='half'), []
    for i in range(12):
        ids, how, want = ask(c, i)
        args, n = {k: v for k, v in how.items() if k not in ('ends', 'mask')}, 2 + i * 5 % 7
        r = f.request(ids, Params(**args, max_tokens=n), [h.drafter('half', h.target(kind), want.output)], how.get('ends', ()), mask=how.get('mask'))
        served.append((r, want.output[:n]))
        f.floor.enter(r)
        f.step(), f.step()
    f.run()
    for r, want in served:
        assert [t.id for t in r.future.result(0).tokens] == want
        assert r.seq.stats.level != 'none'
    assert max(f.widths) > 1 or mode == MODES[4] # whom a cohort gathers depends on the clock


@pytest.mark.parametrize('kind', ('llama', 'gemma3', 'qwen3_5', 'lfm2'))
def test_a_head_drafts_for_all_in_one_forward(kind, monkeypatch):
    "And says what it says to each alone: as many drafts are accepted."
    t = h.target(kind)
    drafter, counts = h.mtp(t), Counter()
    class Counted:
        def __init__(self, net): self.net, self.layers = net, net.layers
        def __call__(self, embedded, hidden, cache):
            counts[embedded.shape[0]] += 1
            return self.net(embedded, hidden, cache)
    monkeypatch.setattr(drafter, 'net', Counted(drafter.net))
    prompts = (b'abc', b'defg', b'hi', b'jklmnop')
    def go(mode):
        f = Floors(mode, t, places=4, clock=lambda: 0.)
        rs = [f.request(p, Params(max_tokens=n, ignore_eos=True), [drafter]) for p, n in zip(prompts, (12, 20, 16, 20), strict=True)]
        for r in rs: f.floor.enter(r)
        f.run()
        return [[x.id for x in r.future.result(0).tokens] for r in rs], [(r.seq.stats.drafted, r.seq.stats.accepted) for r in rs]
    alone = go('serial')
    counts.clear()
    assert go('mtp_batch') == alone
    assert drafter._together and counts[4] > 3 and counts[1] <= 12, counts


def test_a_head_that_cannot_draft_for_several_drafts_for_each(monkeypatch):
    t = h.target('llama')
    drafter = h.mtp(t)
    monkeypatch.setattr(drafter, '_together', False)
    f, c = Floors('mtp_batch', t), Case(drafter='mtp', n=2)
    served = [submitted(f, c, i) for i in range(2)]
    f.run()
    for r, alone in served: same(r, alone)
    assert all(r.seq.stats.rounds for r, _ in served)


def test_the_place_of_one_who_lost_his_numbers_is_zeroed():
    "Rows behind the ends of his strips, before anybody reads them again."
    t, places = h.target('gemma3'), [5, 9]
    caches = [t.make_cache() for _ in places]
    for c, n in zip(caches, places, strict=True): t.prefill(mx.array([list(range(n))]), c)
    batch = Ragged.merge(caches, places)
    for e in batch.layers(): e.keys, e.values = (mx.where(mx.arange(a.shape[2])[:, None] >= 9, mx.nan, a) for a in (e.keys, e.values))
    batch.zero_tails([1])
    for e in batch.layers():
        for a in (e.keys, e.values):
            assert bool((a[1, :, e.used[1]:] == 0).all().item()) and bool(mx.isnan(a[0]).any().item())


@pytest.mark.parametrize('mode', SHARED)
def test_a_short_request_is_not_held_up_by_a_long_one(mode):
    "It has its first token, and ends, long before the other one does."
    f = Floors(mode, h.target('qwen3_5'))
    when = {}
    def note(name): return lambda chunk: when.setdefault(name, len(f.lanes))
    long = f.request(b'abc', Params(max_tokens=120, ignore_eos=True), on_chunk=note('long'))
    f.floor.enter(long)
    for _ in range(12): f.step()
    short = f.request(b'defgh', Params(max_tokens=4, ignore_eos=True), on_chunk=note('short'))
    f.floor.enter(short)
    while not short.future.done(): f.step()
    assert not long.future.done() and len(long.seq.emitted) < 110
    before = len(long.seq.emitted)
    f.run()
    assert long.future.result(0).stats.completion_tokens == 120 and before < 120 and when['short'] > when['long']


@pytest.mark.parametrize('mode', MODES[2:4])
def test_short_prompts_that_come_together_are_read_in_one_go(mode):
    "As many as a chunk has tokens; then they decode together from their first token on. A long one has to wait for its turn."
    f = Floors(mode, h.target('llama'))
    finish(company(f.target, APART).learn(4, K)) # so that no step is a probe
    rs = [f.request([65 + i, 66], Params(max_tokens=6, ignore_eos=True)) for i in range(4)]
    long = f.request([66] * 30, Params(max_tokens=2, ignore_eos=True))
    for r in (*rs, long): f.floor.enter(r)
    for _ in range(4): f.step()
    assert f.lanes == ['prefill'] * 4 and not any(r.seq.emitted for r in rs)
    while not rs[0].seq.emitted: f.step()
    assert 'prefill' not in f.lanes[4:] and set(f.widths) == {4} and all(r.seq.emitted for r in rs)
    f.run()


def unpromising(t: Target) -> Company:
    "Nothing is exact in company, as far as it knows."
    c = Company(t, K)
    c.trials = {(w, r): [Meeting(w, r, way, Difference(0, 1, 9), 0) for way in c.ways] for w in range(2, 9) for r in range(1, K + 1)}
    return c


@pytest.fixture
def reads(monkeypatch): # (requests, rows) of each forward that reads prompts together
    seen, real = [], mlxspec.batch.run_ragged
    def spy(target, cache, ids, *args):
        if not any(cache.places.ends): seen.append(ids.shape)
        return real(target, cache, ids, *args)
    monkeypatch.setattr('mlxspec.batch.run_ragged', spy)
    return seen


@pytest.mark.parametrize('mode', MODES[2:5])
@pytest.mark.parametrize('drafter', ('mtp', 'lookup'))
def test_where_nothing_is_promised_prompts_are_read_in_one_forward(mode, drafter, reads):
    "Of about the same length, and not more than a chunk with their padding. Drafters hear of every token, and no state is kept for later prompts."
    t, kept = h.target('llama'), []
    prefix = SimpleNamespace(visit=lambda run: SimpleNamespace(chunk=lambda most: most, mark=lambda: None, keep=lambda *a: kept.append(run)))
    prompts = (b'abc', b'def', b'gh', b'i', b'k' * 30)
    made = [h.mtp(t)] if drafter == 'mtp' else [Lookup()]
    def go(mode, beside=None):
        f = Floors(mode, t, clock=lambda: 0., beside=beside)
        rs = [f.request(p, Params(max_tokens=12, ignore_eos=True), made, prefix=prefix) for p in prompts]
        for r in rs: f.floor.enter(r)
        f.run()
        return [[x.id for x in r.future.result(0).tokens] for r in rs], [r.seq.stats for r in rs]
    alone, _ = go('serial')
    assert not reads and len(kept) == len(prompts) and kept.clear() is None
    beside, mine = go(mode, company(t, APART)) # something is promised
    assert beside == alone and not reads and len(kept) == len(prompts) and kept.clear() is None
    together, stats = go(mode, unpromising(t))
    assert together == alone and reads == [(3, 2)] # 3 prompts without their last tokens; the fourth has nothing to read
    assert [s.level for s in stats[:3]] == ['none'] * 3 and all('side by side' in s.warning and s.prefill_s > 0 for s in stats[:3])
    assert [(s.drafted, s.accepted) for s in stats] == [(s.drafted, s.accepted) for s in mine]
    assert len(kept) == 2 # of those that were read alone


@pytest.mark.parametrize('kind', ('gemma3', 'qwen3_5', 'lfm2'))
def test_states_and_windows_are_read_one_by_one(kind, reads):
    "Padding would change them."
    f, c = Floors('ar_batch', h.target(kind), clock=lambda: 0., beside=unpromising(h.target(kind))), Case('ar_batch', kind)
    served = [submitted(f, c, i) for i in range(3)]
    f.run()
    for r, alone in served: same(r, alone)
    assert not reads


def test_a_forward_that_fails_for_several_prompts_ends_them_alone(monkeypatch):
    t = h.target('llama')
    f, real = Floors('ar_batch', t, clock=lambda: 0., beside=unpromising(t)), mlxspec.batch.run_ragged
    rs = [f.request([65 + i, 66], Params(max_tokens=6, ignore_eos=True)) for i in range(3)]
    def broken(*args): raise RuntimeError('no')
    monkeypatch.setattr('mlxspec.batch.run_ragged', broken)
    for r in rs: f.floor.enter(r)
    f.step()
    monkeypatch.setattr('mlxspec.batch.run_ragged', real)
    later = f.request(b'abc', Params(max_tokens=6, ignore_eos=True))
    f.floor.enter(later)
    f.run()
    assert [type(r.future.exception(0)) for r in rs] == [EngineError] * 3 and len(later.future.result(0).tokens) == 6
    assert not f.floor.seats and f.floor.room.active == 0


def test_a_floor_needs_one_stepper_however_many_come():
    "One while anybody is here, and another one for the first who comes later."
    f = Floors('ar_batch', h.target('llama'))
    def enter(): return f.floor.enter(f.request(b'abc', Params(max_tokens=6, ignore_eos=True)))
    assert enter() and not enter()
    called = []
    while f.step(): called += [enter()] if len(called) < 9 else []
    assert called == [False] * 9 and enter()


def test_an_engine_that_is_never_idle_has_one_stepper_in_line():
    with Engine.from_model(tiny_model('llama'), byte_tokenizer(), scheduler_mode='ar_batch', drafter='none', max_active_requests=2, prefix_cache_bytes=0) as e:
        held = e.submit([65], Params(max_tokens=400, ignore_eos=True))
        for _ in range(5): e.submit([66], Params(max_tokens=2, ignore_eos=True)).future.result(60)
        assert not held.future.done() and not e._scheduler._desk.bands.foreground.steppers
        held.cancel()


@pytest.mark.parametrize('mode', ('serial', 'ar_batch'))
def test_who_is_here_when_the_engine_closes_is_counted_once(mode):
    e, begun = Engine.from_model(tiny_model('llama'), byte_tokenizer(), scheduler_mode=mode, drafter='none', prefix_cache_bytes=0), threading.Event()
    jobs = [e.submit([65], Params(max_tokens=4000, ignore_eos=True), lambda c: begun.set())]
    assert begun.wait(60)
    jobs += [e.submit([66 + i], Params(max_tokens=400, ignore_eos=True)) for i in range(2)]
    e.close()
    assert all(isinstance(j.future.exception(60), Cancelled) for j in jobs) and e.snapshot()['scheduler']['cancelled'] == 3


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('kind', (asyncio.CancelledError, SystemExit))
def test_a_listener_that_raises_what_is_no_exception_ends_its_own_request(mode, kind):
    f = Floors(mode, h.target('llama'))
    def leave(chunk): raise kind()
    rs = [f.request([65 + i, 66], Params(max_tokens=6, ignore_eos=True), on_chunk=leave if i == 1 else None) for i in range(3)]
    for r in rs: f.floor.enter(r)
    f.run()
    assert isinstance(rs[1].future.exception(0), EngineError) and [len(rs[i].future.result(0).tokens) for i in (0, 2)] == [6, 6]


@dataclass(frozen=True)
class OnlyFour(OneWay):
    "Alone only four rows are exact, not two or three."
    def max_width(self, kv_len, at_most): return 4 if at_most >= 4 else 1


@pytest.mark.parametrize('asked', (5, 6))
def test_a_branch_that_is_cut_to_nothing_is_a_plain_step(asked):
    "A prediction of which too little is left for an exact width, as the only candidate."
    def engine(mode, **more): return Engine.from_model(tiny_model('llama'), byte_tokenizer(), scheduler_mode=mode, prefix_cache_bytes=0, **more)
    with engine('serial', drafter='none') as e: want = [t.id for t in e.generate([65, 66, 67], max_tokens=12, ignore_eos=True).tokens]
    with engine('hyper', drafter='lookup', exactness='off', draft_block_size=4, mtp_allow_inexact=True, mtp_gate='force') as e:
        e.call(setattr, e._target, 'ways', OnlyFour())
        r = e.submit([65, 66, 67], Params(max_tokens=12, ignore_eos=True, prediction=tuple(want[:asked]))).future.result(60)
    s = r.stats
    assert [t.id for t in r.tokens] == want and s.reasons['exactness_context'] and s.drafted == sum(n for n, _ in s.sources.values())


def test_prompts_read_together_are_no_more_than_is_left_of_a_chunk(reads):
    "So that those who decode do not wait for two of them."
    t = h.target('llama')
    f = Floors('ar_batch', t, beside=unpromising(t))
    run = f.request(b'x', Params(max_tokens=60, ignore_eos=True))
    f.floor.enter(run)
    while len(run.seq.emitted) < 4: f.step()
    for p in ('ab', 'cdefg', 'hijkl'): f.floor.enter(f.request(p.encode(), Params(max_tokens=4, ignore_eos=True))) # rows to read: 1, 4, 4; a chunk has eight
    seen = len(f.lanes)
    while 'plain' not in f.lanes[seen:] and 'plain_batch' not in f.lanes[seen:]: f.step()
    assert f.lanes[seen:].count('prefill') == 2 and not reads # the last two would fit in a chunk of their own
    f.run()


@pytest.mark.parametrize('mode', SHARED)
def test_a_long_prompt_does_not_stop_those_who_run(mode):
    "Between two chunks of it everybody who runs gets a token."
    f = Floors(mode, h.target('llama'))
    runs = [f.request([65 + i], Params(max_tokens=60, ignore_eos=True)) for i in range(2)]
    for r in runs: f.floor.enter(r)
    while min(len(r.seq.emitted) for r in runs) < 8: f.step()
    f.floor.enter(f.request([66] * 80, Params(max_tokens=2, ignore_eos=True)))
    seen, chunks = [], 0
    while chunks < 8:
        f.step()
        if f.lanes[-1] != 'prefill': continue
        chunks += 1
        seen.append([len(r.seq.emitted) for r in runs])
    gained = [[b - a for a, b in zip(x, y, strict=True)] for x, y in zip(seen, seen[1:], strict=False)]
    assert all(min(g) >= 1 for g in gained), gained


@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('where', ('queue', 'prefill', 'before the first token', 'later'))
def test_a_cancelled_request_frees_its_place_within_a_step(mode, where):
    f = Floors(mode, h.target('llama'), places=2)
    first = f.request([65] * 40, Params(max_tokens=50, ignore_eos=True))
    others = [f.request([66] * 5, Params(max_tokens=9, ignore_eos=True)) for _ in range(3)]
    for r in (first, *others): f.floor.enter(r)
    f.step()
    victim = others[-1] if where == 'queue' else first
    if where == 'before the first token':
        while first.seq.stats.prefill_s == 0 or f.floor.seats[first].run.read < 39: f.step()
        assert not first.seq.emitted
    if where == 'later':
        while len(first.seq.emitted) < 5: f.step()
    active, waiting = f.floor.room.active, len(f.floor.room)
    f.floor.cancel(victim)
    if where == 'queue': assert len(f.floor.room) == waiting - 1 and isinstance(victim.future.exception(0), Cancelled)
    f.step()
    assert isinstance(victim.future.exception(0), Cancelled) and victim not in f.floor.seats
    assert f.floor.room.active == min(active, 2 if mode in SHARED else 1) # the next in line has the place
    f.run()
    want = [t.id for t in others[0].future.result(0).tokens]
    assert all([t.id for t in r.future.result(0).tokens] == want for r in others if r is not victim)
    assert f.floor.ended == dict(completed=3 if victim is first else 3, cancelled=1)


def test_speculation_resumes_for_the_survivor():
    "Who once shared a step is served as alone when the others have left: by its own drafter and the policy's rules."
    f = Floors('mtp_batch', h.target('llama'))
    c = Case()
    (a, alone), (b, _) = submitted(f, c, 0), submitted(f, c, 1)
    for _ in range(200):
        if f.floor.seats and f.widths[2]: break
        f.step()
    f.floor.cancel(b)
    rounds = a.seq.stats.rounds
    f.run()
    same(a, alone)
    assert a.seq.stats.rounds > rounds and f.lanes[-1] in ('mtp', 'plain') and 'mtp' in f.lanes


def test_depth_0_per_row():
    "One row drafts nothing, one two tokens, one seven: each gets its own, in one forward."
    target, f = h.target('qwen3_5'), Floors('mtp_batch', h.target('qwen3_5'))
    wants = [h.run(target, list(b'abc')).output, h.run(target, list(b'defg')).output, h.run(target, list(b'hi')).output]
    scripts = (sc.silent, lambda rest, k, n: rest[:1], sc.oracle)
    rs = [f.request(p, Params(max_tokens=h.N, ignore_eos=True), [sc.Scripted(w, s)]) for p, w, s in zip((b'abc', b'defg', b'hi'), wants, scripts, strict=True)]
    for r in rs: f.floor.enter(r)
    f.run()
    assert [[t.id for t in r.future.result(0).tokens] for r in rs] == wants
    assert rs[0].seq.stats.rounds == 0 and rs[0].seq.stats.reasons['no_match'] > 3
    assert max(rs[1].seq.stats.per_step_drafted) == 1 and max(rs[2].seq.stats.per_step_drafted) == K - 1
    assert f.widths[3] and 'mtp_batch' in f.lanes


def test_a_thought_keeps_only_its_own_request_from_drafting():
    f = Floors('mtp_batch', h.target('llama'))
    f.pilot.rules = Rules(resume_guard=6)
    c = Case(drafter='oracle', n=2)
    served = [submitted(f, c, 0), submitted(f, c, 3)]
    f.run()
    for r, alone in served: same(r, alone)
    assert all(r.seq.stats.reasons['resume_guard'] >= 5 and r.seq.stats.rounds for r, _ in served)


def test_a_batch_that_is_not_exact_is_told_to_those_who_were_in_it():
    "And drafts run in it as they would in an exact one, because the level is gone already."
    target = h.target('llama')
    f = Floors('ar_batch', target)
    wrong = Company(target, K, (APART,))
    for w in (2, 3): wrong.trials |= {(w, r): [Meeting(w, r, APART, Difference(0, 5, 528), EVERY)] for r in (1, 2, 3, 4)}
    f.floor.mode.company = wrong
    rs = [f.request([65], Params(max_tokens=n, ignore_eos=True)) for n in (4, 9)]
    late = f.request([65], Params(max_tokens=4, ignore_eos=True))
    for r in rs: f.floor.enter(r)
    f.run()
    f.floor.enter(late)
    f.run()
    assert [r.seq.stats.level for r in (*rs, late)] == ['none', 'none', 'identical']
    assert '5 of 528 logit bytes' in rs[0].seq.stats.warning and late.seq.stats.warning is None


def test_memory_is_given_back():
    "No request, no cache and no array of it is alive when the floor is empty."
    import gc
    import weakref
    f = Floors('mtp_batch', h.target('gemma3'))
    c, gone = Case(kind='gemma3', n=4), []
    for turn in range(3):
        served = [submitted(f, c, i) for i in range(4)]
        for _ in range(12): f.step()
        f.floor.cancel(served[turn][0])
        gone += [weakref.ref(s) for s in f.floor.seats.values()] + [weakref.ref(s.run) for s in f.floor.seats.values() if s.run]
        f.run()
        del served
    f.steps = None
    gc.collect()
    assert gone and not [r for r in gone if r() is not None]


# ---- real engines, real threads

@pytest.mark.parametrize('mode', MODES)
def test_an_engine_in_every_mode(mode, tmp_path):
    "Eight threads at once, one of which leaves early; the texts are those of serial mode, the picture for /health adds up."
    with Engine.from_model(tiny_model('llama'), byte_tokenizer(), scheduler_mode=mode, mtp_gate='force', cache_dir=tmp_path, prefill_chunk_tokens=8, draft_block_size=4) as e:
        prompts = [f'{w} {w} {w} {i}' for i, w in enumerate('red green blue one two three four five'.split())]
        want = [h.run(h.target('llama'), e.encode(p), max_tokens=20, temperature=1., seed=i).output for i, p in enumerate(prompts)]
        def one(i): return [t.id for t in e.generate(prompts[i], max_tokens=20, temperature=1., seed=i, ignore_eos=True).tokens]
        def leave(): return next(iter(e.stream('never to the end', max_tokens=400, ignore_eos=True))).tokens
        with ThreadPoolExecutor(9) as pool:
            left = pool.submit(leave)
            assert list(pool.map(one, range(8))) == want and left.result()
        e.call(int) # the owner has looked up since
        s = e.snapshot()['scheduler']
        assert (s['mode'], s['completed']['foreground'], s['failed'], s['running'], s['queue_depth']['foreground']) == (mode, 8, 0, 0, 0)
        assert s['cancelled'] == 1 and s['waits']['count'] == 9
        lanes = dict(serial='plain mtp', cooperative='plain mtp', ar_batch='plain plain_batch', mtp_batch='plain mtp plain_batch mtp_batch',
                     mtp_cohort_experimental='plain mtp cohort', hyper='plain mtp hyper')
        assert s['active_lane'] in lanes[mode].split() and all(int(w) >= 1 for w in s['batch_histogram'])
        assert (max(map(int, s['batch_histogram'])) > 1) == (mode in MODES[2:5])
    for f in (lambda: e.generate('late'), lambda: e.submit([1], Params()).future.result(5)):
        with pytest.raises(EngineError, match='shutting down'): f()


def test_no_place_no_wait(tmp_path):
    "A full line refuses at once, with a time to come back; closing wakes everybody."
    with Engine.from_model(tiny_model('llama'), byte_tokenizer(), scheduler_mode='cooperative', max_active_requests=2, max_queue=1, cache_dir=tmp_path) as e:
        jobs = [e.submit([65], Params(max_tokens=5000 // 10, ignore_eos=True)) for _ in range(3)]
        with pytest.raises(RequestError, match='wait already') as full: e.submit([65], Params())
        assert full.value.status == 429 and full.value.retry_after >= 1
    for j in jobs: assert isinstance(j.future.exception(5), (Cancelled, EngineError)) or j.future.result(0)


@pytest.mark.parametrize('mode,kind,more,why', (
    ('mtp_batch', 'llama', dict(drafter='none'), 'needs a drafter'), ('mtp_cohort_experimental', 'llama', dict(no_spec=True), 'needs a drafter'),
    ('hyper', 'llama', dict(draft_block_size=1), 'no room for drafts'), ('ar_batch', 'gemma2', {}, 'offset per sequence'),
    ('mtp_batch', 'llama', dict(exactness='off'), 'needs a drafter')))
def test_what_a_mode_cannot_run_is_refused_at_the_start(mode, kind, more, why, tmp_path):
    threads = threading.active_count()
    with pytest.raises(ConfigError, match=why) as e: Engine.from_model(tiny_model(kind), byte_tokenizer(), name='this-one', scheduler_mode=mode, cache_dir=tmp_path, **more)
    assert mode in str(e.value) and 'this-one' in str(e.value) and e.value.exit_code == 2
    assert threading.active_count() == threads


def test_consistent_padding_is_for_single_requests():
    can = company(h.target('llama'), APART).abilities
    with pytest.raises(ConfigError, match='consistent'): check_mode('ar_batch', 'x', SimpleNamespace(made=(), sentence=None), can, padded=True)
    check_mode('cooperative', 'x', SimpleNamespace(made=(), sentence=None), can, padded=True)


# ---- one owner

@pytest.fixture
def guard(monkeypatch):
    "Every function of mlx.core and every method of its arrays raises on any thread but the owner."
    state = SimpleNamespace(owner=None, strays=[])
    def watched(name, fn):
        def call(*args, **kwargs):
            if state.owner is not None and threading.get_ident() != state.owner:
                state.strays.append(name)
                raise AssertionError(f'mx.{name} off the owner thread')
            return fn(*args, **kwargs)
        return call
    for name in dir(mx):
        fn = getattr(mx, name)
        if callable(fn) and not isinstance(fn, type) and not name.startswith('_'): monkeypatch.setattr(mx, name, watched(name, fn))
    for name in dir(mx.array):
        if name.startswith('__') and name not in ('__getitem__', '__setitem__', '__add__', '__mul__', '__sub__', '__neg__', '__matmul__', '__lt__', '__eq__'): continue
        fn = getattr(mx.array, name)
        if callable(fn): monkeypatch.setattr(mx.array, name, watched(f'array.{name}', fn))
    return state


@pytest.mark.parametrize('mode,kind', (('serial', 'lfm2'), ('cooperative', 'gemma3'), ('ar_batch', 'llama'), ('mtp_batch', 'qwen3_5'), ('mtp_cohort_experimental', 'gemma3'), ('hyper', 'llama')))
def test_only_the_owner_touches_arrays(mode, kind, guard, tmp_path):
    with Engine.from_model(tiny_model(kind), byte_tokenizer(), scheduler_mode=mode, mtp_gate='force', cache_dir=tmp_path, draft_block_size=3) as e:
        guard.owner = e.call(threading.get_ident)
        with pytest.raises(AssertionError): mx.zeros(1)
        guard.strays.clear()
        params = dict(max_tokens=12, ignore_eos=True, temperature=.5, logprobs=2)
        async def together():
            async def one(i): return [t for c in [c async for c in e.astream(f'ab ab {i}', **params)] for t in c.tokens]
            return await asyncio.gather(*map(one, range(2)))
        with ThreadPoolExecutor(4) as pool:
            texts = [*pool.map(lambda i: e.generate(f'ab ab ab {i}', **params).text, range(4)), asyncio.run(together())]
            list(e.stream('stream', **params))
            e.submit([65], Params(max_tokens=300)).cancel()
            e.snapshot()
        assert len(texts) == 5 and not guard.strays
        guard.owner = None
