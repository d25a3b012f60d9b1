"The owner thread under load, faults and shutdown. (How it works is told in nbs/30_bands.ipynb and nbs/30_scheduler.ipynb.)"
import gc
import logging
import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError, wait

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxspec.bands import Dropped, Graces, KeepAlive
from mlxspec.config import Settings
from mlxspec.core import Cancelled, EngineError
from mlxspec.scheduler import GENERATIONS, ModelWorkScheduler, OwnerStopped, scheduler_for

T = 20  # seconds after which a wait counts as a hang; never reached by a passing test


@pytest.fixture
def sched():
    s = ModelWorkScheduler()
    yield s
    s.shutdown()


def steps(n, out=None, result=None):
    for i in range(n):
        if out is not None: out.append(i)
        yield 'plain'
    return result


def gate(sched):
    "Hold the owner in a call; returns (entered, release)."
    entered, release = threading.Event(), threading.Event()
    sched.submit_foreground(lambda: (entered.set(), release.wait(T)))
    assert entered.wait(T)
    return release


def test_many_threads_lose_nothing(sched):
    owners, results, lock = set(), {}, threading.Lock()

    def client(c):
        futures = []
        for i in range(60):
            key = c, i
            if i % 5 == 0: f = sched.submit_foreground(lambda: 1 / 0)
            elif i % 2: f = sched.submit_foreground(lambda k=key: (owners.add(threading.get_ident()), k)[1])
            else:
                ev = threading.Event()
                f = sched.submit_stepper(steps(3, result=key), ev)
                if i % 6 == 4: ev.set()
            futures.append((key, f))
        for key, f in futures:
            e = f.exception(T)
            with lock: results[key] = e if e else f.result()

    threads = [threading.Thread(target=client, args=(c,)) for c in range(6)]
    for t in threads: t.start()
    for t in threads: t.join(T)
    assert len(results) == 360 and len(owners) == 1
    for (c, i), r in results.items():
        if i % 5 == 0: assert isinstance(r, ZeroDivisionError)
        elif i % 2: assert r == (c, i)
        else: assert r == (c, i) or (i % 6 == 4 and isinstance(r, Cancelled))
    s = sched.snapshot()
    assert s['failed'] == 72 and s['completed']['foreground'] + s['cancelled'] == 288
    assert s['queue_depth'] == dict(foreground=0, postcommit=0, persistence=0) and s['running'] == 0


def test_steppers_run_one_after_the_other(sched):
    release, seen = gate(sched), []
    fs = [sched.submit_stepper(steps(4, seen)) for _ in range(3)]
    release.set()
    wait(fs, T)
    assert seen == [0, 1, 2, 3] * 3


def test_endless_calls_do_not_starve_a_stepper_nor_it_them(sched):
    stop, n = threading.Event(), 0

    def again():
        nonlocal n
        n += 1
        if not stop.is_set(): sched.submit_foreground(again)

    for _ in range(3): sched.submit_foreground(again)
    sched.submit_stepper(steps(50)).result(T)
    stop.set()
    assert n > 10


def test_cancelled_in_queue_never_starts_and_does_not_wait(sched):
    seen, ev, ev2 = [], threading.Event(), threading.Event()
    running = sched.submit_stepper(steps(10**9), ev)
    queued = sched.submit_stepper(steps(1, seen), ev2)
    ev2.set()
    assert isinstance(queued.exception(T), Cancelled) and not running.done() and seen == []
    ev.set()
    assert isinstance(running.exception(T), Cancelled)


def test_future_cancel_withdraws_queued_work(sched):
    release, seen = gate(sched), []
    a, b = sched.submit_stepper(steps(1, seen)), sched.submit_foreground(seen.append, 1)
    assert a.cancel() and b.cancel()
    release.set()
    sched.submit_foreground(int).result(T)
    assert seen == [] and sched.snapshot()['cancelled'] == 2
    with pytest.raises(CancelledError): a.result(T)


def test_clean_up_runs_on_the_owner_and_its_errors_are_reported(sched):
    where, ev = [], threading.Event()

    def work(fault):
        try:
            while True: yield
        finally:
            where.append(threading.get_ident())
            if fault: raise EngineError('clean-up failed')

    ok, bad = sched.submit_stepper(work(False), ev), sched.submit_stepper(work(True), ev2 := threading.Event())
    ev.set()
    assert isinstance(ok.exception(T), Cancelled)
    while not sched.snapshot()['running']: pass
    ev2.set()
    assert isinstance(bad.exception(T), (EngineError, Cancelled))
    assert set(where) == {sched.submit_foreground(threading.get_ident).result(T)}


