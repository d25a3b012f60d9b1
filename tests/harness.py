"""One way to run a request in tests, and the axes along which its text must not change.

A *case* is one value per axis. `pairs` picks cases so that every two values of different axes meet somewhere; `product` makes all
of them that matter. Whoever adds a way to decode (a gate, neighbours in a batch, a grammar) adds an axis here, and every test of
test_same_text.py that walks the cases covers it.
"""
import itertools
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np

from mlxspec.cache import leaves, written
from mlxspec.core import Params, Proposal
from mlxspec.drafters import scripted as sc
from mlxspec.drafters.dflash import build_dflash
from mlxspec.drafters.draft_model import DraftModel
from mlxspec.drafters.eagle3 import build_eagle3
from mlxspec.drafters.glm4_moe_lite_mtp import build_glm4_moe_lite_mtp
from mlxspec.drafters.inkling_mtp import build_inkling_mtp
from mlxspec.drafters.lookup import Lookup
from mlxspec.drafters.prediction import Prediction, PredictionState, Script
from mlxspec.drafters.qwen3_5_mtp import build_qwen3_5_mtp
from mlxspec.pairing import DEMO
from mlxspec.rounds import Running, open_running, prefill_step, step
from mlxspec.sequence import Sequence
from mlxspec.split import split_mtp
from mlxspec.strategies import OneWay
from mlxspec.target import Target
from mlxspec.text import TextStream
from mlxspec.tiny import byte_tokenizer, save_tiny_glm, save_tiny_inkling, save_tiny_mtp, tiny_model
from mlxspec.tiny_drafters import save_tiny_dflash, save_tiny_eagle3

N = 24 # tokens per run
EOS = 258 # of the byte tokenizer
DEMO_MTP = DEMO.with_name('mlxspec-demo-mtp')
_heads = tempfile.TemporaryDirectory() # of random heads


# ---- targets and drafters

def target(kind: str, dtype: str = 'float32') -> Target:
    "A tiny random target of an architecture, or the demo target (in the dtype it has); one of each per process."
    return _loaded(kind, dict(demo='bfloat16', glm4_moe_lite='float32').get(kind, dtype)) # MLX multiplies experts on a CPU in 32 bits only


@cache
def _loaded(kind: str, dtype: str) -> Target:
    t = Target.load(DEMO) if kind == 'demo' else Target(tiny_model(kind, getattr(mx, dtype)), byte_tokenizer(), {}, kind)
    if t.latent: t.ways = OneWay('row_attention') # as the probe finds out
    return t


class Self:
    "The target as its own drafter: what it drafts is what it says."
    kind, max_drafts, hidden = 'self', 15, None

    def __init__(self, t: Target): self.target = t
    def open(self, seq): return SimpleNamespace(seq=seq, cache=self.target.make_cache(), read=0, close=lambda: None)
    def ready(self, s): return True
    def observe(self, states, tokens, features, accepted): pass

    def propose(self, states, ks, laws):
        (s,), (k,), (law,) = states, ks, laws
        for t in s.seq.tokens[s.read:-1]: self.target.prefill(mx.array([[t]]), s.cache)
        s.read, last, drafts = len(s.seq.tokens) - 1, mx.array([s.seq.tokens[-1]]), []
        with self.target.transaction(s.cache, k): # without a commit all rows are taken back
            for _ in range(k):
                drafts.append(law.draw(self.target.forward(last[None], s.cache).logits[0]))
                last = drafts[-1]
            mx.eval(drafts)
        return [Proposal(mx.concatenate(drafts), (self.kind,) * k, law.logprobs)]


@cache
def mtp(t: Target):
    "The demo head for the demo target, else a random one."
    path = DEMO_MTP if t.name == DEMO.name else save_tiny_mtp(Path(_heads.name)/'head')
    head = build_qwen3_5_mtp(t, path, None)
    head.max_drafts = 7
    return head


@cache
def head(family: str, t: Target):
    "A random head of another family for a target."
    place, width = Path(_heads.name), t.embed(mx.array([[0]])).shape[-1]
    if family == 'glm': return build_glm4_moe_lite_mtp(t, _glm(place), 4)
    if family == 'inkling': return build_inkling_mtp(t, save_tiny_inkling(place/'inkling'), 4)
    save, build = dict(eagle3=(save_tiny_eagle3, build_eagle3), dflash=(save_tiny_dflash, build_dflash))[family]
    return build(t, save(place/f'{family}-{width}', hidden_size=width, vocab_size=t.vocab_size), None)


@cache
def _glm(place: Path) -> Path:
    return split_mtp(str(save_tiny_glm(place/'glm-raw')), place/'glm', say=lambda line: None)


@cache
def small(t: Target):
    "A draft model: the target itself in half precision (experts: as it is), or for the demo target something random."
    model = tiny_model('llama' if t.name == DEMO.name else t.name, mx.float32 if t.latent else mx.float16, vocab_size=t.vocab_size)
    return DraftModel(Target(model, t.tokenizer, {}, 'small'), t, 8)


