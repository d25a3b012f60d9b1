"""What the modes deliver: batches beside mlx-lm's BatchGenerator, drafts in batches, cadence and endings. Ratios of interleaved turns.

    python tools/lanes.py [--minutes 7] [--model DIRECTORY --drafter lookup] [--json FILE]

Without --model the demo pair is measured; with it that one after the demo pair. Run it on an idle machine. Turns go A B B A; a ratio
above 1 says that the first one named is faster."""
import argparse
import json
import math
import statistics
import tempfile
import time
from dataclasses import asdict
from datetime import date
from functools import partial

import mlxspec  # before MLX: it brings the BLAS
from mlx_lm.generate import BatchGenerator

from mlxspec import blas
from mlxspec.bench import speed
from mlxspec.config import SHARED
from mlxspec.core import ConfigError, Params
from mlxspec.engine import Engine
from mlxspec.modes import Trace, percentile

ASKS = ('Count from 3 to 12.', 'Spell the word garden.', 'Name the days of the week.', 'Copy this text: the red fox jumps over a blue gate.',
        'What is 12 plus 7?', 'Tell a short story about a cat.', 'Give me JSON with name Anna and color green.', 'List the months of the year.')
COPY = ('The garden has red roses, white lilies, blue irises and yellow tulips. The gardener waters the red roses, the white lilies, the blue '
        'irises and the yellow tulips every morning. Repeat: The garden has red roses, white')
UNPINNED = 'mtp_batch without the entry pin' # a mode for this table only
LONG = 'the red fox jumps over a blue gate and looks at the moon. ' * 150


def turns(a, b, seconds, last): # a, b: seconds of one run each; last: when the time is over for good -> how many times as fast a is
    "Turns A B B A for about so long, at least two, unless there is no time, and at most twelve."
    end, ours, theirs = time.perf_counter() + seconds, [], []
    while not ours or time.perf_counter() < last and (len(ours) < 2 or len(ours) < 12 and time.perf_counter() < end):
        a1, b1, b2, a2 = a(), b(), b(), a()
        ours.append(a1 + a2)
        theirs.append(b1 + b2)
    return speed(theirs, ours)


