"""Who decides the next step: rules before the policy, the policy before the gate; and what a request tells of it afterwards.

The first half drives a Pilot with made-up steps, the second decodes with a tiny target."""
import itertools
import logging
from collections import Counter, deque
from types import SimpleNamespace

import pytest

from mlxspec.budget import BudgetGate
from mlxspec.config import Settings
from mlxspec.core import Params, RequestStats, StepResult, ladder
from mlxspec.evidence import BLOCK, PERIOD, Sample
from mlxspec.gate import GateMode, GateStep, Step, Switch, WindowGate
from mlxspec.pairing import make_gate
from mlxspec.pilot import Course, Pilot, Rules, plain
from mlxspec.policy import MtpPolicy, Pairing

HEAD = 'qwen3_5_mtp'
PAIR = Pairing('t', 'd', 'cpu-x86_64-Unknown-0c', 3)
READY = {'lookup': 8, HEAD: 3}
WHY = 'exactness probe did not run: a test.'


class Says:
    "A gate that says what it is told to, and remembers what it hears."
    def __init__(self, *steps): self.steps, self.asked, self.heard, self.timeline = itertools.cycle(steps), [], [], deque()
    def next_step(self, width, ks, context): self.asked.append(ks); return next(self.steps)
    def pinned_step(self, width, ks): return Step(GateStep.MeasureVerify, 3, next(iter(ks)), 'entry_pin')
    def note_depth(self, depth): self.depth = depth
    def record(self, r): self.heard.append(r)
    def snapshot(self): return dict(gate='says', heard=len(self.heard))


VERIFY, PLAIN = Step(GateStep.MeasureVerify, 4, 'lookup', 'best', 50., 40.), Step(GateStep.MeasureDecode, reason='best', tps=50., rival_tps=40.)


def no_policy(gate, kinds=('lookup',), **rules) -> Course: return Pilot(MtpPolicy(None), gate, Rules(**rules)).open(kinds)
def done(s, n=1, tokens=(7,)): # a StepResult of a step that was carried out
    return StepResult(s.kind, .01, n, s.k, s.k - 1, n - 1 if s.k > 1 else 0, s.arm), list(tokens)
def go(course, ready=READY, tokens=(7,)):
    s = course.choose(ready, 100)
    course.record(*done(s, len(tokens), tokens))
    return s


# ---- rules come first

@pytest.mark.parametrize('policy', [MtpPolicy(None), MtpPolicy(PAIR), MtpPolicy(PAIR, pin=True)], ids=['none', 'profiling', 'pinned'])
@pytest.mark.parametrize('gate', [lambda: None, lambda: Says(VERIFY)], ids=['force', 'gate'])
def test_while_a_tool_call_is_forced_nobody_drafts(policy, gate):
    gate = gate()
    c = Pilot(policy, gate, Rules(mtp=HEAD if policy.pair else None, entry_pin=8)).open(READY)
    c.place.calling = True
    assert go(c) == plain('tool_call') and (gate is None or not gate.heard)
    c.place.calling = False
    assert go(c).kind == 'verify'


def test_a_thought_is_plain_unless_spec_think():
    for spec_think, first in ((False, 'plain'), (True, 'verify')):
        gate = Says(VERIFY)
        c = Pilot(MtpPolicy(None), gate, Rules(spec_think=spec_think)).open(['lookup'], think=(3, 4), thinking=True)
        kinds = [go(c, tokens=[t]).kind for t in (9, 9, 4, 9)] # the third token closes the thought
        assert kinds == [first] * 3 + ['verify'] and len(gate.heard) == (4 if spec_think else 1)
        assert go(c, tokens=[3]).kind == 'verify' and go(c).kind == first # another one opens


def test_the_resume_guard_counts_after_a_thought_and_all_within_one():
    c = Pilot(MtpPolicy(None), None, Rules(resume_guard=3)).open(['lookup'], think=(3, 4))
    assert [go(c).reason for _ in range(4)] == ['resume_guard'] * 3 + ['force'] # never thought: from the first token
    go(c, tokens=[3])
    assert go(c).kind == 'verify'                                               # 5 tokens in all
    go(c, tokens=[4])
    assert [go(c).reason for _ in range(4)] == ['resume_guard'] * 3 + ['force'] # counted anew after </think>


