"The published body and the state machine behind it: examples of the contract, nulls, precedence, persistence."
import dataclasses
import itertools
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlxspec import policy
from mlxspec.core import StepResult
from mlxspec.evidence import MAX_SAMPLES, PERIOD, T975, VERDICTS, Sample, Tally, estimate, excess, middle, scheduled, verdict, why_not
from mlxspec.hints import HintFile, HintKey
from mlxspec.policy import REASONS, SCHEMA_VERSION, SET_IN, STATES, Gpu, MtpPolicy, MtpPolicySnapshot, Pairing, say

CONTRACT = ('schema_version state reason decline_detail verdict mtp_enabled target drafter hardware block_size acceptance_rate '
            'samples samples_required samples_remaining').split()
GPU = ['gpu_vendor', 'gpu_device', 'gpu_architecture']
ADDED = ('settled_by restored estimated_speedup speedup_low speedup_high plain_ms_per_token spec_ms_per_token tokens_per_round '
         'acceptance_by_position starved_by exactness settled_at').split()
M5 = Gpu('Apple', 'Apple M5 Max', 'applegpu_g17s')
PAIR = Pairing('Gemma4-12B', 'Gemma4-12B-MTP', 'M5-16c', 4)
BIG = Pairing('gemma-4-31b-it-4bit', 'gemma-4-31b-it-assistant-bf16', 'M5-40c', 4)
WHY = ('verify block position 0 differs from the single-token chain in 245722 of 524288 logit bytes. '
       'Disabling qmv_wide did not make it exact either.')

def golden(*values):
    return dict(zip(CONTRACT, values, strict=True))

# Values of the contract's four example bodies, in the order of CONTRACT.
EXAMPLES = dict(
    settled=(MtpPolicySnapshot.of(PAIR, 'settled', M5, verdict='enable', mtp_enabled=True, acceptance_rate=.62, samples=4,
                                  settled_by='measured', restored=False),
             golden(1, 'settled', None, None, 'enable', True, *PAIR, .62, 4, 4, None)),
    profiling=(MtpPolicySnapshot.of(PAIR, 'profiling', M5, mtp_enabled=True, acceptance_rate=29 / 50, samples=2, samples_remaining=2),
               golden(1, 'profiling', None, None, None, True, *PAIR, .58, 2, 4, 2)),
    no_drafter=(MtpPolicySnapshot.unavailable('no_mtp_dispatch', False, M5),
                golden(1, 'unavailable', 'no_mtp_dispatch', None, None, False, None, None, None, None, None, 0, 4, None)),
    declined=(MtpPolicySnapshot.of(BIG, 'exactness_declined', M5, decline_detail=WHY, mtp_enabled=False),
              golden(1, 'exactness_declined', None, WHY, None, False, *BIG, None, 0, 4, None)))

@pytest.mark.parametrize('name', EXAMPLES)
def test_example_bodies(name):
    snap, want = EXAMPLES[name]
    body = json.loads(json.dumps(snap.wire()))
    assert {k: body[k] for k in CONTRACT} == want
    assert {k: body[k] for k in GPU} == dict(zip(GPU, M5, strict=True))
    assert list(body) == CONTRACT + GPU + ADDED        # every key, in every state
    assert all(type(body[k]) is type(want[k]) for k in CONTRACT)

@pytest.mark.parametrize('name', EXAMPLES)
def test_health_form(name):
    snap, want = EXAMPLES[name]
    want = {k: v for k, v in want.items() if k not in ('schema_version', 'samples_remaining')}
    want['status'] = want.pop('state')
    health = snap.health()
    assert {k: health[k] for k in want} == want
    assert set(health) == set(snap.wire()) - {'schema_version', 'samples_remaining', 'state'} | {'status'}

# Which fields are null, per state: the table of the policy page, written out once more by hand.
NULLS = dict(
    settled='reason decline_detail samples_remaining starved_by',
    profiling='reason decline_detail verdict settled_by restored settled_at',
    forced='reason decline_detail verdict acceptance_rate samples_remaining settled_by restored',
    exactness_declined='reason verdict acceptance_rate samples_remaining settled_by restored',
    unavailable='decline_detail verdict target drafter hardware block_size acceptance_rate samples_remaining settled_by restored')