class Bench:
    "One target and its engines, one per mode that is asked for."
    def __init__(self, model, drafter, tokens, tmp, last): # last: when to begin nothing new
        self.model, self.drafter, self.n, self.tmp, self.last, self.engines, self.inexact = model, drafter, tokens, tmp, last, {}, {}

    def engine(self, mode):
        if mode not in self.engines:
            more = dict(drafter='none') if mode in ('ar_batch', 'cooperative') else dict(drafter=self.drafter) | (dict(draft_block_size=4) if self.model else {})
            if mode == UNPINNED: more['spec_entry_pin'] = 0
            load = partial(Engine.load, self.model, scheduler_mode='mtp_batch' if mode == UNPINNED else mode, cache_dir=self.tmp, prefix_cache_bytes=0)
            try: e = load(**more, **self.inexact)
            except ConfigError as why: # blocks are not exact here
                print(f'  {why} Drafts run all the same.', flush=True)
                self.inexact = dict(exactness='off', mtp_allow_inexact=True)
                e = load(**more, **self.inexact)
            self.engines[mode] = e
            t0, k = time.perf_counter(), 1 if mode == 'ar_batch' else e._plan.k
            def learn(company, end): # the widths that are measured first
                for w in (8, 4, 2, 7, 3, 6, 5):
                    for _ in company.learn(w, k):
                        if time.perf_counter() > end: return
            if company := getattr(e._floor.mode, 'company', None): e.call(learn, company, t0 + .4 * (self.last - t0))
            print(f'  {mode} is ready; shapes of batches were tried in {time.perf_counter() - t0:.1f} s (once per machine)', flush=True)
        return self.engines[mode]

    def close(self):
        for e in self.engines.values(): e.close()

    def while_time(self, what, things):
        "Each of them, as long as there is time."
        for x in things:
            if time.perf_counter() < self.last: yield x
            else: print(f'  {what}, {x}: not measured, the time is over', flush=True)

    def encode(self, texts):
        e = self.engine('ar_batch')
        return [e.encode([dict(role='user', content=t)] if e.chat.has_template else t) for t in texts]

    def ours(self, mode, prompts, said=None):
        "Seconds for all requests."
        e, t0 = self.engine(mode), time.perf_counter()
        jobs = [e.submit(p, Params(max_tokens=self.n, ignore_eos=True)) for p in prompts]
        out = [j.future.result() for j in jobs]
        took = time.perf_counter() - t0
        if said is not None: said[mode] = [[t.id for t in r.tokens] for r in out], out[0].stats.level, [f'{r.stats.accepted}/{r.stats.drafted}' for r in out]
        return took

    def theirs(self, prompts, said=None):
        e, n = self.engine('ar_batch'), self.n
        def go():
            t0 = time.perf_counter()
            g = BatchGenerator(e._target.model, max_tokens=n, completion_batch_size=8, prefill_batch_size=8)
            uids = g.insert(prompts)
            out = {u: [] for u in uids}
            while any(len(o) < n for o in out.values()):
                for r in g.next()[1]: out[r.uid].append(r.token)
            took = time.perf_counter() - t0
            g.close()
            if said is not None: said['lm'] = [out[u] for u in uids]
            return took
        return e.call(go)

    def plain(self, seconds):
        "ar_batch beside BatchGenerator, whole requests of short prompts."
        out, prompts = {}, self.encode(ASKS)
        for width in self.while_time('ar_batch / BatchGenerator', (4, 8)):
            some, said = prompts[:width], {}
            self.ours('ar_batch', some, said), self.theirs(some, said) # warm, and shapes are tried
            ratio = turns(partial(self.ours, 'ar_batch', some), partial(self.theirs, some), seconds / 2, self.last)
            ours, level, _ = said['ar_batch']
            out[width] = dict(ratio=asdict(ratio), level=level, same=sum(a == b for a, b in zip(ours, said['lm'], strict=True)))
            print(f'  ar_batch / BatchGenerator, {width} requests: {ratio}, level {level}, same text in {out[width]["same"]} of {width}', flush=True)
        return out

    def drafts(self, mode, seconds, widths):
        "mtp_batch beside ar_batch."
        out = {}
        prompts = self.encode(ASKS if self.drafter == 'head' else [f'{i}. {COPY}' for i in range(8)])
        for width in self.while_time(f'{mode} / ar_batch', widths):
            some, said = prompts[:width], {}
            self.ours('ar_batch', some, said), self.ours(mode, some, said)
            ratio = turns(partial(self.ours, mode, some), partial(self.ours, 'ar_batch', some), seconds / len(widths), self.last)
            self.ours(mode, some, said)
            same = sum(a == b for a, b in zip(said['ar_batch'][0], said[mode][0], strict=True))
            out[width] = dict(ratio=asdict(ratio), level=said[mode][1], same=same, accepted=said[mode][2])
            print(f'  {mode} / ar_batch, {width} requests: {ratio}, level {out[width]["level"]}, same {same}, accepted {" ".join(said[mode][2])}', flush=True)
        print('   ', {k: v for k, v in self.engine(mode).snapshot()['speculation']['gate'].items() if k in ('arm', 'k', 'steps', 'looks', 'switches')}, flush=True)
        return out

    def cadence(self, prompt_tokens=1500):
        "Gaps of a running request while a long prompt is read, in chunks of it."
        e = self.engine('cooperative')
        chunk = e.settings.prefill_chunk_tokens
        run, long = e.encode('Once upon a time there was'), e.encode(LONG)[:prompt_tokens]
        a, gaps = Trace('run', time.perf_counter()), None
        job = e.submit(run, Params(max_tokens=2000, ignore_eos=True), lambda c: a.note(c, time.perf_counter()))
        while len(a.steps) < 8: time.sleep(.005)
        t0 = time.perf_counter()
        other = e.submit(long, Params(max_tokens=1, ignore_eos=True))
        other.future.result()
        t1 = time.perf_counter()
        job.cancel()
        gaps = [y - x for (x, _), (y, _) in zip(a.steps, a.steps[1:], strict=False) if y > t0 and x < t1]
        one = other.stats.prefill_s / math.ceil((len(long) - 1) / chunk)
        out = dict(prompt=len(long), chunk=chunk, p99=round(percentile(gaps, .99) / one, 2), most=round(max(gaps) / one, 2), tokens=len(gaps))
        print(f'  cooperative, {len(long)} tokens are read beside a running request: 99 % of its gaps up to {out["p99"]} chunks, the longest {out["most"]} ({len(gaps)} tokens)', flush=True)
        return out

    def behind(self, mode):
        "A short request behind one of 400 tokens, and how soon its last frame comes."
        e, when = self.engine(mode), {}
        long, short = self.encode(('Tell a long story.', 'Spell the word garden.'))
        a, b = Trace('long', time.perf_counter()), Trace('short', 0.)
        j = e.submit(long, Params(max_tokens=400, ignore_eos=True), lambda c: a.note(c, time.perf_counter()))
        while len(a.steps) < 4: time.sleep(.005)
        b.asked = time.perf_counter()
        k = e.submit(short, Params(max_tokens=12, ignore_eos=True), lambda c: b.note(c, time.perf_counter()))
        k.future.add_done_callback(lambda f: when.setdefault('done', time.perf_counter()))
        k.future.result()
        seen = len(a.tokens)
        j.cancel()
        out = dict(first_s=round(b.first, 3), long_had=seen, before_its_end=seen < 400, end_steps=round((when['done'] - b.steps[-1][0]) / statistics.median(b.gaps), 3))
        print(f'  {mode}: a short request behind a long one has its first token after {b.first:.2f} s, its end when the long one is at {seen} of 400; '
              f'its last frame {out["end_steps"]} steps after its last token', flush=True)
        return out


def measure(name, model, drafter, tokens, widths, seconds, tmp):
    print(f'{name}, {tokens} tokens per request', flush=True)
    bench = Bench(model, drafter, tokens, tmp, time.perf_counter() + seconds)
    try:
        for mode in ('mtp_batch', *SHARED, UNPINNED): bench.engine(mode) # the others find on disk what the first has tried
        out = dict(cadence=bench.cadence(), behind={m: bench.behind(m) for m in SHARED})
        return out | dict(plain=bench.plain(seconds * .3), drafts={m: bench.drafts(m, seconds * .2, widths) for m in ('mtp_batch', UNPINNED)})
    finally: bench.close()


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--minutes', type=float, default=7.)
    p.add_argument('--model')
    p.add_argument('--drafter', default='lookup', help='of --model')
    p.add_argument('--only', choices=('demo', 'model'))
    p.add_argument('--json')
    a = p.parse_args()
    print(f'{date.today()}, mlxspec {mlxspec.__version__}, BLAS {blas.report().label}', flush=True)
    jobs = dict(demo=(None, 'head', 64, (8, 4, 2, 1)), model=(a.model, a.drafter, 16, (8, 4, 2)) if a.model else None)
    jobs = {k: v for k, v in jobs.items() if v and a.only in (None, k)}
    with tempfile.TemporaryDirectory() as tmp:
        out = {k: measure(k, *v, seconds=a.minutes * 60 / len(jobs), tmp=tmp) for k, v in jobs.items()}
    if a.json:
        with open(a.json, 'w') as f: json.dump(out, f, indent=1)


if __name__ == '__main__': main()