def test_the_entry_pin_overrides_parking_only():
    gate = Says(PLAIN, VERIFY)
    c = no_policy(gate, entry_pin=4)
    assert [go(c).reason for _ in range(8)] == ['entry_pin', 'best'] * 2 + ['best'] * 4
    assert [(r.kind, r.k) for r in gate.heard] == [('verify', 4)] * 2 + [('plain', 1), ('verify', 4)] * 2 # pinned steps are not recorded
    assert c.choose({'lookup': 8}, 9) is PLAIN
    assert c.why == 'parked'
    c = no_policy(Says(PLAIN), entry_pin=4)
    assert go(c).k == 3 # the gate says which round


def test_the_entry_pin_stays_out_of_thoughts_and_begins_after_them():
    c = Pilot(MtpPolicy(None), Says(PLAIN), Rules(entry_pin=2)).open(['lookup'], think=(3, 4), thinking=True)
    assert [go(c, tokens=[t]).reason for t in (9, 9, 4, 7, 7, 7)] == ['best'] * 3 + ['entry_pin'] * 2 + ['best']


def test_off_is_plain_before_anything_is_asked():
    gate = Says(VERIFY)
    assert go(no_policy(gate, gate_off=True)) == plain('gate_off') and not gate.asked


# ---- then the policy

@pytest.mark.parametrize('gate', [lambda: None, lambda: Says(PLAIN), lambda: Says(VERIFY), BudgetGate, WindowGate],
                         ids=['force', 'parks', 'lookup', 'budget', 'window'])
def test_while_it_measures_the_policy_owns_the_schedule(gate):
    gate = gate()
    c = Pilot(MtpPolicy(PAIR), gate, Rules(mtp=HEAD, entry_pin=8)).open(READY)
    steps = [go(c) for _ in range(PERIOD)]
    assert ''.join('S' if s.arm == HEAD and s.k == 3 else '.' for s in steps) == 'S' * BLOCK + '.' * 2 * BLOCK + 'S' * BLOCK
    assert {s.reason for s in steps} == {'profiling'}
    if isinstance(gate, Says): assert len(gate.heard) == PERIOD and not gate.asked # it is fed the same measurements
    if isinstance(gate, WindowGate): assert gate.steps == {HEAD: 2 * BLOCK} and gate.window.steps == 2 * BLOCK - 1 # the first after a switch does not count


def test_what_the_policy_measures_is_filed_under_its_context():
    "The gate's cells are per depth: steps that the policy chose belong to the depth they ran at, not to that of an earlier request."
    gate = BudgetGate()
    pilot = Pilot(MtpPolicy(PAIR), gate, Rules(mtp=HEAD))
    gate.next_step(1, {'lookup': range(2, 5)}, 3000)
    c = pilot.open(READY)
    for context in (100, 700):
        for _ in range(BLOCK):
            c.record(*done(c.choose(READY, context)))
    assert {d: sum(cell.n for cell in b.costs.cells.values()) for (_, d), b in gate.buckets.items() if b.costs.cells} == {9: BLOCK, 10: BLOCK}


@pytest.mark.parametrize('policy', [MtpPolicy(PAIR, pin=False), MtpPolicy(PAIR, declined=WHY), MtpPolicy(PAIR, adaptive=False)], ids=lambda p: p.snapshot.state)
@pytest.mark.parametrize('gate', [lambda: None, lambda: Says(VERIFY)], ids=['force', 'gate'])
def test_no_gate_overrides_a_no(policy, gate):
    gate = gate()
    c = Pilot(policy, gate, Rules(mtp=HEAD)).open(READY)
    assert go(c, {HEAD: 3}) == plain('policy')
    assert go(c).arm == 'lookup' and (gate is None or gate.asked == [{'lookup': (2, 3, 4, 6, 8)}]) # the verdict binds the head's arm only


def test_a_verdict_reaches_a_request_that_runs():
    pilot = Pilot(MtpPolicy(PAIR), None, Rules(mtp=HEAD))
    c = pilot.open(READY)
    assert go(c).arm == HEAD
    for _ in range(2): pilot.policy.record(Sample(.01, .1, 8, 8, (0, 0)))
    assert pilot.policy.snapshot.verdict == 'decline' and go(c).arm == 'lookup'