def snapshots():
    yield from (s for s, _ in EXAMPLES.values())
    for pin in (True, False): yield MtpPolicySnapshot.of(PAIR, 'forced', M5, mtp_enabled=pin)
    for on in (True, False): yield MtpPolicySnapshot.unavailable('adaptive_disabled', on, M5)
    yield MtpPolicySnapshot.unavailable('worker_not_ready', None, M5)
    yield MtpPolicySnapshot.of(PAIR, 'profiling', M5, mtp_enabled=True, samples_remaining=4)

@pytest.mark.parametrize('snap', list(snapshots()), ids=lambda s: s.state)
def test_null_table(snap):
    body = snap.wire()
    assert [k for k in NULLS[snap.state].split() if body[k] is not None] == []
    for k in SET_IN: assert (body[k] is None) == (k in NULLS[snap.state].split()), k
    assert body['samples_required'] == 4
    assert (body['mtp_enabled'] is None) == (snap.reason == 'worker_not_ready')

@pytest.mark.parametrize('field', [*SET_IN, 'mtp_enabled', 'samples', 'acceptance_rate'])
@pytest.mark.parametrize('snap', list(snapshots()), ids=lambda s: s.state)
def test_no_snapshot_contradicts_the_table(snap, field):
    other = {'samples': 3, 'acceptance_rate': .5, 'mtp_enabled': None if snap.mtp_enabled is not None else True}.get(
        field, 'x' if getattr(snap, field) is None else None)
    if field in ('samples', 'acceptance_rate') and snap.state in ('settled', 'profiling'): return
    with pytest.raises(ValueError): dataclasses.replace(snap, **{field: other})

def test_label_sets_hold_the_contract():   # they only grow
    assert set(STATES) >= {'settled', 'profiling', 'forced', 'unavailable', 'exactness_declined'}
    assert set(REASONS) >= {'no_mtp_dispatch', 'adaptive_disabled', 'worker_not_ready'}
    assert set(VERDICTS) >= {'enable', 'decline'}

def test_the_changelog_knows_every_schema_version():
    text = (Path(__file__).parent.parent/'CHANGELOG.md').read_text()
    assert re.findall(r'schema version (\d+)', text) == [str(n) for n in range(SCHEMA_VERSION, 0, -1)] # newest first

def test_schema_version_is_in_the_body(monkeypatch):
    assert SCHEMA_VERSION == 1
    monkeypatch.setattr(policy, 'SCHEMA_VERSION', 2)
    assert MtpPolicySnapshot.unavailable('worker_not_ready', None).wire()['schema_version'] == 2

# The state machine

def sample(speedup, kept=(6, 4, 2), rounds=8): # a generation of known speedup
    tokens = rounds + sum(kept)
    return Sample(.010, .010 * tokens / rounds / speedup, rounds, tokens, kept)

def key(**change): return HintKey(**dict(target='t', drafter='d', hardware='M5-16c', block_size=4, mlx='0.32.4', mlx_lm='0.32.2') | change)

class Memory:
    "Hints without a disk; counts."
    def __init__(self, hint=None): self.hint, self.loads, self.saves = hint, 0, 0
    def load(self): self.loads += 1; return self.hint
    def save(self, hint): self.hint, self.saves = hint, self.saves + 1

def settled_hint():
    m = Memory()
    p = MtpPolicy(PAIR, hints=m, now=lambda: 1e9)
    for _ in range(4): p.record(sample(1.5))
    return m.hint

CONDITIONS = [ # in order of precedence: what is set, the state it leads to
    ('no drafter', dict(pair=None), 'no_mtp_dispatch'),
    ('not exact', dict(declined=WHY), 'exactness_declined'),
    ('adaptive off', dict(adaptive=False), 'adaptive_disabled'),
    ('pin', dict(pin=True), 'forced'),
    ('hint', dict(hints=None), 'settled')]

def label(p): return p.snapshot.reason or p.snapshot.state

@pytest.mark.parametrize('which', list(itertools.chain.from_iterable(itertools.combinations(range(5), n) for n in range(6))))
def test_precedence(which):
    kw = dict(pair=PAIR)
    for i in which: kw |= CONDITIONS[i][1]
    if 4 in which: kw['hints'] = Memory(settled_hint())
    p = MtpPolicy(kw.pop('pair'), now=lambda: 1e9, **kw)
    assert label(p) == (CONDITIONS[which[0]][2] if which else 'profiling')

@pytest.mark.parametrize('options, enabled', [(dict(), False), (dict(static=True), True), (dict(static=True, pin=False), False), (dict(pin=True), True)])
def test_adaptive_off_is_the_pin_or_the_default(options, enabled):
    p = MtpPolicy(PAIR, adaptive=False, **options)
    assert (p.snapshot.mtp_enabled, p.arm(p.open())) == (enabled, 'spec' if enabled else 'plain')

