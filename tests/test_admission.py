"The waiting room in any order of events, and with many threads. (How it works is told in nbs/30_admission.ipynb.)"
import threading
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlxspec.admission import Admission, Drain
from mlxspec.core import Cancelled, RequestError


class Request:
    "Anything: not hashable, equal to everything of its kind."
    __hash__ = None

    def __init__(self): self.cancelled = False
    def __eq__(self, other): return True


def test_requests_are_told_apart_by_identity():
    room = Admission(2)
    a, b = Request(), Request()
    room.enter(a)
    room.enter(b)
    assert room.withdraw(b) and not room.withdraw(b) and room.take() == [a] and room.take() == []
    assert not room.leave(b) and room.leave(a) and not room.leave(a) and room.active == 0


def test_a_deadline_of_its_own():
    now = 0.0
    room = Admission(0, 9, timeout_s=10, clock=lambda: now)
    slow, quick = Request(), Request()
    room.enter(slow)
    room.enter(quick, timeout_s=2)
    now = 2.0
    (r, e), = room.sweep()
    assert r is quick and (e.status, e.code) == (503, 'queue_timeout') and e.retry_after >= 1
    now = 10.0
    assert [r for r, _ in room.sweep()] == [slow] and room.sweep() == []


def test_retry_after_follows_the_measured_rate():
    now = 0.0
    room = Admission(1, 2, clock=lambda: now)
    for _ in range(3): room.enter(Request())
    for _ in range(8): # one leaves every 7 seconds, and another comes
        (r,) = room.take()
        now += 7
        room.leave(r)
        room.enter(Request())
    with pytest.raises(RequestError) as e: room.enter(Request())
    assert (e.value.status, e.value.code, e.value.retry_after) == (429, 'queue_full', 7)


def test_a_rate_is_never_silly():
    d = Drain()
    assert d.retry_after() == 1
    for now in (0., 1e-9, 2e-9): d.departed(now, 1)
    assert d.retry_after() == 1
    d.departed(1e9, 1)
    assert d.retry_after() == 120


def test_threads_lose_nobody():
    room, done, refused, lock, stop = Admission(3, 5, timeout_s=60), [], [], threading.Lock(), threading.Event()

    def client(n):
        for _ in range(200):
            r = Request()
            try: room.enter(r)
            except RequestError:
                with lock: refused.append(r)

    def server():
        while not (stop.is_set() and not len(room) and not room.active):
            for r in room.take():
                assert room.active <= 3
                assert room.leave(r)
                with lock: done.append(r)
            time.sleep(0)

    owner = threading.Thread(target=server)
    clients = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    for t in (owner, *clients): t.start()
    for t in clients: t.join(20)
    stop.set()
    owner.join(20)
    assert not owner.is_alive() and len(done) + len(refused) == 800 and room.waits.count == len(done)


class Room(RuleBasedStateMachine):
    "Nobody is lost, nobody overtakes, and the bounds hold."
    def __init__(self):
        super().__init__()
        self.now, self.max_active, self.max_queue = 0.0, 2, 3
        self.room = Admission(self.max_active, self.max_queue, 10.0, lambda r: r.cancelled, lambda: self.now)
        self.waiting, self.active, self.ended, self.n = [], [], [], 0

    @rule(timeout=st.sampled_from([None, 1., 30.]))
    def enter(self, timeout):
        r = Request()
        full, closed = len(self.waiting) + len(self.active) >= self.max_queue + self.max_active, self.room.closed
        try: self.room.enter(r, timeout)
        except RequestError as e:
            assert e.code == ('server_shutting_down' if closed else 'queue_full') and (full or closed)
            return
        assert not full and not closed
        r.deadline = self.now + (10. if timeout is None else timeout)
        self.n += 1
        self.waiting.append(r)

    @rule(n=st.sampled_from([None, 0, 1, 5]))
    def take(self, n):
        taken = self.room.take(n)
        good = [r for r in self.waiting if not r.cancelled and self.now < r.deadline]
        free = self.max_active - len(self.active)
        assert [id(r) for r in taken] == [id(r) for r in good[:free if n is None else min(n, free)]]
        self.waiting = [r for r in self.waiting if all(r is not t for t in taken)]
        self.active += taken

    @precondition(lambda self: self.active)
    @rule(i=st.integers(0, 1))
    def leave(self, i):
        r = self.active.pop(i % len(self.active))
        assert self.room.leave(r)
        self.ended.append(r)

    @precondition(lambda self: self.waiting)
    @rule(i=st.integers(0, 4), at_once=st.booleans())
    def cancel(self, i, at_once):
        r = self.waiting[i % len(self.waiting)]
        r.cancelled = True
        if at_once:
            assert self.room.withdraw(r)
            self._gone([r])

    def _gone(self, gone):
        self.ended += gone
        self.waiting = [r for r in self.waiting if all(r is not g for g in gone)]

    @rule()
    def sweep(self):
        back = self.room.sweep()
        for r, e in back:
            assert isinstance(e, Cancelled) if r.cancelled else (e.code == 'queue_timeout' and self.now >= r.deadline)
        self._gone([r for r, _ in back])
        assert all(not r.cancelled and self.now < r.deadline for r in self.waiting)

    @rule(dt=st.sampled_from([.1, 2., 12.]))
    def time_passes(self, dt): self.now += dt

    @rule()
    def close(self):
        back = self.room.close()
        assert all(e.status == 503 for _, e in back) and len(back) == len(self.waiting)
        self._gone([r for r, _ in back])

    @invariant()
    def adds_up(self):
        assert len(self.room) == len(self.waiting) and self.room.active == len(self.active) <= self.max_active
        assert len(self.waiting) + len(self.active) + len(self.ended) == self.n
        assert 1 <= self.room.drain.retry_after() <= 120


TestRoom = Room.TestCase
TestRoom.settings = settings(max_examples=30, stateful_step_count=30, derandomize=True, deadline=None)
