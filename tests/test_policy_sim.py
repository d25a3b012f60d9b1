"Decision quality over more lives, machines and drafters than the page shows."
from statistics import fmean

import pytest

from mlxspec.policy_sim import World, run

SPEEDUPS = (.5, .7, .85, .97, 1.1, 1.25, 1.5, 2.)

def wrong(x, r): return r.measured and (r.verdict == 'enable' and x <= .97 or r.verdict == 'decline' and x >= 1.1)

def lives(seeds, **world):
    return [(x, run(World(x, **world), s)) for x in SPEEDUPS for s in seeds]

@pytest.mark.parametrize('world', [dict(noise=0.), dict(noise=.2), dict(spikes=.05), dict(k=2), dict(k=8, keep=.8), dict(drift=1.),
                                   dict(tokens=(24, 48)), dict(tokens=(200, 400))], ids=str)
def test_wrong_verdicts_are_rare(world):
    rs = lives(range(10), **world)
    assert fmean(wrong(x, r) for x, r in rs) <= .025        # 2 of 80
    assert all(r.requests <= 60 for _, r in rs)
    assert not any(wrong(x, r) for x, r in rs if x <= .85 or x >= 1.5)

def test_long_answers_pay_a_tenth():
    for x in (.5, 2.): assert fmean(run(World(x, tokens=(400, 800)), s).cost for s in range(10)) <= .11

@pytest.mark.slow
def test_wrong_verdicts_over_thousands_of_lives():
    rs = [xr for noise in (0., .1, .2) for tokens in ((24, 60), (24, 160), (100, 300)) for xr in lives(range(100), noise=noise, tokens=tokens)]
    by = {x: fmean(wrong(x, r) for y, r in rs if y == x) for x in SPEEDUPS}
    assert fmean(wrong(x, r) for x, r in rs) <= .01 and max(by.values()) <= .025, by
    assert all(r.requests <= 40 for _, r in rs)
