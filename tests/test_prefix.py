"""The prefix store: an answer that begins with remembered state is the answer of a fresh server, for every cache kind and drafter,
and nothing that happens to the files can change that. (How it works is told in nbs/31_shelf.ipynb, 31_prefix_files and 32_prefix.)"""
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from harness import drafter, rebuilt, target
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec import prefix_files as files
from mlxspec.cache import leaves
from mlxspec.config import MODES
from mlxspec.core import Cancelled, Params
from mlxspec.engine import Engine
from mlxspec.prefix import PrefixStore, thaw
from mlxspec.rounds import open_running, prefill_step, step
from mlxspec.sequence import Sequence
from mlxspec.shelf import Record, Shelf, chunk_ends, shared, usable
from mlxspec.target import entries_of
from mlxspec.text import TextStream
from mlxspec.tiny import byte_tokenizer, tiny_model

pytestmark = pytest.mark.usefixtures('quiet')
KINDS = 'llama', 'gemma3', 'qwen3_5', 'lfm2' # rows; windows and rows; running states and rows; convolutions and rows


def finish(steps):
    "Run a generator to its end."
    while True:
        try: next(steps)
        except StopIteration as e: return e.value


class Bench:
    "A store, and somebody who does its idle work by hand."
    def __init__(self, t, free=None, **options):
        self.idle, self.t = [], t
        later = lambda fn, *args, **_: self.idle.append((fn, args))
        options = dict(budget=1 << 22, special=frozenset({0}), least=8) | options
        self.store = PrefixStore(t, postcommit=later, persist=later, **options)
        if free is not None: self.store.free, self.store.measured = free, True

    def rest(self):
        while self.idle:
            fn, args = self.idle.pop(0)
            finish(fn(*args))

    def ask(self, prompt, drafters=(), k=1, chunk=64, keep=True, ends=(), **params):
        p = Params(**dict(max_tokens=7, seed=5) | params)
        seq = Sequence(list(prompt), p, TextStream(self.t.tokenizer.detokenizer, p.stop), frozenset(ends))
        run = open_running(self.t, seq, drafters)
        visit = self.store.visit(run)
        read = False
        while not read:
            read = prefill_step(self.t, run, visit.chunk(chunk))
            visit.mark()
        while not seq.finish: step(self.t, run, k)
        if keep: visit.keep(run.cache, run.cached)
        for g in run.guests: g.close()
        return seq

    def talk(self, turns, idle=True, **options):
        prompt, out = [], []
        for i in range(turns):
            prompt = prompt + [0, *range(40 + i, 60 + i)]
            seq = self.ask(prompt, **options)
            out.append(seq)
            prompt = list(seq.tokens)
            if idle: self.rest()
        return out


def outputs(seqs): return [s.output for s in seqs]


def fresh(t, seqs, **options):
    "The same prompts, each on a store of its own."
    return [Bench(t).ask(s.tokens[:s.prompt_len], **options).output for s in seqs]


@pytest.mark.parametrize('free', [False, True])
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_five_turns_warm_equal_cold(kind, dtype, free):
    t = target(kind, dtype)
    for i, temperature in enumerate((0., 1.)):
        seqs = Bench(t, free).talk(5, idle=i == 0, temperature=temperature)
        assert outputs(seqs) == fresh(t, seqs, temperature=temperature)
        hits = [s.stats.cached_tokens for s in seqs]
        # chunk ends of a prompt before, or all of it
        assert hits[0] == 0 and all(a < b for a, b in zip(hits[1:], hits[2:], strict=False)) and hits[-1] > 60
        if free: assert hits[-1] == len(seqs[-2].tokens) - 1 or hits[-1] == len(seqs[-2].tokens)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('name', ['oracle', 'half', 'lookup', 'mtp'])
def test_with_drafters(kind, name):
    if name == 'mtp' and kind not in ('llama', 'qwen3_5'): pytest.skip('heads are tried on two kinds')
    t, plain = target(kind), Bench(target(kind), True).talk(4)
    b = Bench(t, True)
    for want in plain:
        d = drafter(name, t, want.output)
        seq = b.ask(want.tokens[:want.prompt_len], [d], k=4)
        assert seq.output == want.output
        b.rest()
    assert seq.stats.cached_tokens > 40


