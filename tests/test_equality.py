"""The promise as tests: plain decoding gives mlx-lm's tokens, speculative decoding gives plain's.

Tiny seeded random targets of several architectures, float32 and bfloat16, every scripted drafter, K = 1..8.
"""
import logging

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from mlxspec.cache import written
from mlxspec.core import Params
from mlxspec.drafters import scripted as sc
from mlxspec.drafters.lookup import Lookup
from mlxspec.rounds import open_running, prefill_step, step
from mlxspec.sequence import Sequence
from mlxspec.target import Target
from mlxspec.text import TextStream
from mlxspec.tiny import byte_tokenizer, tiny_model

KINDS, DTYPES = ('llama', 'qwen3', 'gemma2', 'gemma3', 'qwen3_5', 'lfm2'), (mx.float32, mx.bfloat16)
PROMPTS = ('T', 'The', 'Red, green,', 'Count: one, two, three,')
N = 20 # tokens per run


@pytest.fixture(scope='module', autouse=True)
def quiet():
    mx.disable_compile()
    logging.getLogger('mlxspec').setLevel(logging.CRITICAL)
    yield
    logging.getLogger('mlxspec').setLevel(logging.WARNING)


@pytest.fixture(scope='module', params=[(k, d) for k in KINDS for d in DTYPES], ids=lambda p: f'{p[0]}-{str(p[1])[-8:]}')
def target(request):
    kind, dtype = request.param
    return Target(tiny_model(kind, dtype), byte_tokenizer(), {}, kind)


def run(target, prompt, k, drafters=(), eos=(), **params):
    seq = Sequence(prompt, Params(**({'max_tokens': N} | params)), TextStream(target.tokenizer.detokenizer), frozenset(eos))
    r = open_running(target, seq, drafters)
    while not prefill_step(target, r): pass
    while not seq.finish: step(target, r, k)
    return r


def cast(vocab):
    return dict(oracle=sc.oracle, silent=sc.silent, silent_every=sc.silent_every(2), half=sc.half(.5), decay=sc.decay(.8),
                oov=sc.oov(vocab), eos_liar=sc.eos_liar(1, 258), broken=sc.broken(2), **{f'liar{j}': sc.liar(j) for j in range(4)})


def plain(target, prompt, n=N):
    return [t for t, _ in generate_step(mx.array(prompt), target.model, max_tokens=n)]


@pytest.mark.parametrize('prompt', PROMPTS)
def test_plain_equals_mlx_lm(target, prompt):
    ids = target.tokenizer.encode(prompt)
    assert run(target, ids, 1).seq.output == plain(target, ids)


@pytest.mark.parametrize('k', range(1, 9))
def test_speculative_equals_plain(target, k):
    ids = target.tokenizer.encode(PROMPTS[-1])
    want = plain(target, ids)
    for name, script in (dict(oracle=sc.oracle) if k == 1 else cast(target.vocab_size)).items():
        r = run(target, ids, k, [sc.Scripted(want, script)])
        s = r.seq.stats
        assert r.seq.output == want, name
        assert s.completion_tokens == N == s.accepted + s.rounds + s.plain_steps, name
        assert 0 <= s.accepted <= s.drafted, name
        if k == 1: assert s.drafted == 0, name


@pytest.mark.parametrize('k', (2, 4, 8))
def test_lookup_equals_plain(target, k):
    ids = target.tokenizer.encode('ab cd ab cd ab cd')
    assert run(target, ids, k, [Lookup()]).seq.output == plain(target, ids)


@pytest.mark.parametrize('temperature', (0.3, 1.0, 1.7))
def test_sampled_text_does_not_depend_on_k(target, temperature):
    ids = target.tokenizer.encode(PROMPTS[-1])
    kw = dict(temperature=temperature, seed=7, top_p=.95, top_k=40, min_p=.01, presence_penalty=.3, repetition_penalty=1.1)
    want = run(target, ids, 1, **kw).seq.output
    for k in (2, 5, 8):
        for script in (sc.oracle, sc.liar(1), sc.half(.5)):
            assert run(target, ids, k, [sc.Scripted(want, script)], **kw).seq.output == want
    assert run(target, ids, 1, **kw | dict(seed=8)).seq.output != want


def test_an_accepted_end_inside_a_block(target):
    "Declare the token at index i as end-of-text: the text stops there, in whatever block it lies, and the cache agrees."
    ids = target.tokenizer.encode(PROMPTS[-1])
    want = plain(target, ids)
    for i in range(3, 15, 2):
        stop = want.index(want[i])
        r = run(target, ids, 6, [sc.Scripted(want, sc.oracle)], eos=[want[i]])
        assert (r.seq.output, r.seq.finish) == (want[:stop + 1], 'stop')
        assert {written(c) for c in r.cache} - {None} == {r.cached} and r.cached >= len(ids) + stop


def test_max_tokens_is_never_exceeded(target):
    ids = target.tokenizer.encode('The')
    want = plain(target, ids)
    for k in (2, 4):
        for n in range(1, 2 * k + 2):
            r = run(target, ids, k, [sc.Scripted(want, sc.oracle)], max_tokens=n)
            assert (r.seq.output, r.seq.finish, r.seq.stats.completion_tokens) == (want[:n], 'length', n)


def test_after_any_rejection_the_text_goes_on_as_plain(target):
    ids = target.tokenizer.encode('The')
    want = plain(target, ids, 48)
    for j in range(4):
        r = run(target, ids, 5, [sc.Scripted(want, sc.liar(j))], max_tokens=48)
        assert r.seq.output == want and r.seq.stats.accepted < r.seq.stats.drafted


@pytest.mark.parametrize('length', range(8, 25, 4))
def test_across_the_edge_of_a_window(length):
    "Window of 16: prompts and outputs that start before, at and after its edge."
    target = Target(tiny_model('gemma3'), byte_tokenizer(), {}, 'gemma3')
    ids = (target.tokenizer.encode('Red, green, ') * 3)[:length]
    want = plain(target, ids)
    for script in (sc.oracle, sc.liar(0), sc.liar(3)):
        r = run(target, ids, 4, [sc.Scripted(want, script)])
        assert r.seq.output == want and r.seq.stats.rounds and not r.seq.stats.reasons['cache_not_trimmable']
        assert all(c.end <= c.max_size + 300 for c in r.cache if hasattr(c, 'end'))