@pytest.mark.parametrize('rest, state', [(dict(), 'profiling'), (dict(pin=False), 'forced'), (dict(adaptive=False), 'adaptive_disabled')])
def test_allow_inexact_lifts_the_veto_only(rest, state, caplog):
    assert label(MtpPolicy(PAIR, declined=WHY, allow_inexact=True, **rest)) == state
    assert not caplog.records

def test_the_veto_warns_once_with_its_sentence(caplog):
    p = MtpPolicy(PAIR, declined=WHY, pin=True)
    for _ in range(3): p.close(p.open())
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [('WARNING', WHY)]
    assert p.snapshot.decline_detail == WHY

@pytest.mark.parametrize('kw', [dict(pin=True), dict(pin=False), dict(adaptive=False), dict(declined=WHY)])
def test_without_measuring_no_hint_is_touched(kw):
    m = Memory(settled_hint())
    p = MtpPolicy(PAIR, hints=m, now=lambda: 1e9, **kw)
    for _ in range(9): p.record(sample(.5))
    assert (m.loads, m.saves, p.snapshot.samples) == (0, 0, 0)

def test_rate_is_rounded_on_settling_only():
    m = Memory()
    p = MtpPolicy(PAIR._replace(block_size=2), hints=m)
    for _ in range(3):
        p.record(sample(1.5, kept=(1,)))
        assert p.snapshot.acceptance_rate == .125       # the raw quotient
    p.record(sample(1.5, kept=(1,)))
    assert p.snapshot.acceptance_rate == m.hint.acceptance_rate == .13

def test_snapshots_are_published_on_change_only():
    seen = []
    p = MtpPolicy(PAIR, publish=seen.append)
    for _ in range(5): p.close(p.open())                # misses that change nothing yet
    assert [s.state for s in seen] == ['profiling']
    for _ in range(5): p.close(p.open())
    assert [s.starved_by for s in seen] == [None, 'never_drafted']
    for _ in range(6): p.record(sample(1.5))
    assert [s.samples for s in seen] == [0, 0, 1, 2, 3, 4]
    assert [s.samples_remaining for s in seen] == [4, 4, 3, 2, 1, None]
    assert seen[2].starved_by is None and seen[-1] is p.snapshot

def test_remaining_is_never_zero_while_profiling():
    p, required = MtpPolicy(PAIR), []
    while p.profiling:
        required.append((p.snapshot.samples, p.snapshot.samples_required))
        assert p.snapshot.samples_remaining == required[-1][1] - required[-1][0] >= 1
        p.record(sample(1.02))
    assert p.snapshot.samples == p.snapshot.samples_required == MAX_SAMPLES
    assert required[::4] == [(n, n + 4) for n in range(0, MAX_SAMPLES, 4)]

@pytest.mark.parametrize('static', [True, False])
def test_ambiguous_is_left_to_the_default_and_says_so(static):
    p = MtpPolicy(PAIR, static=static)
    while p.profiling: p.record(sample(1.02))
    assert (p.snapshot.settled_by, p.snapshot.mtp_enabled) == ('static_default', static)
    assert say(p.snapshot.wire()).startswith('not measured: hardware default')

def test_early_decline_takes_two_samples():
    p = MtpPolicy(PAIR)
    p.record(sample(.1))
    assert p.profiling
    p.record(sample(.1))
    assert (p.snapshot.verdict, p.snapshot.samples, p.snapshot.samples_required) == ('decline', 2, 4)

@pytest.mark.parametrize('speedups', [[1.5] * 4, [.5] * 2, [.97, 1.08, 1.1, 1.3] * 6, [1.02] * 24], ids=str)
def test_a_restart_changes_no_contract_field(tmp_path, speedups):
    begin = lambda **kw: MtpPolicy(PAIR, hints=HintFile(tmp_path, key(**kw)), gpu=M5, now=lambda: 1e9)
    old = begin()
    for x in speedups: old.record(sample(x))
    new = begin()
    a, b = old.snapshot.wire(), new.snapshot.wire()
    assert a['state'] == 'settled' and {k for k in a if a[k] != b[k]} == {'restored'}
    for field, other in dict(drafter='e', mlx='0.33', blas='x', block_size=8).items():
        assert begin(**{field: other}).snapshot.state == 'profiling'