class Predicted(Prediction):
    "A prediction that is right but for every seventh token, and for one that is missing."
    def __init__(self, answer): self.ids = tuple(t + (i % 7 == 6) for i, t in enumerate(answer) if i != 9)
    def open(self, seq): return PredictionState(seq, Script.of(self.ids))


class Helped:
    "A drafter whose first drafts are corrected, now more of them, now fewer, so that it sees rounds that end anywhere."
    def __init__(self, drafter, answer): self.drafter, self.answer, self.turn = drafter, answer, 0
    def __getattr__(self, name): return getattr(self.drafter, name)

    def propose(self, states, ks, laws):
        (p,) = self.drafter.propose(states, ks, laws)
        self.turn += 1
        seq, drafts = states[0].seq, p.tokens if isinstance(p.tokens, list) else p.tokens.tolist()
        right = self.answer[len(seq.tokens) - seq.prompt_len:][:self.turn % (len(drafts) + 1)]
        return [Proposal(right + drafts[len(right):], p.sources, None, reason=p.reason)]


SCRIPTS: dict[str, Callable[[Target], sc.Script]] = dict(
    oracle=lambda t: sc.oracle, silent=lambda t: sc.silent, silent_every=lambda t: sc.silent_every(2), half=lambda t: sc.half(.5),
    decay=lambda t: sc.decay(.8), oov=lambda t: sc.oov(t.vocab_size), eos_liar=lambda t: sc.eos_liar(1, min(t.tokenizer.eos_token_ids)),
    broken=lambda t: sc.broken(2), **{f'liar{j}': lambda t, j=j: sc.liar(j) for j in range(4)})


def drafter(name: str, t: Target, answer: list[int]): # answer: what plain decoding said
    "A drafter by its name on the axis."
    if name in SCRIPTS: return sc.Scripted(answer, SCRIPTS[name](t))
    if name in ('eagle3', 'dflash', 'glm', 'inkling'): return head(name, t)
    return dict(lookup=Lookup, self=lambda: Self(t), mtp=lambda: mtp(t), draft_model=lambda: small(t), prediction=lambda: Predicted(answer))[name]()


# ---- requests

def odd_even(vocab: int) -> Callable[[list[int]], np.ndarray]: # a grammar for any vocabulary
    "A mask under which odd and even ids take turns; every seventh token is free."
    def mask(output): return None if len(output) % 7 == 6 else np.arange(vocab) % 2 == len(output) % 2
    return mask


# What requests may ask for besides a temperature: fields of Params, and `mask` or `ends` (the third plain token ends the text).
SHAPES: dict[str, dict] = dict(
    bare={}, top_p=dict(top_p=.8), top_k=dict(top_k=7), min_p=dict(min_p=.05), bias=dict(logit_bias={5: 4., 100: -6.}),
    frequency=dict(frequency_penalty=-1.5), presence=dict(presence_penalty=-2.), repetition=dict(repetition_penalty=1.8, repetition_context_size=7),
    logprobs=dict(logprobs=3), processed=dict(logprobs=2, logprobs_of='processed', top_p=.9, logit_bias={7: 2.}),
    everything=dict(top_p=.95, top_k=40, min_p=.01, logit_bias={9: 3.}, frequency_penalty=-.5, presence_penalty=2., repetition_penalty=.7, logprobs=1),
    ends=dict(ends=True), min_tokens=dict(ends=True, min_tokens=9), mask=dict(mask=True), stop=dict(stop=True))
