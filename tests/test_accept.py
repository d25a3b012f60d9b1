"""The acceptance laws against oracles: exact joint probabilities by enumeration, and chi-square over many seeds.

A toy target says logits that depend on the last token; penalties and filters make them depend on more. Every law must give its
outputs the probabilities of plain sampling, whatever the drafter, and every broken variant of a law must be caught.
"""
import itertools
import math
from collections import Counter
from functools import cache

import harness as h
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm import sample_utils
from mlx_lm.models.cache import KVCache

from mlxspec import accept
from mlxspec.core import Params, Proposal
from mlxspec.law import ACCEPT, DRAFT, RESIDUAL, TOKEN, DraftLaw, Law, gumbel, noise_key, spread, uniform
from mlxspec.target import Target
from mlxspec.tiny import byte_tokenizer

V, START = 3, 1 # vocabulary, last token of the prompt
TABLE = mx.random.normal((V, V), key=mx.random.key(3)) * 1.5
ROUGH = TABLE + mx.random.normal((V, V), key=mx.random.key(4))
TEMPERATURES = (.3, .7, 1., 2.)
FILTERS = dict(none={}, top_k=dict(top_k=2), top_p=dict(top_p=.7), min_p=dict(min_p=.3), bias=dict(logit_bias={0: 1.5}),
               frequency=dict(frequency_penalty=1.), presence=dict(presence_penalty=-1.), repetition=dict(repetition_penalty=2., repetition_context_size=2))


@pytest.fixture(scope='module', autouse=True)
def uncompiled(): mx.disable_compile()


# ---- drafters of the toy: what they draw from, and what they say they draw from

class World:
    "A request over the toy target: exact distributions after every output so far."
    def __init__(self, temperature, filters, drafter):
        self.law, self.drafter = Law(Params(temperature=temperature, accept_law='rejection', seed=0, **filters), V), drafter
        self.p, self.q, self.reported = (cache(f) for f in (self._p, self._q, self._reported))

    def _rows(self, logits, out): # log-probabilities under the request's law
        return self.law.rows(logits, 1 + len(out), self.law.past([START], list(out))).processed[0]
    def _last(self, out): return (START, *out)[-1]

    def _p(self, out): return self._rows(TABLE[self._last(out)][None], out)

    def _reported(self, out): # [V'] log-probabilities or None, [V'] ids or None
        last = self._last(out)
        match self.drafter:
            case 'same': return self.p(out), None
            case 'rough': return self._rows(ROUGH[last][None], out), None
            case 'uniform': return mx.full((V,), -math.log(V)), None
            case 'peaked': return mx.log(mx.array([.9 if v == (last + 1) % V else .1 / (V - 1) for v in range(V)])), None
            case 'reduced': return mx.log(mx.array([.6, .4])), mx.array([2, 0])
            case 'padded': return mx.log(mx.array([.2] * (V + 2))), None
            case 'nan': return mx.full((V,), math.nan), None
        return None, None # 'certain', 'secret'

    def _q(self, out): # {draft: probability} that it is really drawn
        if self.drafter == 'certain': return {(self._last(out) + 1) % V: 1.}
        if self.drafter in ('secret', 'nan'): return {0: .5, 2: .3, V + 4: .2} # it does not say what it draws from
        logs, ids = self.reported(out)
        return dict(zip(range(len(logs)) if ids is None else ids.tolist(), mx.exp(logs).tolist(), strict=True))

    def verdict(self, out, draft): # probability that it is kept, distribution of what replaces it
        logs, ids = accept.behind(Proposal([draft], ('toy',), *(x if x is None or i else x[None] for i, x in enumerate(self.reported(out)))), 1)
        d, p = mx.array([draft]), mx.exp(self.p(out))[None]
        q = accept.proposed(d, logs, V, ids)
        r = accept.residual(p, q)[0]
        return accept.odds(p, q, d).item(), (r / r.sum()).tolist()

    def after_round(self, out, n): # output -> probability, for a round of n drafts and its bonus
        if n == 0: return Counter({(*out, t): p for t, p in enumerate(mx.exp(self.p(out)).tolist())})
        total = Counter()
        for draft, w in self.q(out).items():
            keep, rest = self.verdict(out, draft)
            for t, p in enumerate(rest): total[(*out, t)] += w * (1 - keep) * p
            if keep:
                for o, p in self.after_round((*out, draft), n - 1).items(): total[o] += w * keep * p
        return total

    def strings(self, length, drafts): # string -> probability, by speculative rounds
        done, open_ = Counter(), Counter({(): 1.})
        while open_:
            out, w = open_.popitem()
            for o, p in self.after_round(out, drafts).items():
                (done if len(o) >= length else open_)[o[:length]] += w * p
        return done

    def plain(self, length): # string -> probability, by plain sampling
        return {s: math.prod(mx.exp(self.p(s[:i]))[t].item() for i, t in enumerate(s)) for s in itertools.product(range(V), repeat=length)}

    def error(self, length=3, drafts=2): # greatest difference of a probability
        got, want = self.strings(length, drafts), self.plain(length)
        assert set(got) <= set(want) and math.isclose(sum(got.values()), 1, abs_tol=1e-4)
        return max(abs(got[s] - want[s]) for s in want)