@pytest.mark.parametrize('kind', KINDS)
def test_a_stop_inside_an_accepted_block_cuts_the_state_too(kind):
    t = target(kind)
    plain = Bench(t).ask(range(30, 60), max_tokens=12)
    for cut in range(1, 7):
        b = Bench(t, True)
        seq = b.ask(range(30, 60), [drafter('oracle', t, plain.output)], k=6, max_tokens=12, ends=[plain.output[cut]])
        (r,) = b.store.shelf.records.values()
        assert seq.finish == 'stop' and list(r.tokens) == seq.tokens[:len(r.tokens)] and len(r.tokens) <= len(seq.tokens)
        cache = t.make_cache()
        for e, s in zip(entries_of(cache), r.payload.at(len(r.tokens)), strict=True): thaw(e, s, len(r.tokens))
        mine, want = [a for c in cache for a in leaves(c)], rebuilt(t, r.tokens.tolist())
        assert all(x.shape == y.shape and mx.allclose(x, y, atol=1e-5).item() for x, y in zip(mine, want, strict=True))


@pytest.mark.parametrize('kind', KINDS)
def test_prompts_that_share_a_beginning_keep_their_answers(kind):
    t, system = target(kind), [0, *range(50, 75)]
    prompts = [system + [0, *range(100 + 9 * i, 109 + 9 * i)] for i in range(3)]
    want, b = [Bench(t).ask(p).output for p in prompts], Bench(t, False)
    for turn in range(5):
        for p, w in zip(prompts, want, strict=True):
            seq = b.ask(p)
            assert seq.output == w
            assert seq.stats.cached_tokens == (len(p) - 1 if turn else 26 * (p is not prompts[0]))
        if turn % 2: b.rest()


def test_a_drafter_that_was_not_there_is_not_left_without_its_state():
    t = target('qwen3_5')
    b, head, prompt = Bench(t, True), drafter('mtp', t, []), list(range(30, 60))
    b.ask(prompt)
    seq = b.ask(prompt, [head], k=3)
    assert (seq.stats.prefix, seq.stats.cached_tokens) == ('no_drafter_state', 0)
    assert b.ask(prompt, [head], k=3).stats.cached_tokens == b.ask(prompt).stats.cached_tokens == 29