PROMPTS = ('T', 'Red, green, red,', 'ab cd ef ab cd ef ab cd ef ab cd') # the window of gemma3 is 16
PACES: dict[str, Callable[[int, int], int]] = dict(   # (K, number of the step) -> verify rows now
    steady=lambda k, i: k, switching=lambda k, i: k if i // 5 % 2 == 0 else 1)

AXES: dict[str, tuple] = dict(
    kind=('llama', 'qwen3', 'gemma2', 'gemma3', 'qwen3_5', 'lfm2', 'glm4_moe_lite', 'demo'), dtype=('float32', 'bfloat16'), drafter=(*SCRIPTS, 'lookup', 'prediction', 'draft_model', 'mtp', 'eagle3', 'dflash', 'self'),
    k=tuple(range(1, 9)), temperature=(0., .3, 1., 1.7), shape=tuple(SHAPES), pace=tuple(PACES), prompt=tuple(range(len(PROMPTS))))


@dataclass(frozen=True)
class Case:
    "One point in the space of requests and ways to serve them."
    kind: str = 'llama'
    dtype: str = 'float32'
    drafter: str = 'oracle'
    k: int = 4
    temperature: float = 0.
    shape: str = 'bare'
    pace: str = 'steady'
    prompt: int = 1

    def __str__(self): return '-'.join(str(getattr(self, a)) for a in AXES)
    @property
    def target(self) -> Target: return target(self.kind, self.dtype)
    @property
    def ids(self) -> tuple[int, ...]: return tuple(self.target.tokenizer.encode(PROMPTS[self.prompt]))


@dataclass
class Ran:
    "A request that has ended."
    run: Running
    text: str

    @property
    def seq(self) -> Sequence: return self.run.seq
    @property
    def output(self) -> list[int]: return self.seq.output
    @property
    def stats(self): return self.seq.stats
    @property
    def said(self) -> list[tuple]:
        "Everything that a client can see of the tokens, but who guessed them."
        return [(e.id, e.logprob, e.top) for e in self.seq.emitted]


def run(t: Target, prompt, k: int = 1, drafters=(), ends=(), mask=None, pace: str = 'steady', **params) -> Ran:
    "One request from its prompt to its end."
    p = Params(**{'max_tokens': N} | params)
    seq = Sequence(list(prompt), p, TextStream(t.tokenizer.detokenizer, p.stop), frozenset(ends))
    r, text = open_running(t, seq, drafters, mask=mask), ''
    while not prefill_step(t, r): pass
    for i in itertools.count():
        text += step(t, r, PACES[pace](k, i))[1].text
        if seq.finish: return Ran(r, text)


@cache
def request(kind: str, dtype: str, temperature: float, shape: str, prompt: int) -> tuple[dict, Ran]:
    "Arguments of `run` for a request, and what plain decoding answers."
    c = Case(kind, dtype, temperature=temperature, shape=shape, prompt=prompt)
    args = dict(temperature=temperature, seed=11) | SHAPES[shape]
    if 'ends' in args or 'stop' in args: bare = request(kind, dtype, temperature, 'bare', prompt)[1]
    if 'ends' in args: args['ends'] = (bare.output[2],)
    if 'stop' in args: args['stop'] = (bare.text[5:7] or bare.text[-1:] or 'nothing to cut', 'never said')
    if 'mask' in args: args['mask'] = odd_even(c.target.vocab_size)
    return args, run(c.target, c.ids, **args)


def same_text(c: Case) -> tuple[Ran, Ran]: # plain, the case's
    "Run a case and compare it with plain decoding in everything that a client can see."
    args, plain = request(c.kind, c.dtype, c.temperature, c.shape, c.prompt)
    r = run(c.target, c.ids, c.k, [drafter(c.drafter, c.target, plain.output)], pace=c.pace, **args)
    assert r.output == plain.output, f'{r.output} is not {plain.output}'
    assert (r.text, r.seq.finish, r.said) == (plain.text, plain.seq.finish, plain.said)
    adds_up(r)
    return plain, r


def adds_up(r: Ran) -> None:
    "Usage, the account of the rounds, and the cache agree with what was delivered."
    s, n = r.stats, len(r.output)
    assert n == s.completion_tokens == len(r.seq.emitted) <= r.seq.params.max_tokens
    assert 0 <= s.accepted <= s.drafted and n <= s.accepted + s.rounds + s.plain_steps <= n + 1 # a stop may cut off the bonus
    assert len(r.seq.tokens) - 1 <= r.run.cached <= len(r.seq.tokens)
    assert {written(c) for c in r.run.cache} - {None} == {r.run.cached}


def rebuilt(t: Target, ids: list[int]) -> list[mx.array]:
    "Everything a cache shows later steps after reading these tokens one by one."
    cache = t.make_cache()
    for i in ids: t.prefill(mx.array([[i]]), cache)
    return [a for c in cache for a in leaves(c)]


# ---- cases

def pairs(axes: dict[str, tuple] = AXES, seed: int = 0, tries: int = 20) -> list[Case]:
    "Cases such that every two values of different axes meet in one; the same ones every time."
    rng, names = random.Random(seed), list(axes)
    missing = {frozenset([(a, x), (b, y)]) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]}
    def extended(first): # the rest of a case, axis by axis, by what still has to meet
        row = dict(first)
        for a in rng.sample(names, len(names)):
            if a in row: continue
            gain = lambda x, a=a: sum(frozenset([(a, x), p]) in missing for p in row.items())
            row[a] = max(rng.sample(axes[a], len(axes[a])), key=gain)
        return row
    def meets(row): return {frozenset(p) for p in itertools.combinations(row.items(), 2)} & missing
    cases = []
    while missing:
        seeds = rng.sample(sorted(map(sorted, missing), key=str), min(tries, len(missing)))
        best = max((extended(s) for s in seeds), key=lambda row: len(meets(row)))
        missing -= meets(best)
        cases.append(Case(**best))
    return cases


def product(axes: dict[str, tuple] = AXES, turns: tuple[str, ...] = ('dtype', 'pace', 'prompt'), **fixed) -> Iterator[Case]:
    "All cases with some values fixed; the values of the axes in `turns` take turns."
    names = [n for n in axes if n not in fixed and n not in turns]
    around = itertools.cycle(itertools.product(*(axes[n] for n in turns)))
    for values, turn in zip(itertools.product(*(axes[n] for n in names)), around, strict=False):
        yield Case(**fixed, **dict(zip(names, values, strict=True)), **dict(zip(turns, turn, strict=True)))
