"The published body: example bodies of the contract, nulls per state, label sets, the two version numbers."
import dataclasses
import json

import pytest

from mlxspec import policy
from mlxspec.policy import REASONS, SCHEMA_VERSION, SET_IN, STATES, VERDICTS, Gpu, MtpPolicySnapshot, Pairing

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

def test_schema_version_is_in_the_body(monkeypatch):
    assert SCHEMA_VERSION == 1
    monkeypatch.setattr(policy, 'SCHEMA_VERSION', 2)
    assert MtpPolicySnapshot.unavailable('worker_not_ready', None).wire()['schema_version'] == 2