@pytest.mark.parametrize('reasons, starved', [
    (dict(exactness_context=9, budget=1), 'exactness_context'), (dict(drafter_failed=3, profiling=20, thinking=4), 'thinking'),
    (dict(profiling=9), 'never_drafted'), (dict(budget=1), 'never_drafted')])
def test_starvation_names_what_held_the_drafts_back(reasons, starved):
    pilot = Pilot(MtpPolicy(PAIR), None, Rules(mtp=HEAD))
    for _ in range(8): pilot.open(READY, stats=RequestStats(reasons=Counter(reasons))).close()
    assert pilot.policy.snapshot.starved_by == starved


def test_a_request_without_the_head_is_no_miss():
    pilot = Pilot(MtpPolicy(PAIR), None, Rules(mtp=HEAD))
    for _ in range(9): pilot.open(['lookup']).close()
    assert pilot.policy.snapshot.starved_by is None


OWN = {'prediction': 8} | READY


@pytest.mark.parametrize('apart', ['prediction', 'shared'])
def test_who_is_not_measured_is_left_to_the_gate(apart):
    gate = Says(Step(GateStep.MeasureVerify, 8, 'prediction'), PLAIN)
    pilot = Pilot(MtpPolicy(PAIR), gate, Rules(mtp=HEAD))
    c = pilot.open(OWN, apart=apart)
    assert [go(c, OWN).arm for _ in range(4)] == ['prediction', 'plain'] * 2 and c.why == 'parked'
    assert gate.asked == [{a: ladder(k) for a, k in OWN.items()}] * 4 # the policy forces MTP on while it measures: the head may run too
    assert [r.arm for r in gate.heard] == ['prediction', 'plain'] * 2
    assert not c.tally.verified and c.tally.step == 0
    force = Pilot(MtpPolicy(PAIR), None, Rules(mtp=HEAD))
    assert {go(force.open(OWN, apart=apart), {HEAD: 3}).arm for _ in range(PERIOD)} == {HEAD}


def test_a_no_binds_who_is_not_measured_too():
    for policy in (MtpPolicy(PAIR, pin=False), MtpPolicy(PAIR, declined=WHY)):
        gate = Says(VERIFY)
        go(Pilot(policy, gate, Rules(mtp=HEAD)).open(OWN, apart='prediction'), OWN)
        assert gate.asked == [{'prediction': ladder(8), 'lookup': ladder(8)}]


def test_who_is_not_measured_is_no_sample_and_starvation_says_so():
    pilot = Pilot(MtpPolicy(PAIR), None, Rules(mtp=HEAD))
    for i in range(8):
        assert pilot.policy.snapshot.starved_by is None
        c = pilot.open(READY)
        for _ in range(20 * PERIOD): go(c) # more than enough of both arms, before somebody came
        c.apart = 'shared' if i else 'prediction'
        c.close()
    assert (pilot.policy.snapshot.samples, pilot.policy.snapshot.starved_by) == (0, 'shared')
    c = pilot.open(READY)
    for _ in range(2 * PERIOD): go(c)
    c.close()
    assert (pilot.policy.snapshot.samples, pilot.policy.snapshot.starved_by) == (1, None)


# ---- what is told

def test_only_steps_of_the_arm_that_was_asked_reach_the_gate():
    gate = Says(VERIFY)
    c = no_policy(gate)
    c.choose(READY, 9); c.record(StepResult('plain', .01, 1, arm='lookup'), [7]) # silent: it took its time
    c.choose(READY, 9); c.record(StepResult('plain', .01, 1), [7])               # a queued plain step had to be read first
    assert [r.arm for r in gate.heard] == ['lookup']