def test_under_endless_load_what_waits_is_bounded_and_counted():
    "Nobody is idle for a hundred requests: one item of idle work waits, and records count for the memory that they keep alive."
    t, b = target('llama'), Bench(target('llama'), True, budget=1 << 18)
    for i in range(100):
        b.ask([0, *range(i + 30, i + 50)], max_tokens=2)
        records = b.store.shelf.records.values()
        real = sum(-(-len(r.tokens) // 256) * 256 * r.payload.nbytes // len(r.tokens) for r in records)
        assert len(b.idle) == 1 and b.store.shelf.nbytes <= 1 << 18 and real <= 1 << 18
    assert b.store.shelf.counts['evicted'] > 90 and t
    b.rest()
    assert all(r.settled and r.nbytes == r.payload.nbytes for r in records) and not b.idle
    b.ask(range(30, 60))
    assert len(b.idle) == 1 # and again


def test_a_copy_that_finds_no_memory_costs_a_record(monkeypatch):
    b = Bench(target('llama'), True)
    b.ask(range(30, 60))
    monkeypatch.setattr('mlxspec.prefix.tree_map', lambda *args: 1 / 0)
    b.rest()
    assert not b.store.shelf.records


def test_what_was_said_in_an_inexact_batch_is_not_taken_for_what_is_read():
    b = Bench(target('llama'), True)
    for level, rows in (('identical', 36), ('none', 29)):
        seq = Sequence(list(range(30, 60)), Params(max_tokens=7), TextStream(b.t.tokenizer.detokenizer, ()), frozenset())
        run = open_running(b.t, seq)
        visit = b.store.visit(run)
        while not prefill_step(b.t, run): pass
        while not seq.finish: step(b.t, run, 1)
        seq.stats.level = level # as `tell` of `mlxspec.batch` says it
        assert visit.new_record(entries_of(run.cache), run.cached).sure in (rows, rows + 1)


def test_what_has_no_numbers_is_not_kept():
    t, b = target('llama'), Bench(target('llama'))
    seq = Sequence(list(range(30, 50)), Params(max_tokens=3), TextStream(t.tokenizer.detokenizer, ()), frozenset())
    run = open_running(t, seq)
    visit = b.store.visit(run)
    seq.stats.reasons['not_finite'] += 1
    visit.keep(run.cache, run.cached)
    assert not b.store.shelf.records and not b.idle


@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(1, 40)), max_size=30))
def test_the_budget_holds_and_what_is_used_stays(ops):
    shelf = Shelf(100)
    for line, tokens, size in ops:
        ids = np.arange(tokens + 2, dtype=np.int32)
        shelf.put(Record(ids, (), 1, len(ids), frozenset(), True, frozenset(), str(line), size))
        assert shelf.nbytes <= 100 and list(shelf.records)[-1] == str(line)
        r, rows, _ = shelf.find(ids, [], frozenset(), True)
        assert r and list(shelf.records)[-1] == r.line and rows == len(ids) - 1


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=80), st.lists(st.integers(0, 4), max_size=80), st.integers(1, 9), st.integers(9, 20))
def test_chunk_ends_depend_on_what_is_before_them(a, b, least, most):
    special, n = frozenset({0}), shared(np.array(a, np.int32), np.array(b, np.int32))
    ea, eb = (chunk_ends(x, special, least, most) for x in (a, b))
    assert [e for e in ea if e < n] == [e for e in eb if e < n]
    for x, e in ((a, ea), (b, eb)):
        gaps = np.diff([0, *e, len(x)])
        assert all(gaps[:-1] >= least) and all(gaps <= most)
    r = Record(np.array(a, np.int32), tuple(ea), len(a), len(a), frozenset(), True, frozenset(), '', 0)
    assert usable(r, np.array(b, np.int32), eb, False) <= min(n, max(0, len(b) - 1))


# ---- files

def disk(t, root, **options): return Bench(t, disk=1 << 22, root=Path(root), **options)


@pytest.mark.parametrize('kind', KINDS)
def test_another_process_goes_on(kind, tmp_path):
    t = target(kind)
    b = disk(t, tmp_path, free=True)
    b.rest()
    seqs = b.talk(3)
    assert len(list(tmp_path.rglob('*.safetensors'))) == 1     # of one conversation
    b = disk(t, tmp_path, free=True)
    b.rest()
    prompt = seqs[-1].tokens + [0, 7, 8, 9]
    seq = b.ask(prompt)
    assert seq.stats.cached_tokens >= len(seqs[-1].tokens) - 1 and seq.output == Bench(t).ask(prompt).output


def test_other_models_files_are_left_alone_and_bad_ones_moved_aside(tmp_path):
    t = target('llama')
    b = disk(t, tmp_path, about=dict(model='a'))
    b.talk(1)
    (good,) = tmp_path.rglob('*.safetensors')
    data = good.read_bytes()
    other = disk(t, tmp_path, about=dict(model='b'))
    other.rest()
    assert not other.store.shelf.records and good.exists()
    for i, bad in enumerate((data[:100], data[:-9], b'', b'\xff' * 99, data[:-50] + b'!' + data[-49:], data.replace(b'\\"a', b'\\"c'))):
        good.with_stem(f'bad{i}').write_bytes(bad)
    (good.parent / 'notes.txt').write_text('not ours')
    b = disk(t, tmp_path, about=dict(model='a'))
    b.rest()
    assert list(b.store.shelf.records) == [good.stem]
    assert sorted(p.name for p in good.parent.iterdir()) == sorted([good.name, 'notes.txt', *(f'bad{i}.bad' for i in range(6))])