@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_a_generator_that_refuses_to_close_is_reported(sched):
    started, ev = threading.Event(), threading.Event()

    def stubborn():
        for _ in range(10**9):
            started.set()
            try: yield
            except GeneratorExit: yield

    f = sched.submit_stepper(stubborn(), ev)
    assert started.wait(T)
    ev.set()
    assert isinstance(f.exception(T), RuntimeError)
    assert sched.submit_foreground(int).result(T) == 0


@pytest.mark.parametrize('exc', [ValueError, KeyboardInterrupt, SystemExit, StopIteration, GeneratorExit])
def test_the_owner_survives_any_exception(sched, exc):
    def fails():
        yield
        raise exc('x')

    for f in (sched.submit_stepper(fails()), sched.submit_foreground(lambda: (_ for _ in ()).throw(exc('x')))):
        e = f.exception(T)
        assert isinstance(e, exc) or isinstance(e.__cause__, exc)   # StopIteration turns into RuntimeError
    assert sched.alive and sched.submit_foreground(int).result(T) == 0


def test_nothing_of_ended_work_is_kept(sched):
    class Cache: pass
    alive = []

    def work(mode):
        cache = Cache()
        alive.append(weakref.ref(cache))
        yield 'prefill'
        if mode == 'raise': raise EngineError('failed')
        while mode == 'cancel': yield
        return len(alive)

    ev = threading.Event()
    fs = [sched.submit_stepper(work(m), ev if m == 'cancel' else None) for m in ('end', 'raise', 'cancel')]
    fs[1].exception(T)
    ev.set()
    wait(fs, T)                      # the futures, errors with tracebacks included, are still held here
    sched.submit_foreground(int).result(T)
    gc.collect()
    assert len(alive) in (2, 3) and all(r() is None for r in alive)


def test_shutdown_cancels_open_work():
    s = ModelWorkScheduler()
    fs = [s.submit_stepper(steps(10**9)) for _ in range(5)]
    assert s.shutdown(timeout=T) and not s.alive
    assert all(isinstance(f.exception(0), Cancelled) for f in fs)
    assert isinstance(s.submit_foreground(int).exception(0), OwnerStopped)
    assert isinstance(s.submit_stepper(steps(1)).exception(0), OwnerStopped)
    assert s.shutdown()


def test_shutdown_can_drain():
    s = ModelWorkScheduler()
    fs = [s.submit_stepper(steps(50, result=i)) for i in range(5)]
    assert s.shutdown(drain=True, timeout=T)
    assert [f.result(0) for f in fs] == list(range(5))


def test_a_drain_that_takes_too_long_is_cancelled():
    s = ModelWorkScheduler()
    f = s.submit_stepper(steps(10**9))
    assert s.shutdown(drain=True, timeout=.2)
    assert isinstance(f.exception(0), Cancelled)


def test_shutdown_does_not_wait_for_a_step_that_never_returns():
    s = ModelWorkScheduler()
    release = gate(s)
    f = s.submit_stepper(steps(1))
    assert not s.shutdown(timeout=.1)
    assert isinstance(f.exception(0), EngineError)
    release.set()


def test_shutdown_from_the_owner_itself():
    s = ModelWorkScheduler()
    assert s.submit_foreground(s.shutdown).result(T) is False
    assert s.shutdown(timeout=T)


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
def test_a_dead_owner_fails_everybody_at_once(sched, monkeypatch):
    running, waiting = sched.submit_stepper(steps(10**9)), sched.submit_stepper(steps(1))

    def broken(*args, **kwargs): raise RuntimeError('a fault in the scheduler itself')
    monkeypatch.setattr('mlxspec.scheduler.take', broken)
    for f in (running, waiting): assert f.exception(T).code == 'engine_stalled'
    assert not sched.alive and sched.snapshot()['owner']['alive'] is False
    e = sched.submit_foreground(int).exception(0)
    assert (e.status, e.code) == (503, 'engine_stalled')