DRAFTERS = ('same', 'rough', 'uniform', 'peaked', 'reduced', 'padded', 'certain', 'secret', 'nan')


@pytest.mark.parametrize('drafter', DRAFTERS)
@pytest.mark.parametrize('filters', FILTERS)
def test_joint_probabilities(filters, drafter):
    "Strings of three tokens by rounds of two drafts: exactly as likely as under plain sampling."
    for t in TEMPERATURES if filters == 'none' else (.7,): assert World(t, FILTERS[filters], drafter).error() < 1e-5


@pytest.mark.parametrize('drafts', (1, 3))
def test_joint_probabilities_of_other_widths(drafts):
    assert World(1., dict(top_p=.8, presence_penalty=.5), 'rough').error(3, drafts) < 1e-5


def lenient(p, q, drafts): return mx.minimum(sound_odds(p, q, drafts) * 1.2, 1)
def inverted(p, q): return mx.maximum(q - p, 0) + 1e-9
def redrawn(p, q): return p
def hotter(drafts, q, vocab, vocab_map=None): # q of another temperature than the drafts were drawn at
    return sound_proposed(drafts, None if q is None else q / 3, vocab, vocab_map)
def trusting(drafts, q, vocab, vocab_map=None): # certain drafts for certain truth
    return sound_proposed(drafts, q, vocab, vocab_map) * (1 if q is not None else 1e-6)


sound_odds, sound_proposed = accept.odds, accept.proposed
BROKEN = dict(lenient=('odds', lenient, 'rough'), redrawn=('residual', redrawn, 'rough'), inverted=('residual', inverted, 'rough'),
              hotter=('proposed', hotter, 'rough'), trusting=('proposed', trusting, 'certain'))


@pytest.mark.parametrize('name', BROKEN)
def test_enumeration_has_teeth(name, monkeypatch):
    where, what, drafter = BROKEN[name]
    monkeypatch.setattr(accept, where, what)
    assert World(1., {}, drafter).error() > .01


# ---- chi-square over seeds: the same with real noise

SEEDS = 20000
POSITIONS = range(1, 1 + 3 + 3) # a string of three may end in a round that goes three further


@cache
def noise(purpose): # [positions, seeds, V] of every request, or [positions, seeds] uniform
    keys = [[noise_key(s, t, purpose=purpose) for s in range(SEEDS)] for t in POSITIONS]
    return mx.stack([uniform(k) if purpose == ACCEPT else gumbel(k, V) for k in keys])