@pytest.mark.parametrize('speedup, again', [(.5, 'profiling'), (1.5, 'settled')])
def test_a_decline_expires_and_an_enable_does_not(tmp_path, speedup, again):
    clock = [1e9]
    begin = lambda: MtpPolicy(PAIR, hints=HintFile(tmp_path, key()), now=lambda: clock[0])
    p = begin()
    while p.profiling: p.record(sample(speedup))
    clock[0] += 29 * 86400
    assert p.open() and p.snapshot.state == begin().snapshot.state == 'settled'
    clock[0] += 2 * 86400
    assert begin().snapshot.state == again
    p.open()
    assert p.snapshot.state == again
    while p.profiling: p.record(sample(speedup))
    assert begin().snapshot.state == 'settled'          # the new verdict replaced the old one

def drive(p, steps, verify_s=.012):
    t = p.open()
    for _ in range(steps):
        p.step(t, StepResult('verify', verify_s, 3, 4, 3, 2, 'qwen3_5_mtp') if p.arm(t) == 'spec' else StepResult('plain', .010, 1))
    return t

def test_a_verdict_reaches_requests_that_are_under_way():
    p = MtpPolicy(PAIR)
    t = drive(p, 3, .1)
    assert p.arm(t) == 'spec'
    for _ in range(3): p.close(drive(p, 40, .1))
    assert p.snapshot.verdict == 'decline' and p.arm(t) == 'plain'
    p.close(t)
    assert p.snapshot.samples == 2

def test_a_cancelled_generation_says_nothing():
    p = MtpPolicy(PAIR)
    before = p.snapshot
    for _ in range(20): drive(p, 100)
    assert p.snapshot is before

def test_starvation_names_the_gate():
    p = MtpPolicy(PAIR, gate='gate_off')
    assert (p.snapshot.starved_by, p.snapshot.state) == ('gate_off', 'profiling')
    p = MtpPolicy(PAIR)
    for i in range(8):
        assert p.snapshot.starved_by is None
        p.close(p.open(), refused='exactness_context' if i % 2 else 'grammar' if i == 2 else 'exactness_context')
    assert p.snapshot.starved_by == 'exactness_context'
    assert 'held back by exactness_context' in say(p.snapshot.wire())
    p.close(drive(p, 60))
    assert p.snapshot.starved_by is None and p.snapshot.samples == 1

def test_starvation_is_about_the_last_eight_and_a_known_gate_is_the_reason():
    p, known = MtpPolicy(PAIR), MtpPolicy(PAIR, gate='gate_off')
    for why in ['too_short'] * 9 + ['batched'] * 5:
        for q in (p, known): q.close(q.open(), refused=why)
    assert (p.snapshot.starved_by, known.snapshot.starved_by) == ('batched', 'gate_off')
    known.record(sample(1.5))
    assert known.snapshot.starved_by is None            # it lets some through, whatever it said

def test_what_is_kept_has_names_and_a_day():
    m, clock = Memory(), [1e9]
    begin = lambda: MtpPolicy(PAIR, hints=m, now=lambda: clock[0])
    p = begin()
    while p.profiling:
        assert p.snapshot.settled_at is None and [getattr(p.snapshot, f) for f in Pairing._fields] == [*PAIR]
        p.record(sample(1.5))
    assert (m.hint.target, m.hint.drafter, m.saves) == (PAIR.target, PAIR.drafter, 1)
    clock[0] += 9 * 86400
    assert p.snapshot.settled_at == begin().snapshot.settled_at == '2001-09-09'

def test_every_state_of_the_machine_fits_the_table():
    for snap in [MtpPolicy(None).snapshot, MtpPolicy(PAIR, declined=WHY).snapshot, MtpPolicy(PAIR, pin=False).snapshot,
                 MtpPolicy(PAIR, adaptive=False).snapshot, MtpPolicy(PAIR).snapshot]: test_null_table(snap)
    p = MtpPolicy(PAIR, exactness=dict(strategy='block', level='identical', max_width={'short': 8}))
    p.record(sample(1.5))
    assert p.snapshot.wire()['acceptance_by_position'] == [.75, .5, .25]
    p.snapshot.wire()['exactness']['max_width']['short'] = 0
    assert p.snapshot.exactness['max_width'] == {'short': 8}    # a body is the caller's own
    json.dumps(p.snapshot.wire(), allow_nan=False)

# ---- thresholds, to the last step

