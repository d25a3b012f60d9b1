"The window gate against its contract, scenario by scenario, step counts included."
import pytest

from mlxspec.core import StepResult
from mlxspec.gate import (
    GateDecision,
    GateMode,
    GateStep,
    WindowGate,
    entry_pin_forces_verify,
    entry_pin_tokens,
    spec_dispatch_eligible,
)

V, D = GateStep.MeasureVerify, GateStep.MeasureDecode


class Driver:
    "A gate with the contract's shorthand: M and S record verify and plain steps in milliseconds."
    def __init__(self): self.g = WindowGate()
    def M(self, n, emitted, ms, width=1):
        for _ in range(n): self.g.record_verify(ms / 1000, emitted, width)
    def S(self, n, ms, width=1):
        for _ in range(n): self.g.record_decode(ms / 1000, width)
    @property
    def next(self): return self.g.next_step().kind
    @property
    def steps(self): return self.g.window.steps
    @property
    def stale(self): return tuple(s.stale for s in self.g.stats.values())
    def until(self, kind, one):
        n = 0
        while self.next is not kind:
            one(); n += 1
            assert n < 100_000
        return n
    def M_until_S(self, emitted, ms, width=1): return self.until(D, lambda: self.M(1, emitted, ms, width))


@pytest.fixture
def d(): return Driver()


def test_01_starts_with_verify(d):
    assert d.next is V and not d.g.in_serial_mode()


def test_02_never_switches_unmeasured(d):
    d.M(64, 1, 100)
    assert not d.g.in_serial_mode() and d.g.take_fresh_decision() is None


def test_03_serial_probe_after_the_refresh_interval(d):
    assert d.M_until_S(2, 50) == 512
    d.S(16, 40)
    assert d.next is V and d.g.observe() == (GateMode.Mtp, pytest.approx(40))
    assert d.g.mtp_tps == pytest.approx(40) and d.g.serial_tps == pytest.approx(25)


def test_04_two_losses_disable(d):
    d.M_until_S(2, 100)
    d.S(16, 10)
    assert not d.g.in_serial_mode()
    d.M(1, 2, 100)
    assert d.next is D
    d.S(16, 10)
    assert d.g.in_serial_mode()
    assert d.g.take_fresh_decision() is GateDecision.DisableMtp and d.g.take_fresh_decision() is None


def test_05_a_loss_that_does_not_repeat_is_forgotten(d):
    d.M_until_S(2, 50)
    d.S(16, 10)
    assert d.M_until_S(2, 50) == 1
    d.S(16, 40)
    assert not d.g.in_serial_mode() and d.g.losing_windows == 0 and d.g.take_fresh_decision() is None


def test_06_inside_the_margin_nothing_happens(d):
    d.M_until_S(2, 50)
    d.S(16, 24.390)
    assert d.g.serial_tps == pytest.approx(41, abs=.01)
    for _ in range(64):
        d.M(1, 2, 50)
        assert not d.g.in_serial_mode()


def test_07_and_back_again(d):
    for _ in range(2): d.M_until_S(2, 100); d.S(16, 10)
    assert d.g.in_serial_mode() and d.g.take_fresh_decision() is GateDecision.DisableMtp
    for wanted in (256, 1):
        assert d.until(V, lambda: d.S(1, 10)) == wanted
        d.M(16, 3, 10)
    assert not d.g.in_serial_mode() and d.g.take_fresh_decision() is GateDecision.KeepMtp


def test_08_a_deeper_context_is_measured_again(d):
    d.g.note_depth(600)
    d.M(32, 2, 50)
    assert d.g.maybe_remeasure(1300) and d.g.mtp_tps == pytest.approx(40)
    d.M(16, 2, 50)
    assert d.next is D
    d.S(16, 50)
    assert d.next is V and not d.g.in_serial_mode()
    tokens = 0
    while tokens < 1000:
        d.M(1, 2, 50); tokens += 2
        assert d.next is V


def test_09_a_verify_step_counts_one_token_at_least(d):
    d.M(16, 0, 10)
    assert d.g.mtp_tps == pytest.approx(100)


def test_10_entry_pin():
    assert [entry_pin_forces_verify(n, 8) for n in (0, 7, 8)] == [True, True, False]


