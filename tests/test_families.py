"""Every family of drafters on every kind of cache: the text is plain decoding's, wherever a round ends, and what a drafter remembers
goes with the sequence."""
import harness as h
import pytest
from test_prefix import Bench

from mlxspec.core import PairError, Params
from mlxspec.drafters.base import Guest, quantize
from mlxspec.drafters.gemma4_assistant import build_gemma4_assistant
from mlxspec.drafters.glm4_moe_lite_mtp import build_glm4_moe_lite_mtp
from mlxspec.drafters.inkling_mtp import build_inkling_mtp
from mlxspec.drafters.lookup import Lookup
from mlxspec.drafters.prediction import Prediction, PredictionState, Script
from mlxspec.drafters.qwen3_5_mtp import build_qwen3_5_mtp
from mlxspec.law import DraftLaw, Law
from mlxspec.memory import measure, weight_bytes
from mlxspec.rounds import open_running, prefill_step, step
from mlxspec.sequence import Sequence
from mlxspec.split import split_mtp
from mlxspec.strategies import OneWay
from mlxspec.target import Target
from mlxspec.text import TextStream
from mlxspec.tiny import (TinyInkling, TinyInklingArgs, save_tiny_assistant, save_tiny_glm, save_tiny_inkling, save_tiny_mtp,
                          tiny_model)

FAMILIES = ('lookup', 'prediction', 'draft_model', 'mtp', 'eagle3', 'dflash', 'glm', 'inkling')
CACHES = ('llama', 'gemma3', 'qwen3_5', 'lfm2', 'gemma4', 'glm4_moe_lite') # one target per kind of cache; the window of the gemmas is 16

pytestmark = pytest.mark.usefixtures('quiet')


@pytest.fixture(scope='module')
def assistant(tmp_path_factory):
    return build_gemma4_assistant(h.target('gemma4'), save_tiny_assistant(tmp_path_factory.mktemp('assistant')), None)


def check(t, d, k=6, always=True): # always: it drafts in every round
    "Past the window, greedy and drawn, with rounds that end anywhere."
    for temperature in (0., 1.):
        ids = t.tokenizer.encode(h.PROMPTS[2])
        args = dict(temperature=temperature, seed=3, max_tokens=40)
        plain = h.run(t, ids, **args)
        r = h.run(t, ids, k, [h.Helped(d(plain.output), plain.output)], **args)
        assert r.output == plain.output
        h.adds_up(r)
        assert not always or len(set(r.stats.per_step_accepted)) > 2 # rounds of none, some and many accepted drafts


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('kind', CACHES)
def test_same_text_wherever_a_round_ends(kind, family):
    t = h.target(kind)
    if (kind, family) == ('lfm2', 'inkling'): # its final norm is not where Inkling's blocks look for it
        with pytest.raises(PairError, match='cannot run with lfm2'): h.head('inkling', t)
        return
    check(t, lambda answer: h.drafter(family, t, answer), always=family not in ('lookup', 'draft_model')) # one is silent at times, one nearly always right


def test_assistants_too(assistant):
    check(assistant.target, lambda answer: assistant, k=4)


class Right(Prediction):
    "A prediction that is the answer."
    def __init__(self, ids): self.ids = tuple(ids)
    def open(self, seq): return PredictionState(seq, Script.of(self.ids))