def test_callbacks_may_submit(sched):
    done = threading.Event()
    f = sched.submit_foreground(int)
    f.add_done_callback(lambda _: sched.submit_foreground(done.set))
    assert done.wait(T)


def test_an_interpreter_with_open_work_exits():
    code = ('from mlxspec.scheduler import ModelWorkScheduler as S\n'
            'def f():\n'
            '    try:\n'
            '        while True: yield\n'
            '    finally: print("closed")\n'
            's = S(); s.submit_stepper(f())\n'
            'while not s.snapshot()["running"]: pass\n')
    r = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60)
    assert (r.returncode, r.stdout, r.stderr) == (0, 'closed\n', '')


def test_importing_the_scheduler_loads_no_mlx():
    code = 'import sys, mlxspec.scheduler; print([m for m in sys.modules if m.split(".")[0] in ("mlx", "mlx_lm", "transformers")])'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout == '[]\n'


class Clients(RuleBasedStateMachine):
    "Any order of submits, cancels and faults: every future ends, and as its history says."
    def __init__(self):
        super().__init__()
        self.sched, self.open, self.down = ModelWorkScheduler(), [], False

    def add(self, f, kind, ev=None): self.open.append((f, kind, ev))

    @rule(n=st.integers(0, 4))
    def stepper(self, n):
        ev = threading.Event()
        self.add(self.sched.submit_stepper(steps(n, result=n), ev), n, ev)

    @rule()
    def endless(self):
        ev = threading.Event()
        self.add(self.sched.submit_stepper(steps(10**9), ev), 'endless', ev)

    @rule(bad=st.booleans())
    def call(self, bad): self.add(self.sched.submit_foreground((lambda: 1 / 0) if bad else (lambda: 'call')), 'bad' if bad else 'call')

    @precondition(lambda self: any(ev for *_, ev in self.open))
    @rule(data=st.data())
    def cancel(self, data): data.draw(st.sampled_from([ev for *_, ev in self.open if ev])).set()

    @rule(drain=st.booleans())
    def shutdown(self, drain):
        for _, kind, ev in self.open:
            if kind == 'endless': ev.set()
        assert self.sched.shutdown(drain, timeout=T)
        self.down = True

    @invariant()
    def settled_after_shutdown(self): assert not self.down or all(f.done() for f, *_ in self.open)

    def teardown(self):
        for _, kind, ev in self.open:
            if kind == 'endless': ev.set()
        for f, kind, _ in self.open:
            e = f.exception(T)
            if e is None: assert f.result() == kind
            else: assert isinstance(e, (Cancelled, OwnerStopped, ZeroDivisionError)) and (kind != 'call' or self.down)
        self.sched.shutdown()


TestClients = Clients.TestCase
TestClients.settings = settings(max_examples=30, stateful_step_count=15, derandomize=True, deadline=None)


# ---- the bands, with a clock of our own and no thread

class Played:
    "A scheduler whose owner is the test. Steps take no time; rests take as long as they are."
    def __init__(self, **options):
        self.now, self.trace = 0.0, []
        self.sched = ModelWorkScheduler(clock=lambda: self.now, rest=self.rest, **options)

    def rest(self, seconds): self.now += seconds
    def play(self, until):
        while self.now < until: self.sched.turn()

    def note(self, name): # a step that tells its name, the time, and whether foreground work waits
        return lambda: self.trace.append((name, round(self.now, 3), self.sched.snapshot()['queue_depth']['foreground']))
    def names(self): return [n for n, *_ in self.trace]


def test_order_of_the_bands():
    p = Played()
    p.sched.submit_idle_persistence(p.note('file'))
    p.sched.submit_idle_postcommit(p.note('state'))
    p.sched.submit_foreground(p.note('call'))
    p.sched.submit_stepper(steps(3, p.trace))
    p.trace.clear()
    p.play(3)
    assert [t if isinstance(t, int) else t[:2] for t in p.trace] == [('call', 0.), 0, 1, 2, ('state', .3), ('file', .55)]