def test_the_disk_budget_holds(tmp_path):
    t, b = target('llama'), disk(target('llama'), tmp_path)
    size = 0
    for i in range(6):
        b.ask([0, *range(30 + 9 * i, 60 + 9 * i)])
        b.rest()
        size = size or sum(p.stat().st_size for p in tmp_path.rglob('*.safetensors'))
        b.store._disk = int(3.5 * size)
    left = list(tmp_path.rglob('*.safetensors'))
    assert len(left) == 3 and t


def test_a_full_disk_is_no_fault_of_the_request(tmp_path, monkeypatch):
    def full(*args): raise OSError(28, 'No space left on device')
    b = disk(target('llama'), tmp_path)
    monkeypatch.setattr(files.os, 'fsync', full)
    assert b.talk(2)[1].stats.cached_tokens
    assert not [p for p in tmp_path.rglob('*') if p.is_file()]


WRITER = '''
import sys, mlx.core as mx
from pathlib import Path
from mlxspec import prefix_files as files
files.PIECE = 1 << 14
for n in range(10**6):
    for name in ("a", "b"):
        for _ in files.write(Path(sys.argv[1])/"fp"/f"{name}.safetensors", dict(n=n, x=mx.full((1 << 18,), float(n))), dict(model="m")): pass
        print(name, n, flush=True)
'''