@pytest.mark.parametrize('kind', CACHES)
def test_a_perfect_prediction_needs_n_over_k_steps(kind):
    t = h.target(kind)
    ids = t.tokenizer.encode(h.PROMPTS[2])
    answer = h.run(t, ids, max_tokens=40).output
    for n, k in ((1, 4), (2, 4), (4, 4), (5, 4), (23, 8), (24, 8), (25, 8), (39, 2), (40, 3), (40, 16)):
        r = h.run(t, ids, k, [Right(answer)], max_tokens=n)
        assert r.output == answer[:n] and r.stats.rounds + r.stats.plain_steps == -(-n // k), (n, k)
        assert r.stats.accepted == r.stats.drafted


# ---- targets with a head that fits nobody else

def experts(kind):
    def pair(root):
        t = Target(tiny_model(kind), h.byte_tokenizer(), {}, kind)
        return build_qwen3_5_mtp(t, save_tiny_mtp(root, raw=True, kind=kind), 4)
    return pair


def glm(root):
    t = Target.load(save_tiny_glm(root / 'raw'))
    t.ways = OneWay('row_attention')
    return build_glm4_moe_lite_mtp(t, split_mtp(str(root / 'raw'), root / 'head', say=lambda s: None), 4)


PAIRS = dict(
    groups=lambda root: build_gemma4_assistant(h.target('gemma4'), save_tiny_assistant(root, ordered=True), 4), qwen3_5_moe=experts('qwen3_5_moe'),
    qwen3_next=experts('qwen3_next'), glm=glm,
    inkling=lambda root: build_inkling_mtp(Target.load(save_tiny_inkling(root, blocks=2), classes=(TinyInkling, TinyInklingArgs)), None, 4))


@pytest.mark.parametrize('name', PAIRS)
def test_pairs(name, tmp_path):
    "Experts, chains and groups: past the window, after partial rejections in hybrid targets; and what is remembered goes with the sequence."
    d = PAIRS[name](tmp_path)
    check(d.target, lambda answer: d, k=4)
    r = halfway(d.target, d)
    guest, twin, later = r.guests[0], r.guests[0].fork(r.seq), Guest(d, r.seq)
    later.restore(guest.save(), len(r.seq.tokens) - 1)
    want = says(r, guest)
    assert len(want) == 3 and says(r, twin) == want
    assert says(r, later) == want
    assert not (guest.failures or twin.failures or later.failures)


@pytest.mark.parametrize('family', (*FAMILIES, *PAIRS))
def test_memory_is_counted(family, tmp_path):
    "Weights of the drafter, and what it remembers per token."
    if family in PAIRS: d = PAIRS[family](tmp_path)
    else: d = h.drafter(family, h.target('llama'), [1, 2, 3])
    t = h.target('llama') if family in ('lookup', 'prediction') else d.target
    alone, pair = measure(t, (), 4), measure(t, (d,), 4)
    free = family in ('lookup', 'prediction')
    assert pair.target == alone.target == weight_bytes(t.model) and pair.verify == alone.verify > 0
    assert pair.drafters == (0 if free else weight_bytes(d.net)) and (pair.drafters > 0) != free
    assert (pair.per_token > alone.per_token) == (not free and family != 'groups') # an assistant reads the target's cache


@pytest.mark.parametrize('name', PAIRS)
@pytest.mark.parametrize('bits', (8, 4))
def test_packed_when_loaded(name, bits, tmp_path):
    d = PAIRS[name](tmp_path)
    before = weight_bytes(d.net)
    assert quantize(d, bits) > 5 and weight_bytes(d.net) < before
    ids = d.target.tokenizer.encode(h.PROMPTS[2])
    r = h.run(d.target, ids, 4, [d])
    assert r.output == h.run(d.target, ids).output and r.stats.rounds and not r.run.guests[0].failures


def halfway(t, d, n=10):
    "A sequence that has decoded n tokens with a drafter."
    seq = Sequence(t.tokenizer.encode(h.PROMPTS[2]), Params(max_tokens=99), TextStream(t.tokenizer.detokenizer, ()), frozenset())
    r = open_running(t, seq, [d])
    while not prefill_step(t, r, 8): pass
    while len(seq.emitted) < n: step(t, r, 4)
    return r


def says(r, g, n=3): # what a guest of this sequence would propose
    g.look(r.cache)
    return list(map(int, g.propose(n, DraftLaw(Law(Params(), r.law.vocab), len(r.seq.tokens))).tokens))


@pytest.mark.parametrize('family', (*FAMILIES, 'assistant'))
@pytest.mark.parametrize('kind', ('gemma4', 'qwen3_5'))
def test_memory_goes_with_the_sequence(kind, family, assistant):
    "A copy, and a later sequence with the same beginning, propose the same; and go on when only a part is shared."
    if family == 'assistant' and kind != 'gemma4': pytest.skip('fits one target')
    t = h.target(kind)
    d = assistant if family == 'assistant' else h.drafter(family, t, h.run(t, t.tokenizer.encode(h.PROMPTS[2])).output)
    r = halfway(t, d)
    guest, rows = r.guests[0], len(r.seq.tokens) - 1
    twin, later, part = guest.fork(r.seq), Guest(d, r.seq), Guest(d, r.seq)
    saved = guest.save()
    later.restore(saved, rows)
    part.restore(saved, rows - 5)
    want = says(r, guest)
    assert says(r, twin) == want and says(r, later) == want
    assert not (guest.failures or twin.failures or later.failures or part.failures)
    for g in (twin, later, part): g.close()
    step(t, r, 4) # the sequence itself goes on undisturbed
    assert r.guests[0].failures == 0
    part = Guest(d, r.seq)
    part.restore(saved, 0)
    assert part.failures == 0


@pytest.mark.parametrize('kind', CACHES)
def test_a_block_of_two_sources(kind):
    "A prediction with holes, continued from a text that holds the answer: the same text, in fewer steps than either alone, each draft with its label."
    t = h.target(kind)
    ids = t.tokenizer.encode(h.PROMPTS[2])
    mixed = False
    for temperature in (0., 1.):
        args = dict(temperature=temperature, seed=3, max_tokens=40)
        answer = h.run(t, ids, **args).output
        longer = [*answer, *ids] # it has been said before, maybe in another way
        plain = h.run(t, longer, **args).output
        steps, sources = {}, {}
        for name, drafters in dict(one=[Short(plain)], both=[Short(plain), Lookup()]).items():
            r = h.run(t, longer, 6, drafters, **args)
            assert r.output == plain
            h.adds_up(r)
            steps[name], sources[name] = r.stats.rounds + r.stats.plain_steps, r.stats.sources
        assert steps['both'] <= steps['one'] and set(sources['one']) == {'prediction'}
        assert sum(d for d, _ in sources['both'].values()) == r.stats.drafted and sum(a for _, a in sources['both'].values()) == r.stats.accepted
        mixed = mixed or set(sources['both']) == {'prediction', 'lookup'}
    assert mixed or kind == 'gemma3' # which says nothing twice


class Short(Right):
    "Two right tokens at a time."
    def propose(self, states, ks, laws): return super().propose(states, [min(2, k) for k in ks], laws)



@pytest.mark.parametrize('family', (*FAMILIES, *PAIRS))
def test_drafts_go_on_after_a_prefix_hit(family, tmp_path):
    "A conversation of three turns: each finds the state of the turn before, the target's and the drafter's, and says what plain decoding says."
    d = PAIRS[family](tmp_path) if family in PAIRS else None
    t = d.target if d else h.target('gemma3' if family == 'dflash' else 'qwen3_5')
    b = Bench(t, True)
    for want in Bench(t, True).talk(3):
        seq = b.ask(want.tokens[:want.prompt_len], [d or h.drafter(family, t, want.output)], k=4)
        assert seq.output == want.output and 'drafter_failed' not in seq.stats.reasons
        b.rest()
    assert seq.stats.prefix == 'hit' and seq.stats.cached_tokens > 20
    assert seq.stats.rounds or family == 'lookup'