def sampled(law, drafts=2, length=3, swap=None): # [seeds, length]; swap: purpose -> purpose whose noise it steals
    "Speculative decoding of every seed at once: rows of a round are rows of different requests."
    swap, all_ = swap or {}, mx.arange(SEEDS)
    of = lambda purpose, at: noise(swap.get(purpose, purpose))[at - 1, all_]
    p, q = (law.rows(x, 1).processed for x in (TABLE, ROUGH))
    out, n = mx.zeros((SEEDS, length + drafts + 1), dtype=mx.int32), mx.zeros(SEEDS, dtype=mx.int32)
    last = mx.full((SEEDS,), START)
    while n.min().item() < length:
        going, at, cond, kept = n < length, n + 1, last, mx.ones(SEEDS, dtype=mx.bool_) # at: position of the next token
        for i in range(drafts + 1):
            here = mx.minimum(at + i, len(POSITIONS))
            if i == drafts: token, keep = mx.argmax(p[cond] + of(TOKEN, here), axis=-1), mx.zeros(SEEDS, dtype=mx.bool_)
            else:
                draft = mx.argmax(q[cond] + of(DRAFT, here), axis=-1)
                keep, instead = accept.rejection(mx.exp(p[cond]), accept.proposed(draft, q[cond], V), draft, of(ACCEPT, here), of(RESIDUAL, here))
                token = mx.where(keep, draft, instead)
            write = going & kept
            slot = mx.minimum(n, length + drafts)[:, None]
            out = mx.put_along_axis(out, slot, mx.where(write, token, mx.take_along_axis(out, slot, axis=-1)[:, 0]).astype(mx.int32)[:, None], axis=-1)
            n, last, cond = n + write, mx.where(write, token, last), token
            kept = kept & keep
    return np.array(out[:, :length])


def plain_samples(law, length=3):
    out, last = [], mx.full((SEEDS,), START)
    for t in range(length):
        last = mx.argmax(law.rows(TABLE, 1).processed[last] + noise(TOKEN)[t], axis=-1)
        out.append(last)
    return np.array(mx.stack(out, axis=1))


def chance(samples, want): # probability of a chi-square at least as large (Wilson and Hilferty 1931)
    "How well samples [n, length] agree with the probabilities of strings; small where they do not."
    n, seen = len(samples), Counter(map(tuple, samples.tolist()))
    if any(want[s] < 1e-7 for s in seen): return 0. # what cannot happen has happened
    cells = [(seen[s], n * w) for s, w in want.items() if n * w >= 5]
    rare = sum(w for w in want.values() if n * w < 5) * n
    if rare > 1: cells.append((n - sum(c for c, _ in cells), rare))
    x, df = sum((c - e) ** 2 / e for c, e in cells), len(cells) - 1
    if not df: return 1.
    z = ((x / df) ** (1 / 3) - (1 - 2 / (9 * df))) / math.sqrt(2 / (9 * df))
    return math.erfc(z / math.sqrt(2)) / 2


PLAIN_FILTERS = [f for f in FILTERS if f not in ('frequency', 'presence', 'repetition')] # whose rows depend on the last token alone


@pytest.mark.parametrize('filters', PLAIN_FILTERS)
@pytest.mark.parametrize('temperature', TEMPERATURES)
def test_chi_square(temperature, filters):
    "20,000 seeds, rejection in rounds of two drafts and plain draws (which are the coupled law's): strings of three tokens."
    w = World(temperature, FILTERS[filters], 'rough')
    want = w.plain(3)
    assert chance(sampled(w.law), want) > 1e-3
    assert chance(plain_samples(w.law), want) > 1e-3


@pytest.mark.parametrize('name', ['lenient', 'redrawn', 'inverted', 'hotter'])
def test_chi_square_has_teeth(name, monkeypatch):
    where, what, _ = BROKEN[name]
    monkeypatch.setattr(accept, where, what)
    w = World(.7, {}, 'rough')
    assert chance(sampled(w.law), w.plain(3)) < 1e-6