def test_switches_looks_and_regret():
    look = Step(GateStep.MeasureDecode, reason='too close to call', tps=30., rival_tps=50., look=True)
    gate, stats = Says(VERIFY, look, look, VERIFY, look), RequestStats()
    gate.timeline.append(Switch(1, 'plain 1', 'lookup 4', 'of an earlier request', None, None, 0., 0))
    c = Pilot(MtpPolicy(None), gate).open(['lookup'], stats=stats)
    for i in range(5):
        if i == 1: gate.timeline.append(Switch(9, 'lookup 4', 'lookup 3', 'another K', 50., 51., 1., 9))
        if i == 2: gate.timeline.append(Switch(9, 'lookup 3', 'plain 1', 'acceptance fell', 50.04, None, 1., 9))
        go(c)
    assert stats.choice.looks == 2 and stats.choice.regret == pytest.approx(3 * .01 * 20)
    assert (stats.choice.tps, stats.choice.rival_tps) == (30., 50.)
    assert stats.choice.switches == [{'at': 3, 'from': 'lookup 3', 'to': 'plain 1', 'reason': 'acceptance fell', 'from_tps': 50., 'to_tps': None}]


@pytest.mark.parametrize('name', ['auto', 'budget', 'window'])
def test_both_gates_keep_the_same_books(name):
    gate = make_gate(Settings(mtp_gate=name))
    c = no_policy(gate)
    before = c.gate.snapshot()
    for _ in range(1200): go(c, {'lookup': 4})
    now = gate.snapshot()
    assert set(before) - {'acceptance'} == set(now) - {'acceptance'} == set(
        'gate arm k reason tps rival_tps steps looks look_cost switches last_switches'.split())
    assert sum(now['steps'].values()) == 1200 and now['looks'] >= 1 and 0 <= now['look_cost'] < .2


def test_pictures_are_replaced_never_changed():
    pilot = Pilot(MtpPolicy(None), Says(VERIFY))
    old, c = pilot.seen, pilot.open(['lookup'])
    for _ in range(40): go(c)
    assert old == dict(gate='says', heard=0) and pilot.seen == dict(gate='says', heard=32)
    c.close()
    assert pilot.seen['heard'] == 40
    assert [Pilot(MtpPolicy(None), None, Rules(gate_off=o)).seen for o in (True, False)] == [dict(gate='off'), dict(gate='force')]


def test_every_switch_is_one_info_line(caplog):
    caplog.set_level(logging.INFO, 'mlxspec')
    for gate in (WindowGate(serial_refresh_tokens=32), BudgetGate()):
        caplog.clear()
        c = no_policy(gate)
        for i in range(600):
            s = c.choose({'lookup': 4}, i)
            n = s.k - 1 if i < 200 else 0
            c.record(StepResult(s.kind, .02 if s.k > 1 else .01, n + 1, s.k, s.k - 1, n, s.arm), [7] * (n + 1))
        told = [t for t in gate.timeline if t.of_arm]
        assert told and [r.getMessage() for r in caplog.records if r.levelno == logging.INFO] == [f'gate {t}' for t in told]
        assert len(c.stats.choice.switches) == len(told) and c.stats.choice.switches[-1]['to'] in ('plain 1', GateMode.Serial)


# ---- with a real target

@pytest.fixture(scope='module')
def decoding():
    "A function that decodes with a pilot, and the plain answer."
    from mlxspec.drafters import scripted as sc
    from mlxspec.drafters.lookup import Lookup
    from mlxspec.answer import Plan, Request, Seat
    from mlxspec.answer import answer as steps_of
    from mlxspec.pairing import Drafters
    from mlxspec.sequence import Sequence
    from mlxspec.target import Target
    from mlxspec.text import TextStream
    from mlxspec.tiny import byte_tokenizer, tiny_model
    target = Target(tiny_model('llama'), byte_tokenizer(), {}, 'tiny')

    def run(pilot, scripts=(), think=None, **params):
        made = [sc.Scripted(answer, s, kind=f'scripted{i}') for i, s in enumerate(scripts)] or [Lookup()]
        p = Params(**dict(max_tokens=60, ignore_eos=True, seed=3) | params)
        seq = Sequence(target.tokenizer.encode('ab cd ef ab cd ef'), p, TextStream(target.tokenizer.detokenizer), frozenset())
        request = Request(seq, Plan(5, 64, Drafters(tuple(made)), pilot, think))
        for _ in steps_of(Seat(request, target)): pass
        return request.future.result()

    answer = []
    answer += [t.id for t in run(Pilot(MtpPolicy(None), None, Rules(gate_off=True))).tokens]
    return SimpleNamespace(run=run, answer=answer, sc=sc)