def tally(spec, plain, tokens=None): # counted steps of each arm; tokens of the rounds
    t = Tally(4)
    t.verified, t.rounds, t.tokens = spec, spec, 2 * spec if tokens is None else tokens
    t.times = {'spec': [.02] * spec, 'plain': [.01] * plain}
    return t

@pytest.mark.parametrize('t, why', [(tally(4, 6), None), (tally(3, 6), 'too_short'), (tally(4, 5), 'too_short'), (tally(4, 6, 6), None),
                                    (tally(4, 6, 5), 'too_short'), (tally(9, 3), 'too_short'), (tally(1, 40), 'too_short')])
def test_the_least_evidence(t, why): assert why_not(t) == why

def test_the_interval_by_hand():
    logs = [math.log(x) for x in (1.2, 1.4, 1.6, 1.9)]
    m, e = sum(logs) / 4, estimate([sample(x) for x in (1.2, 1.4, 1.6, 1.9)])
    s2 = (3 * .2 ** 2 + sum((x - m) ** 2 for x in logs)) / 6     # six degrees of freedom: three of the prior, three of four samples
    half = 2.447 * math.sqrt(s2 / 4)                             # the 97.5 % point of Student's t with six
    assert [math.log(x) for x in e[:3]] == pytest.approx([m, m - half, m + half])
    assert (e.acceptance, e.tokens_per_round, e.kept) == (.5, 2.5, (.75, .5, .25))
    assert e.plain_ms == pytest.approx(10) and e.spec_ms == pytest.approx(10 / math.exp(m))
    assert T975[0] == 3.182 and T975[-1] == 2.056 and len(T975) == MAX_SAMPLES # 3 and 26 degrees

def test_arms_take_turns_in_mirrored_blocks(): assert ''.join(scheduled(i)[0] for i in range(-16, 16)) == ('ssss' + 'pppppppp' + 'ssss') * 2

def test_what_the_losing_arm_cost_is_counted_in_its_own_tokens(): assert (excess(2., 1., 10, 7), excess(1., 2., 10, 7)) == (('plain', 10.), ('spec', 7.))

@pytest.mark.parametrize('k, width, rounds, why', [(4, 1, 1, 'too_short'), (3, 1, 0, 'other_width'), (4, 2, 0, 'batched')])
def test_only_rounds_of_the_pairings_width_and_of_one_request_are_counted(k, width, rounds, why):
    t = Tally(4)
    for _ in range(3): t.add(StepResult('verify', .02, 2, k, k - 1, 1, width=width))
    assert len(t.times['spec']) == (0 if k == 3 else 2)
    assert (t.rounds, t.tokens, t.kept) == ((3, 6, [3, 0, 0]) if rounds else (0, 0, [0, 0, 0])) and why_not(t) == why

@pytest.mark.parametrize('n, log, says', [(24, .045, None), (24, .062, 'enable'), (4, .5, 'enable'), (3, .5, None), (2, -.9, 'decline'), (2, -.5, None), (4, -.5, 'decline'), (1, -9., None),
                                          (24, -.02, None), (24, -.04, 'decline')])
def test_the_least_gain(n, log, says): # 24 samples of no scatter: 1.03 lies a little over the lower end of the first
    samples = [sample(math.exp(log))] * n
    assert verdict(samples, max(4, n)) == says

@pytest.mark.parametrize('generation, on', [(None, False), (13, False), (14, False), (15, True), (16, True), (17, True)])
def test_the_hardware_default_begins_with_the_m3(generation, on): assert policy.static_default(generation) is on

def test_two_spikes_in_eight_steps_move_nothing(): assert middle([1.] * 6 + [99., 900.]) == 1.

@pytest.mark.parametrize('round_s, n, best', [(.04, 1, .01), (.0025, 1, .0025), (.16, 4, .01), (.01, 4, .0025)], ids=str)
def test_the_losing_arm_costs_a_tenth_of_a_long_answer(round_s, n, best): # a round of n tokens; seconds per token of the better arm
    t, lost, whole, worst = Tally(4), 0., 0., 0.
    for i in range(4000):
        r = StepResult('verify', round_s, n, 4, 3, n - 1) if t.arm() == 'spec' else StepResult('plain', .01, 1)
        t.add(r)
        lost, whole = lost + r.wall_s - r.emitted * best, whole + r.wall_s
        if i > 2000: worst = max(worst, lost / whole)
    assert .07 <= lost / whole <= worst <= .11

