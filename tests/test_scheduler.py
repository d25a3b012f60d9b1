"The owner thread under load, faults and shutdown. (How it works is told in nbs/30_scheduler.ipynb.)"
import gc
import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError, wait

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlxspec.core import Cancelled, EngineError
from mlxspec.scheduler import ModelWorkScheduler, OwnerStopped

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