@pytest.mark.parametrize('swap', [{DRAFT: RESIDUAL}, {DRAFT: TOKEN, RESIDUAL: TOKEN}], ids=('replacement', 'everything'))
def test_streams_must_be_separate(swap):
    "Drafts that are drawn with the noise of what replaces them: each draw alone is right, together they are not."
    w = World(.7, {}, 'rough')
    assert chance(sampled(w.law, swap=swap), w.plain(3)) < 1e-6


def test_acceptance_is_one_minus_total_variation():
    law = World(.7, {}, 'rough').law
    p, q = (mx.exp(law.rows(x, 1).processed[START]) for x in (TABLE, ROUGH))
    draft = mx.argmax(mx.log(q) + noise(DRAFT)[0], axis=-1)
    rows = lambda x: mx.broadcast_to(x, (SEEDS, V))
    keep, _ = accept.rejection(rows(p), accept.proposed(draft, mx.log(rows(q)), V), draft, noise(ACCEPT)[0], noise(RESIDUAL)[0])
    tv = mx.abs(p - q).sum().item() / 2
    assert abs(keep.mean().item() - (1 - tv)) < 4 * math.sqrt(.25 / SEEDS)


# ---- through the rounds: positions, purposes and rows are the right ones

class Table(nn.Module):
    "A model whose logits are a row of a table."
    def __init__(self): super().__init__(); self.table, self.layers = TABLE, []
    def make_cache(self): return [KVCache()]
    def __call__(self, ids, cache=None):
        row = mx.zeros((*ids.shape, 1))[:, None]
        if cache: cache[0].update_and_fetch(row, row)
        return self.table[ids]


class Rough:
    "A drafter that draws from a rougher table, over part of the vocabulary if asked to."
    kind, max_drafts, hidden = 'rough', 7, None
    def __init__(self, ids=None): self.ids = ids
    def open(self, seq): return h.SimpleNamespace(seq=seq, close=lambda: None)
    def ready(self, s): return True
    def observe(self, *_): pass
    def propose(self, states, ks, laws):
        last, drafts, law = mx.array([states[0].seq.tokens[-1]]), [], laws[0]
        for _ in range(ks[0]):
            logits = ROUGH[last]
            last = law.draw(logits) if self.ids is None else law.draw(logits[:, self.ids], self.ids)
            drafts.append(last)
        return [Proposal(mx.concatenate(drafts), (self.kind,) * ks[0], law.logprobs)]


@pytest.mark.parametrize('ids', (None, [2, 0]), ids=('whole', 'reduced'))
@pytest.mark.parametrize('law', ('coupled', 'rejection'))
def test_rounds_give_the_distribution(law, ids):
    t, kw = Target(Table(), byte_tokenizer(), {}, 'table'), dict(temperature=.7, max_tokens=3, accept_law=law)
    ran = [h.run(t, [START], 3, [Rough(ids and mx.array(ids))], seed=s, **kw) for s in range(700)]
    assert chance(np.array([r.output for r in ran]), World(.7, {}, 'rough').plain(3)) > 1e-3
    assert sum(r.stats.accepted for r in ran) > 250
    again = h.run(t, [START], 3, [Rough(ids and mx.array(ids))], seed=5, **kw)
    assert again.output == ran[5].output


@pytest.mark.parametrize('name', h.AXES['drafter'])
def test_any_drafter_under_rejection(name):
    "Whatever drafts, the request runs to its end and the accounts add up; the target as its own drafter is never rejected."
    c = h.Case(prompt=2)
    args = dict(temperature=.8, seed=3, accept_law='rejection', top_p=.9, presence_penalty=.5, logprobs=1)
    plain = h.run(c.target, c.ids, **args)
    assert plain.said == h.run(c.target, c.ids, **args | dict(accept_law='coupled')).said # without drafts the laws agree
    for k in (2, 5):
        r = h.run(c.target, c.ids, k, [h.drafter(name, c.target, plain.output)], **args)
        h.adds_up(r)
        assert len(r.output) == h.N and all(math.isfinite(e.logprob) and e.logprob <= 0 for e in r.seq.emitted)
        if name == 'self': assert r.stats.accepted == r.stats.drafted > 0
        if name == 'oov': assert r.stats.accepted == 0 < r.stats.drafted