def test_a_head_that_is_silent_most_of_the_time_is_not_judged_by_two_rounds():
    t = Tally(4)
    for i in range(3 * PERIOD):
        t.add(StepResult('verify', 9., 2, 4, 3, 1) if i in (1, 2) else StepResult('plain', .01, 1))
        assert t.arm() == scheduled(i + 1)                       # the schedule goes on, whatever the two have cost
    assert why_not(t) == 'too_short'

def test_drafts_that_a_stop_cut_off_were_right_all_the_same():
    t = Tally(4)
    t.add(StepResult('verify', .02, 2, 4, 3, 3))
    assert (t.tokens, t.kept) == (2, [1, 1, 1])

@pytest.mark.parametrize('arm', ['spec', 'plain'])
def test_the_first_step_after_a_switch_is_warm_up(arm):
    t, asked = Tally(4), ''
    for _ in range(2 * PERIOD):
        now = t.arm()
        wall = 9. if now == arm != asked else .01
        t.add(StepResult('verify', wall, 3, 4, 3, 2) if now == 'spec' else StepResult('plain', wall, 1))
        asked = now
    assert len(t.times[arm]) >= 4 and set(t.times['spec'] + t.times['plain']) == {.01} and t.total_s < 1

def test_a_cold_first_request_locks_nothing_in():
    "A compiler, a cold cache: rounds of the first requests that take a thousand times as long as they should."
    for chats in (1, 4, 40):
        p = MtpPolicy(PAIR)
        for _ in range(chats): p.close(drive(p, 1, 10.))        # one round each
        assert (p.snapshot.state, p.snapshot.samples) == ('profiling', 0)
    p, t = MtpPolicy(PAIR), None
    while p.profiling:
        first, t = t is None, p.open()
        for i in range(60):
            p.step(t, StepResult('verify', 10. if first and i < 2 else .012, 3, 4, 3, 2) if p.arm(t) == 'spec' else StepResult('plain', .010, 1))
        p.close(t)
    assert (p.snapshot.verdict, p.snapshot.settled_by) == ('enable', 'measured')

def test_a_verdict_that_expires_while_it_serves_still_knows_the_gate_below():
    clock = [1e9]
    p = MtpPolicy(PAIR, hints=Memory(dataclasses.replace(settled_hint(), verdict='decline', written_at=1e9)), gate='gate_off', now=lambda: clock[0])
    assert p.snapshot.verdict == 'decline'
    clock[0] += 31 * 86400
    p.open()
    assert (p.snapshot.state, p.snapshot.starved_by) == ('profiling', 'gate_off')

@pytest.mark.parametrize('snap, words', [
    (EXAMPLES['profiling'][0], 'measuring: 2 of 4 single-request generations done'), (EXAMPLES['settled'][0], 'measured, MTP is on'),
    (EXAMPLES['declined'][0], 'MTP configured but vetoed; running classic decode: ' + WHY),
    (EXAMPLES['no_drafter'][0], 'nothing to measure: no MTP drafter, or a mode without a path for one'),
    (MtpPolicySnapshot.of(PAIR, 'forced', M5, mtp_enabled=True), 'pinned on by MLXSPEC_ENABLE_MTP_B1, not measured'),
    (MtpPolicySnapshot.unavailable('adaptive_disabled', False, M5), 'not measured: MLXSPEC_MTP_ADAPTIVE is off, MTP is off'),
    (MtpPolicySnapshot.unavailable('worker_not_ready', None, M5), 'the model is still loading')], ids=lambda x: '')
def test_every_state_in_words(snap, words):
    assert say(snap.wire()) == words
    for change in (dict(schema_version=2), dict(schema_version=None)): assert say(snap.wire() | change).startswith('unreadable: schema version ')
    for change in (dict(state='resting'), dict(state='unavailable', reason='holiday'), dict(state='settled', reason=None, verdict='perhaps')):
        assert say(snap.wire() | change) == policy.NO_VERDICT
    other = say(snap.wire(), Pairing(*PAIR[:3], 5))
    assert other == (words if snap.target is None else 'no verdict for this pairing: the server runs another one') # block_size included

def test_rooms_of_the_policy_stay_light():
    code = ("import sys, mlxspec.policy, mlxspec.policy_sim; "
            "print([m for m in ('mlx', 'mlx.core', 'mlx_lm', 'transformers', 'numpy', 'fastapi') if m in sys.modules])")
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout == '[]\n'
