"""The promise as tests: for one prompt and one seed the text is the same, whoever drafts, how far, and when.

Plain decoding gives mlx-lm's tokens; every way to speculate gives plain's. Cases come from tests/harness.py: every two values of
different axes meet in one of them; the product (an hour) is marked slow.
"""
import harness as h
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from mlxspec.cache import leaves
from mlxspec.core import Emitted, Params
from mlxspec.drafters import scripted as sc
from mlxspec.engine import Engine
from mlxspec.sequence import Sequence
from mlxspec.text import TextStream

TINY = [k for k in h.AXES['kind'] if k != 'demo']
CACHES = ('llama', 'gemma3', 'qwen3_5', 'lfm2') # one target per kind of cache


pytestmark = pytest.mark.usefixtures('quiet')


def oracle(answer, script=sc.oracle): return [sc.Scripted(answer, script)]


# ---- plain decoding is mlx-lm's

@pytest.mark.parametrize('dtype', h.AXES['dtype'])
@pytest.mark.parametrize('kind', h.AXES['kind'])
def test_plain_equals_mlx_lm(kind, dtype):
    t = h.target(kind, dtype)
    for text in ('T', 'The', 'Count:', h.PROMPTS[2]):
        ids = t.tokenizer.encode(text)
        assert h.run(t, ids).output == [t for t, _ in generate_step(mx.array(ids), t.model, max_tokens=h.N)], text


# ---- speculative decoding is plain's

@pytest.mark.parametrize('case', h.pairs(), ids=str)
def test_same_text(case):
    plain, r = h.same_text(case)
    if case.k == 1 or case.drafter == 'silent': assert not r.stats.drafted
    if case.drafter == 'self' and case.shape != 'mask': # drafts know nothing of masks
        assert r.stats.accepted == r.stats.drafted - cut(r) and (case.k == 1 or r.stats.rounds or len(plain.output) < 3)
    if case.drafter in ('oracle', 'liar0') and case.k > 1 and case.pace == 'steady' and len(plain.output) > 3: assert r.stats.rounds


@pytest.mark.parametrize('shape', [s for s in h.SHAPES if s != 'mask'])
@pytest.mark.parametrize('temperature', (0., 1.))
def test_a_drafter_that_is_the_target_is_never_wrong(shape, temperature):
    "Its drafts come under the request's law: penalties that see the drafts before, noise of their own positions."
    for kind in ('llama', 'qwen3_5'):
        _, r = h.same_text(h.Case(kind, drafter='self', k=6, temperature=temperature, shape=shape, prompt=2))
        assert r.stats.accepted == r.stats.drafted - cut(r) and r.stats.rounds


def cut(r): # drafts of the last round behind the end of the text
    last = r.stats.per_step_drafted[-1] - r.stats.per_step_accepted[-1] if r.stats.rounds else 0
    return last if r.seq.finish == 'stop' else 0


@pytest.mark.slow
@pytest.mark.parametrize('drafter', h.AXES['drafter'])
@pytest.mark.parametrize('kind', h.AXES['kind'])
def test_same_text_everywhere(kind, drafter):
    for case in h.product(kind=kind, drafter=drafter): h.same_text(case)


GATES = dict(never=dict(no_spec=True), off=dict(mtp_gate='off'), force=dict(mtp_gate='force'), budget=dict(mtp_gate='budget'), auto={},
             window=dict(mtp_gate='window', mtp_gate_refresh=24, mtp_gate_reprobe=24, spec_entry_pin=0)) # looks often


def test_no_gate_changes_a_text(tmp_path):
    "The demo pair, an exercise and prose, greedy and sampled, whoever decides the next step."
    texts = {}
    for name, options in GATES.items():
        with Engine.load(cache_dir=tmp_path, enable_mtp_b1=True, **options) as e:
            count, prose = e.encode([dict(role='user', content='Count from 1 to 20.')]), e.encode('The sea was grey that morning, and')
            said = [e.generate(p, max_tokens=64, ignore_eos=True, **kw) for p in (count, prose) for kw in ({}, dict(temperature=.9, seed=4))]
            texts[name] = [[t.id for t in r.tokens] for r in said]
            ran = {arm for r in said for arm in r.stats.arms}
        assert ran == {'plain'} if name in ('never', 'off') else ran >= {'plain', 'qwen3_5_mtp'}, name # force too: the last token of a budget
    assert all(t == texts['never'] for t in texts.values())


def test_seeds_differ_and_greedy_needs_none():
    "Without this the tests above could be comparing constants."
    c = h.Case(temperature=1.)
    a, b = (h.run(c.target, c.ids, temperature=1., seed=s).output for s in (1, 2))
    cold = {tuple(h.run(c.target, c.ids, seed=s).output) for s in (1, 2, None)}
    assert a != b and len(cold) == 1