def test_graces_count_from_the_later_of_submission_and_foreground():
    p = Played()
    p.sched.submit_foreground(int)
    p.play(1)
    p.sched.submit_idle_postcommit(p.note('late'))                     # 1 s after the last foreground work
    p.play(2)
    p.now = 3.
    p.sched.submit_idle_postcommit(p.note('pushed'))
    p.now = 3.2
    p.sched.submit_foreground(int)                                     # it has to wait again
    p.play(5)
    assert [n for n, *_ in p.trace] == ['late', 'pushed'] and [t for _, t, _ in p.trace] == pytest.approx([1.3, 3.5])


def test_a_scheduler_by_the_options():
    s = scheduler_for(Settings(scheduler_mode='hyper', idle_grace_s=1., persistence_quiet_grace_s=2., idle_live_s=3., keepalive_interval_s=4., keepalive_window_s=5.,
                               persistence_pinned_bytes=6, shutdown_flush_s=7., stall_s=8.))
    b = s._desk.bands
    assert (b.graces, b.keepalive.interval_s, b.keepalive.window_s, b.pin_limit, s._desk.flush_s, s._dog.stall_s) == (Graces(1., 2., 3.), 4., 5., 6, 7., 8.)
    assert s.snapshot()['mode'] == 'hyper' and s.shutdown()


def test_persistence_comes_before_the_beat_and_the_beat_only_when_idle():
    p = Played(keepalive=KeepAlive(interval_s=.2, window_s=10.), graces=Graces(.3, .3))
    p.sched.keep_warm(p.note('beat'))
    p.sched.submit_foreground(int)
    p.sched.turn()
    p.sched.submit_idle_persistence(p.note('file'))
    p.play(.65)
    assert p.names()[:3] == ['beat', 'file', 'beat'] and p.sched.snapshot()['active_lane'] == 'idle'


def test_only_lanes_of_the_contract_are_shown():
    p = Played()
    def steps(*lanes): yield from lanes
    p.sched.submit_stepper(steps('prefill', 'probe', 'mtp_batch', None, 'probe'))
    seen = [p.sched.turn() and p.sched.snapshot()['active_lane'] for _ in range(5)]
    assert seen == ['prefill', 'prefill', 'mtp_batch', 'mtp_batch', 'mtp_batch']


def test_foreground_comes_between_the_steps_of_idle_work():
    p = Played()

    def file():
        for i in range(3):
            p.note(f'file{i}')()
            if i == 1: p.sched.submit_foreground(p.note('call'))
            yield

    p.sched.submit_idle_persistence(file)
    p.play(2)
    assert [t[:2] for t in p.trace] == [('file0', 0.), ('file1', 0.), ('call', 0.), ('file2', .25)]


@pytest.mark.parametrize('graces', [Graces(), Graces(100, 100), Graces(0, 100), Graces(100, 0), Graces(1e9, 1e9, 1.0)])
def test_persistence_is_live_whatever_the_graces_and_however_chatty_the_clients(graces):
    p = Played(graces=graces)
    p.sched.submit_stepper(steps(2))
    post, file = p.sched.submit_idle_postcommit(p.note('state')), p.sched.submit_idle_persistence(p.note('file'))
    while p.now < graces.live_s + 1:
        p.sched.submit_foreground(int)
        for _ in range(3): p.sched.turn()
    assert post.done() and file.done() and p.names() == ['state', 'file'] and not any(w for *_, w in p.trace)


def test_an_open_request_keeps_idle_work_away():
    p = Played()
    file, ev = p.sched.submit_idle_persistence(int), threading.Event()

    def long():
        while True:
            p.now += 1.
            yield 'plain'

    p.sched.submit_stepper(long(), ev)
    p.play(1000)
    assert not file.done()
    ev.set()
    p.play(1001.5)
    assert file.done()


def test_post_commit_work_that_feeds_itself_runs_out():
    p, children = Played(), []
    def again():
        p.note('state')()
        children.extend(p.sched.submit_idle_postcommit(again) for _ in range(2))
    p.sched.submit_idle_postcommit(again)
    file = p.sched.submit_idle_persistence(p.note('file'))
    p.play(10)
    ran = 2 ** (GENERATIONS + 1) - 1
    assert file.done() and p.names() == ['state'] * ran + ['file']
    assert [isinstance(f.exception(0), EngineError) for f in children].count(True) == 2 ** (GENERATIONS + 1)