def test_11_entry_pin_option(caplog):
    assert [entry_pin_tokens(s) for s in (None, '0', '12', 'garbage', '-3')] == [8, 0, 12, 8, 8]
    assert len(caplog.records) == 2


def test_12_a_stale_estimate_cannot_win(d):
    d.M_until_S(2, 50)
    d.S(16, 40)
    assert d.g.maybe_remeasure(2000)
    for _ in range(64):
        if d.next is not V: break
        d.M(1, 2, 200)
        assert not d.g.in_serial_mode() and d.g.take_fresh_decision() is None


def test_13_growing_context(d):
    depth, recorded, serial, at = 64, 0, 0, []
    while recorded < 2048:
        verify = d.next is V
        d.M(1, 2, 50) if verify else d.S(1, 50)
        serial += not verify
        depth, recorded = depth + 1 + verify, recorded + 1 + verify
        d.g.note_depth(depth)
        if d.g.maybe_remeasure(depth): at.append(depth)
    assert (d.g.regime_reprobes, serial) == (2, 32)
    assert [a // 2 * 2 for a in at] == [1024, 2048]


def test_14_settling_after_a_wider_batch(d):
    d.M_until_S(2, 50)
    d.S(32, 10, width=4)
    assert d.g.serial_tps == pytest.approx(400, abs=1)


def test_15_the_probe_interval_is_per_sequence():
    assert Driver().M_until_S(2, 50) == Driver().M_until_S(32, 50, width=16) == 512


def test_16_a_new_width_needs_new_evidence(d):
    d.M_until_S(2, 50)
    d.S(16, 40)
    d.M(8, 2, 50)
    d.M(16, 1, 100, width=8)
    assert d.stale == (True, True)
    d.M(16, 6, 5, width=8)
    assert d.g.mtp_tps == pytest.approx(1200, abs=1) and d.next is D
    d.S(16, 10, width=8)
    assert d.g.serial_tps == pytest.approx(800) and not d.g.stats[GateMode.Serial].stale
    assert not d.g.in_serial_mode() and d.g.take_fresh_decision() is None


def test_17_no_window_mixes_buckets(d):
    for w in (5, 6, 7, 8, 6, 5, 7): d.M(1, w, 50, width=w)
    assert d.stale == (False, False) and d.steps == 7
    d.M(1, 4, 50, width=4)
    assert d.stale == (True, True) and d.steps == 0
    d.M(15, 4, 50, width=4)
    assert d.steps == 0 and d.next is V
    d.M(16, 4, 50, width=4)
    assert d.next is D


def test_18_eligibility():
    think = dict(inside_thinking=True, post_think_emitted=0, output_len=0)
    assert not spec_dispatch_eligible(**think)
    assert spec_dispatch_eligible(False, 0, 0)
    assert spec_dispatch_eligible(**think, spec_think=True, resume_guard=0)
    assert [spec_dispatch_eligible(False, n, n, resume_guard=5) for n in (4, 5)] == [False, True]


def test_protocol_records_what_the_contract_would(d):
    "next_step and record drive the same machine; only the first step after a change of kind is left out."
    p, n = WindowGate(), 0
    while (step := p.next_step(1, {'head': (2, 3)}, 0)).kind is V:
        assert (step.arm, step.k) == ('head', 3)
        p.record(StepResult('verify', .05, 2, k=3, arm='head')); n += 1
    assert n == 512 and p.mtp_tps == pytest.approx(40)
    p.record(StepResult('plain', 9., 1))                # fills the pipeline: not counted
    p.record(StepResult('verify', 9., 5, k=3))          # pinned: not counted
    p.record(StepResult('plain', 9., 1))                # the first after it neither
    for _ in range(16): p.record(StepResult('plain', .04, 1))
    assert p.serial_tps == pytest.approx(25) and p.next_step(1, {'head': (2,)}, 0).kind is V


def test_a_silent_drafter_counts_for_the_mode_that_asked(d):
    for _ in range(16): d.g.record(StepResult('plain', .05, 1, arm='lookup'))
    assert d.g.mtp_tps == pytest.approx(20) and d.g.serial_tps is None