def test_shared_randomness_is_not_touched():
    "Neither a greedy request nor a seeded draw uses MLX's global random state."
    h.mtp(h.target('llama')) # making random weights does
    before = [x.tolist() for x in mx.random.state]
    h.same_text(h.Case(temperature=1., drafter='half', shape='everything'))
    h.same_text(h.Case(drafter='mtp'))
    assert [x.tolist() for x in mx.random.state] == before


def test_every_penalty_and_filter_matters():
    "A shape whose text is the bare one would test nothing."
    said = {s: [h.request('llama', 'float32', T, s, p)[1].output for T in (.3, 1.) for p in (1, 2)] for s in h.SHAPES}
    assert [s for s in said if said[s] == said['bare']] == ['bare', 'logprobs']


# ---- rejections and windows

@pytest.mark.parametrize('kind', CACHES)
def test_after_any_rejection_the_text_goes_on(kind):
    t = h.target(kind)
    want = h.run(t, h.Case(kind).ids, max_tokens=48).output
    for j in range(4):
        r = h.run(t, h.Case(kind).ids, 5, oracle(want, sc.liar(j)), max_tokens=48)
        assert r.output == want and r.stats.accepted < r.stats.drafted


@pytest.mark.parametrize('length', range(8, 25, 4))
def test_across_the_edge_of_a_window(length):
    "Window of 16: prompts and outputs that start before, at and after its edge."
    t = h.target('gemma3')
    ids = (t.tokenizer.encode('Red, green, ') * 3)[:length]
    want = h.run(t, ids).output
    for script in (sc.oracle, sc.liar(0), sc.liar(3)):
        r = h.run(t, ids, 4, oracle(want, script))
        assert r.output == want and r.stats.rounds and not r.stats.reasons['cache_not_trimmable']
        assert all(c.end <= c.max_size + 300 for c in r.run.cache if hasattr(c, 'end'))


# ---- endings: text, usage and cache agree with what was delivered

def ends_right(t, ids, r, want, finish):
    assert (r.output, r.seq.finish) == (want, finish)
    h.adds_up(r)
    now = [a for c in r.run.cache for a in leaves(c)]
    assert all(map(mx.array_equal, now, h.rebuilt(t, r.seq.tokens[:r.run.cached])))


@pytest.mark.parametrize('kind', CACHES)
def test_an_accepted_end_inside_a_block(kind):
    "Declare the token at index i the end of the text: it stops there, in whatever block that lies."
    t, ids = h.target(kind), h.Case(kind).ids
    want = h.run(t, ids).output
    for i in range(3, 15, 2):
        at = want.index(want[i])
        ends_right(t, ids, h.run(t, ids, 6, oracle(want), ends=[want[i]]), want[:at + 1], 'stop')
        assert h.run(t, ids, 6, oracle(want), ends=[want[i]], ignore_eos=True).output == want


@pytest.mark.parametrize('kind', CACHES)
def test_max_tokens_is_never_exceeded(kind):
    t, ids = h.target(kind), h.Case(kind, prompt=0).ids
    want = h.run(t, ids).output
    for k in (2, 4):
        for n in range(1, 2 * k + 2): ends_right(t, ids, h.run(t, ids, k, oracle(want), max_tokens=n), want[:n], 'length')


@pytest.mark.parametrize('kind', ('llama', 'qwen3_5'))
def test_stop_strings_inside_a_block(kind):
    "Pieces of the plain text as stop strings: two characters, or one, from every place."
    t, ids = h.target(kind), h.Case(kind).ids
    plain = h.run(t, ids)
    for i in range(2, len(plain.text) - 2, 3):
        for stop in (plain.text[i:i + 1], plain.text[i:i + 2]):
            alone = h.run(t, ids, stop=(stop,))
            assert alone.text == plain.text.split(stop)[0] and alone.run.seq.stream.stop == stop
            r = h.run(t, ids, 6, oracle(plain.output), stop=(stop,))
            assert r.text == alone.text
            ends_right(t, ids, r, alone.output, 'stop')


@pytest.mark.parametrize('k', (1, 6))
def test_stop_beats_length_when_it_comes_first(k):
    t, ids = h.target('llama'), h.Case().ids
    plain = h.run(t, ids)
    at = len(h.run(t, ids, stop=(plain.text[6:8],)).output) # the token that completes the stop string
    for n in (at - 1, at, at + 1):
        r = h.run(t, ids, k, oracle(plain.output), stop=(plain.text[6:8],), max_tokens=n)
        ends_right(t, ids, r, plain.output[:min(n, at)], 'length' if n < at else 'stop')


@pytest.mark.parametrize('k', (1, 6))
def test_the_end_at_the_last_token(k):
    "A text that ends with the very token that exhausts its budget has ended by itself."
    t, ids = h.target('llama'), h.Case().ids
    want = h.run(t, ids).output
    for i in (i for i in (3, 5, 6) if want.index(want[i]) == i):
        for n in (i, i + 1, i + 2):
            r = h.run(t, ids, k, oracle(want), ends=[want[i]], max_tokens=n)
            ends_right(t, ids, r, want[:min(n, i + 1)], 'stop' if n > i else 'length')