@pytest.mark.parametrize('name', ('liar1', 'mtp', 'self'))
def test_rejection_without_a_temperature_is_greedy(name):
    c = h.Case(drafter=name)
    want = h.run(c.target, c.ids).output
    assert h.run(c.target, c.ids, 4, [h.drafter(name, c.target, want)], accept_law='rejection').output == want


def test_log_probabilities_are_those_of_the_tokens_said():
    "Under rejection a row's token is not the row's own choice; its log-probability must still be its own."
    c = h.Case(prompt=2)
    for of in ('raw', 'processed'):
        r = h.run(c.target, c.ids, 4, [h.drafter('half', c.target, h.run(c.target, c.ids).output)], temperature=.9, seed=1,
                  accept_law='rejection', logprobs=20, logprobs_of=of)
        for e in r.seq.emitted:
            if e.id in dict(e.top): assert dict(e.top)[e.id] == e.logprob
            else: assert e.logprob <= e.top[-1][1]


@pytest.mark.parametrize('said', [dict(top_p=.8), dict(top_k=5), dict(min_p=.1), dict(top_p=.9, top_k=6, min_p=.02), dict(top_p=.6, min_p=.3), {}], ids=str)
@pytest.mark.parametrize('temperature', TEMPERATURES)
def test_the_distribution_is_mlx_lms(temperature, said):
    "Filters look at the distribution of temperature 1, in mlx-lm's order, and the temperature comes last."
    logits = mx.random.normal((40, 30), key=mx.random.key(7)) * 2
    x = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if 'top_p' in said: x = sample_utils.apply_top_p(x, said['top_p'])
    if 'min_p' in said: x = sample_utils.apply_min_p(x, said['min_p'])
    if 'top_k' in said: x = sample_utils.apply_top_k(x, said['top_k'])
    want = mx.softmax(x * (1 / temperature), axis=-1)
    law = Law(Params(temperature=temperature, seed=1, logprobs=0, logprobs_of='processed', **said), 30)
    got = law.rows(logits, 1)
    assert mx.abs(mx.exp(got.processed) - want).max().item() < 1e-5 and mx.array_equal(mx.exp(got.processed) > 0, want > 0)
    assert mx.take_along_axis(want, got.choice[:, None], axis=-1).min().item() > 0


@pytest.mark.parametrize('tiny', (1e-3, 1e-30, 1e-44, 5e-324))
def test_next_to_nothing_is_not_nothing(tiny):
    "Parameters that are zero in float32: a temperature is the greedy law then, a nucleus the best token."
    want = Law(Params(), V).rows(TABLE, 1).choice.tolist()
    for said in (dict(temperature=tiny), dict(temperature=tiny, top_p=.9), dict(temperature=tiny, accept_law='rejection')):
        assert Law(Params(seed=1, **said), V).rows(TABLE, 1).choice.tolist() == want
    for said in (dict(top_p=tiny), dict(min_p=1.), dict(top_k=1)):
        assert Law(Params(temperature=1., seed=1, **said), V).rows(TABLE, 1).choice.tolist() == want
    assert Law(Params(temperature=1., seed=1, min_p=tiny), V).rows(TABLE, 1).choice.tolist() == Law(Params(temperature=1., seed=1), V).rows(TABLE, 1).choice.tolist()


def test_spread_and_draw_agree():
    "A draft over a reduced vocabulary carries ids of the whole one, and its row says so."
    law = Law(Params(temperature=1., accept_law='rejection', seed=1), V)
    draw = DraftLaw(law, 4)
    ids = {draw.draw(mx.array([[0., 1.]]), mx.array([2, 0])).item() for _ in range(40)}
    assert ids == {0, 2} and mx.isinf(draw.logprobs[:, 1]).all().item()
    assert spread(mx.zeros((1, 2)), mx.array([2, 0]), V).tolist() == [[0., -math.inf, 0.]]