def test_coalescing_keeps_the_place_in_the_line_and_the_future():
    p = Played(graces=Graces(0, 1))
    p.sched.submit_foreground(int)
    p.sched.turn()
    a = p.sched.submit_idle_persistence(p.note('old'), coalesce_key='k')
    b = p.sched.submit_idle_persistence(p.note('other'))
    assert p.sched.submit_idle_persistence(p.note('new'), coalesce_key='k') is a
    a2 = p.sched.submit_idle_persistence(p.note('gone'), coalesce_key='j')
    assert a2.cancel()
    c = p.sched.submit_idle_persistence(p.note('again'), coalesce_key='j')
    p.play(2)
    assert p.names() == ['new', 'other', 'again'] and a.done() and b.done() and c.done() and a2.cancelled()


def test_too_many_pinned_bytes_drop_the_oldest():
    p = Played(pin_limit=100)
    started, running = threading.Event(), []

    def file():
        running.extend([p.sched.submit_idle_persistence(int, pinned_bytes=n) for n in (50, 40, 30)])
        started.set()
        yield

    first = p.sched.submit_idle_persistence(file, pinned_bytes=25)   # has begun, so it stays
    p.play(1)
    assert first.result(0) is None and [type(f.exception(0)) for f in running] == [Dropped, type(None), type(None)]
    s = p.sched.snapshot()
    assert s['drops'] == {'pinned_bytes': 1} and s['pinned_bytes'] == 0
    assert isinstance(p.sched.submit_idle_persistence(int, pinned_bytes=101).exception(0), Dropped)


def test_calls_with_a_key_share_a_turn_and_starve_nobody():
    p, n = Played(), 0

    def again():
        nonlocal n
        n += 1
        p.trace.append('call')
        p.sched.submit_foreground(again, batch_key='k')

    for _ in range(3): p.sched.submit_foreground(again, batch_key='k')
    f = p.sched.submit_stepper(steps(5, p.trace))
    for _ in range(30): p.sched.turn()
    assert f.done() and p.trace[:8] == ['call'] * 3 + [0] + ['call'] * 3 + [1]


def test_keep_alive_beats_only_within_its_window_and_stops_after_three_failures():
    p = Played(keepalive=KeepAlive(interval_s=10., window_s=35.))
    p.play(100)
    assert p.sched.keepalive_state['armed'] is False
    p.sched.keep_warm(p.note('beat'))
    p.play(200)
    assert p.trace == []                      # nobody has ever asked for anything
    p.sched.submit_foreground(int)
    p.play(300)
    assert [t for _, t, _ in p.trace] == [210., 220., 230.]
    p.sched.keep_warm(lambda: 1 / 0)
    for _ in range(2):
        p.sched.submit_foreground(int)
        p.play(p.now + 100)
    k = p.sched.keepalive_state
    assert (k['beats'], k['errors'], k['armed'], k['warm']) == (3, 3, False, False) and k['last_error'].startswith('ZeroDivisionError')
    assert p.sched.snapshot()['failed'] == 0  # beats are nobody's work


def test_shutdown_flushes_what_waits_within_its_bound():
    p = Played(flush_s=2.5, graces=Graces(100, 100, 100))

    def second():
        p.now += 1
        p.note('file')()

    post = p.sched.submit_idle_postcommit(lambda: p.sched.submit_idle_persistence(second))
    files = [p.sched.submit_idle_persistence(second) for _ in range(4)]
    assert p.sched.shutdown() is False or p.names() == ['file'] * 3
    assert p.names() == ['file'] * 3 and [type(f.exception(0)) for f in files] == [type(None)] * 3 + [Cancelled]
    assert isinstance(post.result(0).exception(0), Cancelled)
    assert isinstance(p.sched.submit_idle_persistence(int).exception(0), OwnerStopped)


def test_a_stalled_owner_is_alive_not_ready_and_reported_once(caplog):
    now = 0.0
    s = ModelWorkScheduler(clock=lambda: now, stall_s=10)
    release = gate(s)
    assert s.ready
    now = 11.0
    with caplog.at_level(logging.ERROR, 'mlxspec'):
        assert s.alive and not s.ready and s.snapshot()['owner']['stalled']
    assert len(caplog.records) == 1 and 'release.wait' in caplog.text   # where it hangs
    release.set()
    s.submit_foreground(int).result(T)
    assert s.ready
    s.shutdown()
    assert not s.ready and not s.alive


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
def test_a_dead_owner_is_not_ready(sched, monkeypatch):
    idle = sched.submit_idle_persistence(threading.Event().wait, 0)
    waiting = [sched.submit_idle_postcommit(int), sched.submit_idle_persistence(int)]
    monkeypatch.setattr('mlxspec.scheduler.advance', lambda work: 1 / 0)
    sched.submit_foreground(int)
    for f in (idle, *waiting): assert f.exception(T) is None or f.exception(T).code == 'engine_stalled'
    while sched.alive: pass
    assert not sched.ready and sched.submit_idle_postcommit(int).exception(0).status == 503