class EveryFive(Says):
    "A gate that changes its mind every five steps, arms and K included."
    def __init__(self): super().__init__(); self.n = 0
    def next_step(self, width, ks, context):
        self.n += 1
        if self.n // 5 % 2: return PLAIN
        arm = list(ks)[self.n % len(ks)]
        return Step(GateStep.MeasureVerify, ks[arm][self.n // 10 % len(ks[arm])], arm)


GATES = dict(auto=lambda: make_gate(Settings()), budget=BudgetGate, window=lambda: WindowGate(serial_refresh_tokens=16, reprobe_tokens=8),
             force=lambda: None, every_five=EveryFive)


@pytest.mark.parametrize('temperature', [0., 1.])
@pytest.mark.parametrize('gate', GATES)
def test_the_gate_changes_no_token(decoding, gate, temperature):
    sc, say = decoding.sc, dict(temperature=temperature, seed=5)
    want = decoding.run(Pilot(MtpPolicy(None), None, Rules(gate_off=True)), **say)
    for scripts in ([sc.oracle], [sc.half(.5), sc.liar(1)], [sc.silent_every(2)], [sc.broken(3), sc.decay(.8)]):
        logging.disable(logging.WARNING)
        r = decoding.run(Pilot(MtpPolicy(None), GATES[gate](), Rules(entry_pin=3)), scripts, **say)
        logging.disable(logging.NOTSET)
        assert [t.id for t in r.tokens] == [t.id for t in want.tokens] and r.text == want.text
        s = r.stats
        assert sum(s.arms.values()) == s.rounds + s.plain_steps and s.arms['plain'] == s.plain_steps and s.rounds
        assert set(s.arms) <= {'plain', 'scripted0', 'scripted1'}
        if gate == 'every_five': assert s.plain_steps > 4 and s.reasons['parked']


def test_the_gate_changes_no_token_of_the_demo_pair(tmp_path):
    "Trained weights, head and lookup; a text that copies."
    from dataclasses import replace

    from mlxspec.engine import Engine
    with Engine.load(enable_mtp_b1=True, cache_dir=tmp_path, draft_block_size=4) as engine:
        plan = engine._plan
        p = engine.encode([dict(role='user', content='Change the color to green in this JSON: {"name": "Anna", "color": "white", "score": 9}')])
        def run(gate, temperature, **rules):
            engine._plan = replace(plan, pilot=Pilot(plan.pilot.policy, gate, replace(plan.pilot.rules, **rules)))
            return engine.generate(p, max_tokens=40, ignore_eos=True, temperature=temperature, seed=2)
        for temperature in (0., 1.):
            want = run(None, temperature, gate_off=True)
            assert want.stats.reasons == dict(gate_off=40)
            for name, gate in GATES.items():
                r = run(gate(), temperature)
                assert ([t.id for t in r.tokens], r.text) == ([t.id for t in want.tokens], want.text), (name, temperature)
                assert r.stats.level == 'identical' and r.stats.rounds, name


def test_why_a_step_had_no_drafts(decoding):
    oracle = [decoding.sc.oracle]
    run = lambda pilot, **kw: decoding.run(pilot, oracle, **kw).stats.reasons
    assert run(Pilot(MtpPolicy(None), None, Rules(gate_off=True))) == dict(gate_off=60)
    assert run(Pilot(MtpPolicy(None), Says(PLAIN))) == dict(parked=60)
    assert run(Pilot(MtpPolicy(None), None, Rules(resume_guard=9)))['resume_guard'] == 9
    assert run(Pilot(MtpPolicy(None)), speculate=False) == dict(disabled=60)
    everything = decoding.answer[0]
    assert run(Pilot(MtpPolicy(None), None, Rules(spec_think=False)), think=(everything, -1))['thinking'] > 0


def test_disable_covers_every_drafter(decoding):
    sc = decoding.sc
    r = decoding.run(Pilot(MtpPolicy(None)), [sc.oracle, sc.half(.5)], speculate=False)
    assert not r.stats.drafted and r.stats.arms == dict(plain=60) and not r.stats.sources
    only = decoding.run(Pilot(MtpPolicy(None)), [sc.oracle, sc.half(.5)], speculate=('scripted1',))
    assert set(only.stats.sources) == {'scripted1'}
