"""Logits that are no numbers: a drafter cannot cause an error with them, and where the target itself computes none, the request
ends with an error that says so and nobody else notices."""
import harness as h
import mlx.core as mx
import pytest

from mlxspec.core import NumericalError
from mlxspec.drafters import scripted as sc
from mlxspec.engine import Engine
from mlxspec.target import Target, body_of
from mlxspec.tiny import byte_tokenizer, tiny_model

CACHES = ('llama', 'gemma3', 'qwen3_5', 'lfm2') # one target per kind of cache
IDS = tuple(b'Red, green, red, ')


pytestmark = pytest.mark.usefixtures('quiet')


def poison(model, token, value=float('nan')):
    "From now on the model computes no numbers where it reads this token, and where it looks back on it."
    e = body_of(model).embed_tokens
    read = type(e).__call__
    e.__class__ = type(type(e).__name__, (type(e),), {'__call__': lambda self, ids: mx.where((ids == token)[..., None], value, read(self, ids))})
    return model


def poisoned(kind, token, value=float('nan')):
    return Target(poison(tiny_model(kind), token, value), byte_tokenizer(), {}, kind)


def strips(cache): # everything in memory, also behind the ends
    for e in cache: yield from e.cache if hasattr(e, 'cache') else (e.keys, e.values)


@pytest.mark.parametrize('value', (float('nan'), float('inf')), ids=str)
@pytest.mark.parametrize('kind', CACHES)
def test_a_draft_cannot_poison_the_text(kind, value):
    "Drafts that lead to NaN at every place of a block: the text is the plain one, and no NaN stays in the cache, not even behind its end."
    want = h.run(h.target(kind), IDS).output
    bad = next(i for i in range(264) if i not in (*IDS, *want))
    t = poisoned(kind, bad, value)
    for j in range(4):
        script = lambda rest, k, n, j=j: rest[:j] + [bad] + rest[j + 1:k]
        r = h.run(t, IDS, 5, [sc.Scripted(want, script)])
        assert r.output == want and r.stats.reasons['not_finite'] > 0
        h.adds_up(r)
        for i in (i for i in (3, 6) if want.index(want[i]) == i): # the text ends while such rows lie behind its end
            r = h.run(t, IDS, 5, [sc.Scripted(want, script)], ends=[want[i]])
            assert r.output == want[:i + 1] and all(mx.isfinite(a).all().item() for a in strips(r.run.cache))


@pytest.mark.parametrize('temperature', (0., 1.))
@pytest.mark.parametrize('k', (1, 4))
def test_a_target_that_breaks_down(k, temperature):
    "The fifth token of the answer makes it impossible to go on: five tokens come, then one error, drafts or not."
    args = dict(temperature=temperature, seed=1)
    want = h.run(h.target('llama'), IDS, **args).output
    t = poisoned('llama', want[4])
    at = want.index(want[4]) + 1
    with pytest.raises(NumericalError, match='no finite numbers') as e: h.run(t, IDS, k, [sc.Scripted(want, sc.oracle)], **args)
    assert (e.value.code, e.value.status) == ('numerical_error', 500)
    for n in range(1, at + 1): assert h.run(t, IDS, k, [sc.Scripted(want, sc.oracle)], max_tokens=n, **args).output == want[:n]
    assert h.run(t, IDS, k, [sc.Scripted(want, sc.oracle)], ends=[want[4]], **args).output == want[:at] # it ends before it breaks


@pytest.mark.parametrize('kind', CACHES)
def test_one_request_fails_and_the_next_does_not_notice(kind):
    "Through the engine: a prompt that breaks the target between two that do not."
    bad = next(i for i in range(264) if i not in (*IDS, *h.run(h.target(kind), IDS).output))
    with Engine.from_model(poison(tiny_model(kind), bad), byte_tokenizer()) as engine:
        good = dict(prompt=list(IDS), max_tokens=8, ignore_eos=True)
        before = [t.id for t in engine.generate(**good).tokens]
        for prompt in ([bad], [*IDS, bad], [bad, *IDS], [*IDS, bad, 65]):
            for said in ({}, dict(temperature=1., logprobs=2), dict(frequency_penalty=1., speculate=False), dict(temperature=.5, accept_law='rejection')):
                with pytest.raises(NumericalError): engine.generate(prompt, max_tokens=4, **said)
            assert [t.id for t in engine.generate(**good).tokens] == before
        assert engine.alive


def test_it_costs_no_second_read(monkeypatch):
    "The news comes with the tokens: as many waits for the device as steps."
    from mlxspec import rounds
    want, waits = h.run(h.target('llama'), IDS).output, []
    monkeypatch.setattr(rounds.mx, 'eval', lambda *a, real=mx.eval: (waits.append(a), real(*a))[1])
    r = h.run(h.target('llama'), IDS, 4, [sc.Scripted(want, sc.oracle)])
    assert len(waits) - 1 == r.stats.rounds > 0 # one for the prompt