class Evening(RuleBasedStateMachine):
    """Any order of all kinds of work, time and cancellation: foreground has absolute priority, every future ends, and without an
    open request idle work ends within its bound, whatever the graces."""
    @initialize(idle=st.sampled_from([0., .3, 50.]), quiet=st.sampled_from([0., .25, 50.]), beat=st.booleans())
    def begin(self, idle, quiet, beat):
        self.p = Played(graces=Graces(idle, quiet, 5.), pin_limit=100, keepalive=KeepAlive(self.idle_step if beat else None, 1., 10.))
        self.sched, self.futures, self.events, self.idle, self.down = self.p.sched, [], [], [], False

    def idle_step(self):
        f = self.sched._desk.bands.foreground
        assert not len(f) and not f.current, 'idle work ran before foreground work'

    def body(self, fault, children=0):
        self.idle_step()
        if children: self.idle.append(self.sched.submit_idle_postcommit(self.body, False, children - 1))
        if fault: raise ValueError

    @rule(n=st.integers(0, 4))
    def request(self, n):
        self.events.append(threading.Event())
        self.futures.append(self.sched.submit_stepper(steps(n), self.events[-1]))

    @rule(fault=st.booleans(), key=st.sampled_from([None, 'a']))
    def call(self, fault, key): self.futures.append(self.sched.submit_foreground((lambda: 1 / 0) if fault else int, batch_key=key))

    @rule(fault=st.booleans(), children=st.integers(0, 5))
    def postcommit(self, fault, children): self.idle.append(self.sched.submit_idle_postcommit(self.body, fault, children))

    @rule(fault=st.booleans(), key=st.sampled_from([None, 'a', 'b']), size=st.sampled_from([0, 30, 60, 120]), long=st.booleans())
    def persistence(self, fault, key, size, long):
        def many():
            for _ in range(3):
                self.body(False)
                yield
            self.body(fault)
        self.idle.append(self.sched.submit_idle_persistence(*([many] if long else [self.body, fault]), coalesce_key=key, pinned_bytes=size))

    @rule(data=st.data())
    @precondition(lambda self: self.events)
    def cancel(self, data): data.draw(st.sampled_from(self.events)).set()

    @rule(data=st.data())
    @precondition(lambda self: self.idle)
    def withdraw(self, data): data.draw(st.sampled_from(self.idle)).cancel()

    @rule(n=st.integers(1, 8))
    def turns(self, n):
        for _ in range(n): self.down = not self.sched.turn() or self.down

    @rule(drain=st.booleans())
    def shutdown(self, drain):
        self.sched.shutdown(drain)
        self.down = True

    @invariant()
    def bounded(self):
        if not hasattr(self, 'p'): return
        waiting = [w for w in self.sched._desk.bands.persistence if not w.started]
        assert sum(w.pinned for w in waiting) <= 100
        assert not self.down or all(f.done() for f in self.futures + self.idle)

    def teardown(self):
        if not hasattr(self, 'p'): return
        while not self.down and any(not f.done() for f in self.futures): self.sched.turn()
        end = self.p.now + 5.0 + .001
        while not self.down and self.p.now < end and self.sched._desk.bands: self.sched.turn()
        assert all(f.done() for f in self.futures + self.idle)
        for f in self.futures + self.idle:
            e = f.exception(0) if not f.cancelled() else Cancelled()
            assert e is None or isinstance(e, Cancelled | OwnerStopped | EngineError | ZeroDivisionError | ValueError)
        depth = self.sched.snapshot()['queue_depth']
        assert set(depth.values()) == {0}
        self.sched.shutdown()


TestEvening = Evening.TestCase
TestEvening.settings = settings(max_examples=30, stateful_step_count=30, derandomize=True, deadline=None)