def test_a_kill_while_writing_loses_at_most_that_entry(tmp_path):
    rng, told = random.Random(3), dict(a=-1, b=-1)
    for _ in range(4):
        p = subprocess.Popen([sys.executable, '-c', WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        lines = [p.stdout.readline()]
        time.sleep(rng.random() * .2)
        p.kill()
        lines += p.stdout.read().splitlines()
        p.wait()
        for line in lines:
            if len(words := line.split()) == 2: told[words[0]] = int(words[1])
        for path in files.newest_first(tmp_path / 'fp'):
            v = finish(files.read(path, dict(model='m')))      # whole, whatever happened
            assert v['n'] >= told[path.stem] or v['n'] >= 0 and told[path.stem] >= 0
            assert mx.all(v['x'] == v['n']).item() and v['x'].shape == (1 << 18,)
        assert not list((tmp_path / 'fp').glob('.*'))
    assert told['a'] >= 0


KILLED = '''
import sys, mlx.core as mx
from mlxspec import prefix_files as files
from mlxspec.core import Params
from mlxspec.engine import Engine
from mlxspec.tiny import byte_tokenizer, tiny_model
files.PIECE = 1 << 12
options = dict(cache_dir=sys.argv[1], drafter="none", prefix_disk_bytes=1 << 22, idle_grace_s=0., persistence_quiet_grace_s=0.)
with Engine.from_model(tiny_model("qwen3_5", mx.bfloat16), byte_tokenizer(), **options) as e:
    while e.snapshot()["scheduler"]["queue_depth"]["persistence"]: pass
    for i in range(int(sys.argv[2])):
        prompt = [257, *(j * (7 + i) % 250 for j in range(300))]
        r = e.submit(prompt, Params(max_tokens=8, ignore_eos=True)).future.result()
        print(i, r.stats.cached_tokens, [t.id for t in r.tokens], flush=True)
    if sys.argv[3] == "stay": sys.stdin.read()
'''


def test_a_process_that_is_killed_while_it_writes(tmp_path):
    "Three times an engine is killed at some moment of its persistence; the next one says what a fresh one says, from the state it finds."
    def start(n, how): return subprocess.Popen([sys.executable, '-c', KILLED, str(tmp_path), str(n), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    rng, want, found = random.Random(5), {}, []
    for n in range(1, 4):
        p = start(3, 'stay')
        for _ in range(3):
            i, cached, tokens = p.stdout.readline().split(maxsplit=2)
            assert want.setdefault(i, tokens) == tokens
            found.append(int(cached))
        until(lambda n=n: len([*tmp_path.rglob('prefix/**/*.safetensors'), *tmp_path.rglob('prefix/**/.*.tmp')]) >= n) # or the one after it has begun
        time.sleep(rng.random() * .02)
        p.kill()
        p.communicate()
    out, err = start(3, 'leave').communicate(timeout=120)
    lines = [x.split(maxsplit=2) for x in out.splitlines()]
    assert [x[2] for x in lines] == [want[x[0]].strip() for x in lines] and len(lines) == 3 and not err, err
    assert any(int(x[1]) for x in lines) and not found[0]
    assert not [*tmp_path.rglob('*.bad'), *tmp_path.rglob('prefix/**/.*.tmp')]


# ---- the engine

TURNS = 'Count from 1 to 5.', 'Spell the word garden.', 'What day comes after Monday?', 'Copy this: red green blue red green.', 'Count from 7 to 12.'


def until(happened): # never so long in a passing test
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end, 'it did not happen'
        time.sleep(.05)


def converse(engine, wait=False, **params):
    messages, out = [], []
    for t in TURNS:
        messages.append(dict(role='user', content=t))
        out.append(engine.generate(messages, max_tokens=24, **params))
        messages.append(dict(role='assistant', content=out[-1].text))
        if wait: until(lambda: engine.snapshot()['prefix']['cut'])
    return out


def test_the_demo_pair_with_its_head(tmp_path):
    options = dict(cache_dir=str(tmp_path), mtp_gate='force', idle_grace_s=0.)
    with Engine.load(**options, prefix_cache_bytes=0) as e: cold = converse(e)
    with Engine.load(**options, prefix_disk_bytes=1 << 26) as e: warm = converse(e, wait=True)
    with Engine.load(**options, prefix_disk_bytes=1 << 26) as e:
        until(lambda: e.snapshot()['prefix']['entries'])
        again = converse(e)
    for run in (warm, again): assert [[t.id for t in r.tokens] for r in run] == [[t.id for t in r.tokens] for r in cold]
    assert all(r.stats.cached_tokens == 0 and r.stats.prefix is None for r in cold)
    assert warm[0].stats.prefix == 'no_match' and all(r.stats.cached_tokens > 0 for r in (*warm[1:], *again))
    drafts = lambda rs: sum(r.stats.accepted for r in rs) / sum(r.stats.drafted for r in rs)
    assert abs(drafts(warm) - drafts(cold)) < .1 # the drafters know what came before, too


def test_cancelled_and_failed_requests_leave_nothing(tmp_path):
    with Engine.load(cache_dir=str(tmp_path), drafter='none') as e:
        jobs, submitted = [], threading.Event()
        def leave(chunk): # after the first token
            submitted.wait(20)
            jobs[0].cancel()
        jobs.append(e.submit(e.encode('Count from 1 to 90.'), Params(max_tokens=200, ignore_eos=True), leave))
        submitted.set()
        assert isinstance(jobs[0].future.exception(20), Cancelled)
        def broken(chunk): raise ValueError('the listener failed')
        job = e.submit(e.encode('Count from 1 to 90.'), Params(max_tokens=9), broken)
        assert job.future.exception(20) is not None
        assert e.snapshot()['prefix']['entries'] == 0


@pytest.mark.parametrize('mode,kind', list(zip(MODES, ['llama', 'qwen3_5'] * 3, strict=True)))
def test_every_mode_begins_with_what_was_read(mode, kind, tmp_path):
    system = [257, *(i * 7 % 250 for i in range(300))]
    prompts = [system + [257, *[40 + i] * (3 + i)] for i in range(5)]
    def ask(engine):
        jobs = [engine.submit(p, Params(max_tokens=12, ignore_eos=True)) for p in prompts]
        return [j.future.result(60) for j in jobs]
    def engine(**options):
        return Engine.from_model(tiny_model(kind, mx.bfloat16), byte_tokenizer(), cache_dir=str(tmp_path), drafter='lookup', **options)
    with engine(prefix_cache_bytes=0) as e: cold = [r.text for r in ask(e)]
    with engine(scheduler_mode=mode, max_active_requests=4, prefix_cache_bytes=1 << 20, idle_grace_s=.01) as e:
        e.submit(system + [257, 9], Params(max_tokens=3)).future.result(60)
        for _ in range(2):
            warm = ask(e)
            assert [r.text for r in warm] == cold
        assert all(r.stats.cached_tokens >= 256 for r in warm)
        assert e.snapshot()['prefix']['bytes'] <= 1 << 20


@pytest.mark.parametrize('mode,kind', list(zip(MODES, ['qwen3_5', 'gemma3'] * 3, strict=True)))
def test_conversations_in_every_mode(mode, kind, tmp_path):
    "Two conversations of five turns at once: warm as cold, and each turn begins where the last one ended, also of those that ended in a batch."
    def engine(**options): return Engine.from_model(tiny_model(kind, mx.bfloat16), byte_tokenizer(), cache_dir=str(tmp_path), drafter='lookup', **options)
    def talk(e, wait=False):
        texts, out = [[257, 70 + i] * 3 for i in range(2)], []
        for turn in range(5):
            jobs = [e.submit(list(t), Params(max_tokens=9, ignore_eos=True)) for t in texts]
            rs = [j.future.result(60) for j in jobs]
            out += [(len(t), r.stats.cached_tokens, [x.id for x in r.tokens]) for t, r in zip(texts, rs, strict=True)]
            texts = [[*t, *[x.id for x in r.tokens], 257, 80 + turn] for t, r in zip(texts, rs, strict=True)]
            if wait and not turn: until(lambda: e.snapshot()['prefix']['cut'])
        return out, e.snapshot()
    with engine(prefix_cache_bytes=0) as e: cold, _ = talk(e)
    with engine(scheduler_mode=mode, max_active_requests=2, prefix_cache_bytes=1 << 22, idle_grace_s=.01) as e: warm, s = talk(e, True)
    assert [w[::2] for w in warm] == [c[::2] for c in cold]
    if mode in MODES[2:5]: assert s['scheduler']['batch_histogram']['2'] > 8
    if s['prefix']['cut'] == 'anywhere': # two rows are new: the end of a message and its first word, and the last token that was said
        assert all(n - 4 <= cached < n for n, cached, _ in warm[2:]), warm


def test_of_a_request_that_left_a_batch_nothing_is_kept(tmp_path):
    with Engine.from_model(tiny_model('llama'), byte_tokenizer(), scheduler_mode='ar_batch', max_active_requests=2, cache_dir=str(tmp_path)) as e:
        jobs, both = [], threading.Event()
        def leave(chunk):
            if both.wait(20) and len(jobs[0].stats.reasons) and e._floor.seats and all(s.batch for s in e._floor.seats.values()): jobs[0].cancel()
        jobs.append(e.submit([65] * 9, Params(max_tokens=300, ignore_eos=True), leave))
        jobs.append(e.submit([66] * 9, Params(max_tokens=30, ignore_eos=True)))
        both.set()
        assert isinstance(jobs[0].future.exception(60), Cancelled) and jobs[1].future.result(60)
        assert [r.tokens[0] for r in e._plan.prefix.shelf.records.values()] == [66]


def test_the_owner_writes_files_in_the_persistence_band_only(tmp_path, monkeypatch):
    "Verdicts of probes, the measurement of chunks, states of prompts."
    wrote, replace = [], os.replace
    with Engine.from_model(tiny_model('llama', mx.bfloat16), byte_tokenizer(), scheduler_mode='mtp_batch', max_active_requests=2, drafter='lookup', mtp_gate='force',
                           cache_dir=tmp_path, prefix_disk_bytes=1 << 22, idle_grace_s=0.) as e:
        def seen(a, b):
            wrote.append((threading.current_thread().name, e._scheduler._desk.hand.band, Path(b).parent.name if Path(b).suffix == '.json' else 'prefix'))
            return replace(a, b)
        monkeypatch.setattr(os, 'replace', seen)
        jobs = [e.submit([65 + i] * 9, Params(max_tokens=40, ignore_eos=True)) for i in range(2)]
        for j in jobs: j.future.result(60)
        until(lambda: len(list(tmp_path.rglob('*.safetensors'))) == 2)
    assert {w[2] for w in wrote} == {'exactness', 'prefix'} and {w[:2] for w in wrote} == {('mlxspec-owner', 'persistence')}