class Late:
    "A detokenizer that keeps a character back until the next token, or the end, as those for SentencePiece do."
    def __init__(self): self.kept = self.last_segment = ''
    def add_token(self, token): self.last_segment, self.kept = self.kept, chr(token)
    def finalize(self): self.last_segment, self.kept = self.kept, ''


@pytest.mark.parametrize('stop, n, text, finish', [('c', 3, 'ab', 'stop'), ('bc', 3, 'a', 'stop'), ('d', 3, 'abc', 'length'), ('b', 3, 'a', 'stop')])
def test_a_stop_string_that_the_last_character_completes(stop, n, text, finish):
    "The budget is used up, and what comes out of the detokenizer then completes a stop string: that ended the text."
    seq = Sequence([1], Params(max_tokens=n, stop=(stop,)), TextStream(Late(), (stop,)), frozenset())
    said = ''
    for token in b'abc'[:n]:
        if not seq.finish: said += ''.join(t for t, _ in seq.commit(Emitted(token, 'target')).pieces)
    assert (said, seq.finish) == (text, finish)


@pytest.mark.parametrize('k', (1, 2, 6))
def test_min_tokens(k):
    "No end before it, by a token or by a string; then the text ends as soon as it may."
    t, ids = h.target('llama'), h.Case().ids
    plain = h.run(t, ids)
    for m in (4, 9):
        until = h.run(t, ids, max_tokens=m).text
        for stop in {*plain.text[1:8]} & {*plain.text[len(until):]}:
            r = h.run(t, ids, k, oracle(plain.output), stop=(stop,), min_tokens=m)
            assert r.text == plain.text[:plain.text.index(stop, len(until))]
            ends_right(t, ids, r, plain.output[:len(r.output)], 'stop')
            assert len(r.output) > m
        free = h.run(t, ids, k, oracle(plain.output), ends=plain.output[:3], min_tokens=m)
        assert not {*plain.output[:3]} & {*free.output[:m]}
        ends_right(t, ids, free, free.output, free.seq.finish)


@pytest.mark.parametrize('k', (1, 4))
def test_min_tokens_to_the_token(k):
    "An end that the target wants at index i may come there, or not, as min_tokens is i or one more."
    t, ids = h.target('llama'), h.Case().ids
    want = h.run(t, ids).output
    for i in (i for i in range(1, 12) if want.index(want[i]) == i):
        ends_right(t, ids, h.run(t, ids, k, oracle(want), ends=[want[i]], min_tokens=i), want[:i + 1], 'stop')
        later = h.run(t, ids, k, oracle(want), ends=[want[i]], min_tokens=i + 1).output
        assert later[:i] == want[:i] and later[i] != want[i]


@pytest.mark.parametrize('k', (1, 4))
@pytest.mark.parametrize('min_tokens', (0, 20))
def test_a_mask_can_end_the_text(k, min_tokens):
    "A grammar that allows nothing but the end ends the text, whatever min_tokens says."
    t, ids = h.target('llama'), h.Case().ids
    def mask(output): return None if len(output) < 5 else np.arange(264) == h.EOS
    want = h.run(t, ids, max_tokens=5).output if not min_tokens else h.run(t, ids, max_tokens=5, ends=[h.EOS], min_tokens=20).output
    r = h.run(t, ids, k, oracle([*want, 1, 2, 3]), ends=[h.EOS], mask=mask, min_tokens=min_tokens)
    ends_right(t, ids, r, [*want, h.EOS], 'stop')


@pytest.mark.parametrize('k', (1, 4, 8))
def test_what_a_mask_forbids_is_never_said(k):
    t, ids = h.target('qwen3_5'), h.Case('qwen3_5').ids
    r = h.run(t, ids, k, oracle(h.run(t, ids).output), mask=h.odd_even(264), temperature=1.7, seed=5)
    assert all(i % 7 == 6 or token % 2 == i % 2 for i, token in enumerate(r.output))


def test_characters_of_several_bytes():
    "A text of wide characters, one byte per token, in blocks of every width: nothing is shown before it is whole."
    t, text = h.target('llama'), 'né😀日本 é'
    want = t.tokenizer.encode(text)
    def mask(output): return np.arange(264) == (want[len(output)] if len(output) < len(want) else h.EOS)
    for k in range(1, 9):
        r = h.run(t, [65], k, oracle(want), ends=[h.EOS], mask=mask)
        assert (r.text, r.seq.finish) == (text, 'stop') and (k == 1 or r.stats.rounds)
        for n in range(1, len(want)):
            cut = h.run(t, [65], k, oracle(want), mask=mask, max_tokens=n)
            assert text.startswith(cut.text) and len(cut.output) == n
            h.adds_up(cut)
