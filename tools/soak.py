"""A bounded soak of a real server on the loopback device: clients that ask, leave and send nonsense, an engine that fails now and then.

    python tools/soak.py [--minutes 10] [--clients 8] [--mode mtp_batch] [--seed 1]

It prints a JSON summary, and ends with 1 when a bound was not kept: every whole answer is the one that was given before the trouble
began, no failure that was not made on purpose, no memory, descriptor or thread more at the end than at the beginning, no request alive
when nobody asks, and a /health whose numbers agree with what the clients have seen."""
import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

CHAT, TEXTS = '/v1/chat/completions', '/v1/completions'
PLACES, QUEUE, DEADLINE_S = 4, 6, 5.0
MEMORY, DISK = 8_000_000, 16_000_000 # bytes of the prefix store
STUMBLE = 'please stumble' # the listener of a request with these words fails at its third token
BAD = 1279 # the demo pair's last token, which nobody says: it leads to no numbers


# ---- the server: a process of its own, whose engine fails on purpose once SIGUSR2 came; SIGUSR1: say what is alive

class Injected(ValueError): pass
class InjectedMemory(MemoryError): pass


class Faults:
    "What goes wrong, how often, and for how many requests."
    def __init__(self, seed): self.rng, self.on, self.count = random.Random(seed), False, Counter()

    def strike(self, name, p, hit=1, e=InjectedMemory):
        if not self.on or self.rng.random() >= p: return
        self.count[name] += hit
        raise e('on purpose')

    def wrap(self, home, name, p, hit=lambda *args: 1, e=InjectedMemory):
        "A function of a module, or a method, that raises now and then before it does anything."
        fn = getattr(home, name)
        def struck(*args, **kwargs):
            self.strike(name, p, hit(*args), e)
            return fn(*args, **kwargs)
        setattr(home, name, struck)

    def load(self, settings):
        "The demo pair, or what is left of it."
        import mlx.core as mx

        from mlxspec import batch, hyper, rounds, serving
        from mlxspec.target import body_of
        engine = serving.load_model(settings)
        for home in (batch, hyper): self.wrap(home, 'say_all', .002, len)   # a forward for all of them
        for name in ('launch', 'verify_step'): self.wrap(rounds, name, .002)
        for d in engine._plan.drafters.made: self.wrap(d, 'propose', .01, e=Injected) # no request notices
        embed, submit, decode = engine.call(body_of, engine._target.model).embed_tokens, engine.submit, engine.chat.tokenizer.decode
        read = type(embed).__call__
        embed.__class__ = type(type(embed).__name__, (type(embed),), {'__call__': lambda self, ids: mx.where((ids == BAD)[..., None], mx.nan, read(self, ids))})

        def stumbling(prompt, params, on_chunk=None):
            n = 0
            def listener(chunk):
                nonlocal n
                n += 1
                if n == 3:
                    self.count['listener'] += 1
                    raise Injected('on purpose')
                on_chunk(chunk)
            return submit(prompt, params, listener if STUMBLE in decode(prompt) else on_chunk)

        engine.submit = stumbling
        self.engine = engine
        return engine

    def report(self, *_):
        "Who is alive, on standard output."
        import gc

        from mlxspec import answer, engine, feed, host, metrics, rounds, sequence
        from mlxspec.drafters import base
        self.engine.call(int) # the owner has let go of the last one
        gc.collect()
        kinds = answer.Request, answer.Seat, rounds.Running, sequence.Sequence, base.Guest, engine.Job, host.Turn, feed.Feed, metrics.Entry
        alive = Counter(type(o).__name__ for o in gc.get_objects() if isinstance(o, kinds))
        print(json.dumps(dict(alive=dict(alive), faults=dict(self.count))), flush=True)


def serve(argv):
    from mlxspec import cli, serving
    faults = Faults(int(argv[0]))
    signal.signal(signal.SIGUSR1, faults.report)
    signal.signal(signal.SIGUSR2, lambda *_: setattr(faults, 'on', not faults.on))
    serving.serve(cli.load_settings(cli.parse(['serve', *argv[1:]])[2]), faults.load)


# ---- HTTP, small

def unchunked(raw):
    "The data in a chunked body; None when its end is missing."
    out = []
    while (cut := raw.find(b'\r\n')) >= 0:
        if (n := int(raw[:cut], 16)) == 0: return b''.join(out)
        out.append(raw[cut + 2:cut + 2 + n])
        raw = raw[cut + n + 4:]
    return None


async def ask(port, path, body=None, leave=None): # leave: seconds after which the client hangs up -> status, headers, body; status 0: left, or cut off
    "One request on a connection of its own."
    r, w = await asyncio.open_connection('127.0.0.1', port, limit=1 << 24)
    raw = b'' if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = b'' if body is None else b'Content-Type: application/json\r\nContent-Length: %d\r\n' % len(raw)
    try:
        w.write(b'%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%s\r\n' % (b'GET' if body is None else b'POST', path.encode(), kind) + raw)
        try: got = await asyncio.wait_for(r.read(), leave or 120)
        except TimeoutError:
            if leave: return 0, {}, b''
            raise
    finally: w.close()
    head, _, body = got.partition(b'\r\n\r\n')
    status, *lines = head.decode('latin-1').split('\r\n')
    headers = {k.lower(): v for k, _, v in (x.partition(': ') for x in lines)}
    if headers.get('transfer-encoding') == 'chunked': body = unchunked(body)
    return (0, headers, b'') if body is None else (int(status.split()[1]), headers, body)


def said(body, stream): # -> what must always be the same, tokens, cached tokens; None, code: an error came
    "What an answer says."
    if not stream:
        d = json.loads(body)
        u = d['usage']
        return [[c.get('message', c.get('text')), c.get('logprobs'), c['finish_reason']] for c in d['choices']], u['completion_tokens'], u['prompt_tokens_details']['cached_tokens']
    text, finish, usage = '', None, None
    for line in body.decode().split('\n\n'):
        if not line.startswith('data: ') or line == 'data: [DONE]': continue
        d = json.loads(line[6:])
        if 'error' in d: return None, d['error']['code'], 0
        for c in d['choices']:
            text += c['delta'].get('content') or ''
            finish = c['finish_reason'] or finish
        usage = d.get('usage') or usage
    return [text, finish], usage['completion_tokens'], usage['prompt_tokens_details']['cached_tokens']


# ---- what is asked

SMALL = ('Count from {} to 20.', 'Spell the word garden.', 'What day comes after Monday?', 'Copy this: red green blue red green {}.', 'Tell a story of {} foxes.')


def bodies(rng, n):
    "Requests of many kinds; their answers depend on nothing but themselves."
    out = []
    for i in range(n):
        more = dict(seed=i, max_tokens=rng.choice((8, 24, 60)), temperature=(0, .7, 1.2)[i % 3])
        if i % 5 == 1: more |= dict(frequency_penalty=.6, presence_penalty=.2)
        if i % 5 == 2: more |= dict(logprobs=True, top_logprobs=2)
        if i % 5 == 3: more |= dict(stop=['1', ' b'])
        if i % 5 == 4: more |= dict(top_p=.9, top_k=40, max_tokens=100)
        text = SMALL[i % len(SMALL)].format(i)
        if i == 5: text = ' '.join(f'{j} red green blue' for j in range(60)) + ' Copy the first words.' # some chunks of prompt
        out.append(dict(messages=[dict(role='user', content=text)]) | more)
    return out


async def talk(port, turns=4):
    "A conversation, turn by turn: bodies and what was answered."
    messages, out = [dict(role='system', content='Answer briefly. ' * 20)], []
    for i in range(turns):
        messages = [*messages, dict(role='user', content=SMALL[i % len(SMALL)].format(i))]
        body = dict(messages=messages, max_tokens=24, seed=3)
        status, _, got = await ask(port, CHAT, body)
        assert status == 200, got
        out.append(body)
        messages = [*messages, dict(role='assistant', content=json.loads(got)['choices'][0]['message']['content'])]
    return out


# ---- the clients

class Soak:
    "The state of one soak, seen from outside."
    def __init__(self, port, process, a):
        import psutil
        self.port, self.a, self.rng, self.server = port, a, random.Random(a.seed), psutil.Process(process.pid)
        self.pool, self.want, self.n, self.broken, self.samples, self.health = [], [], Counter(), [], [], {}
        self.end, self.quiet_until = 0., 0.

    def wrong(self, why, *details):
        self.n['wrong'] += 1
        if len(self.broken) < 20: self.broken.append(f'{why}: {" ".join(map(str, details))}'[:500])

    async def learn(self):
        "Ask for everything once, alone; then for the first of it in every number that may come together, so that the machine is probed."
        self.pool = bodies(self.rng, 20 if self.a.minutes >= 1 else 6) + await talk(self.port)
        for body in self.pool:
            status, _, got = await ask(self.port, CHAT, body)
            assert status == 200, got
            self.want.append(said(got, False)[:2])
        for n in range(2, PLACES + 1):
            for _, _, got in await asyncio.gather(*(ask(self.port, CHAT, self.pool[0] | dict(max_tokens=60, ignore_eos=True)) for _ in range(n))): assert b'choices' in got

    def shaped(self, body, stream): return body | (dict(stream=True, stream_options=dict(include_usage=True)) if stream else {})

    async def good(self):
        i, stream = self.rng.randrange(len(self.pool)), self.rng.random() < .5
        self.n['asked'] += 1
        self.judge(await ask(self.port, CHAT, self.shaped(self.pool[i], stream)), i, stream)

    def judge(self, answer, i, stream):
        "A good request: its answer, or a good reason to come back later; a failure only as often as failures are made."
        status, headers, got = answer
        if status in (429, 503): return self.refused(status, headers, got)
        if status == 500: return self.failed(json.loads(got)['error']['code'])
        if status != 200: return self.wrong('no answer', status, headers, got)
        what, tokens, cached = said(got, stream)
        if what is None: return self.failed(tokens) if tokens != 'queue_timeout' else self.n.update([tokens])
        self.n.update(whole=1, tokens=tokens, cached=cached, warm=cached > 0)
        want = self.want[i]
        if stream: want = [want[0][0][0]['content'], want[0][0][2]], want[1]
        if (what, tokens) != want: self.wrong('another answer', i, stream, what, want)

    def refused(self, status, headers, got):
        code = json.loads(got)['error']['code']
        self.n[code] += 1
        if code not in ('queue_full', 'queue_timeout') or int(headers.get('retry-after', 0)) < 1: self.wrong('refused', status, headers, got)

    def failed(self, code):
        self.n['struck'] += 1
        if code != 'out_of_memory': self.wrong('failed', code)

    async def leave(self):
        "Hang up: in the queue, while the prompt is read, before the first token, or later."
        i, stream = self.rng.randrange(len(self.pool)), self.rng.random() < .5
        self.n['asked'] += 1
        answer = await ask(self.port, CHAT, self.shaped(self.pool[i], stream) | dict(max_tokens=400, ignore_eos=True), self.rng.choice((.001, .01, .05, .2, 1.)))
        self.n['left' if answer[0] == 0 else 'too late'] += 1

    async def stumble(self):
        self.n['asked'] += 1
        stream = self.rng.random() < .5
        status, headers, got = await ask(self.port, CHAT, self.shaped(dict(messages=[dict(role='user', content=f'Count from 1 to 90, {STUMBLE}.')], max_tokens=60, ignore_eos=True), stream))
        if status in (429, 503): self.refused(status, headers, got)
        elif status == 500 or b'"error"' in got: self.n['told'] += 1
        else: self.wrong('a stumble was not told', status, got)

    async def no_numbers(self):
        self.n['asked'] += 1
        status, headers, got = await ask(self.port, TEXTS, dict(prompt=[40, 41, BAD, 42], max_tokens=9))
        if status in (429, 503): self.refused(status, headers, got)
        elif status == 500 and json.loads(got)['error']['code'] in ('numerical_error', 'out_of_memory'): self.n['told'] += 1
        else: self.wrong('numbers out of nothing', status, got)

    async def nonsense(self):
        self.n['nonsense'] += 1
        status, headers, got = await ask(self.port, CHAT, self.rng.choice((b'{', b'[]', b'{"messages": 3}', dict(messages=[dict(role='user', content='a')], temperature=-1))))
        if status == 429: self.refused(status, headers, got) # who has no place is not even read
        elif status != 400: self.wrong('nonsense was taken', status, got)

    async def burst(self): await asyncio.gather(*(self.good() for _ in range(8)))

    async def client(self):
        acts = dict(good=60, leave=15, stumble=4, no_numbers=3, nonsense=6, burst=2)
        while (now := time.monotonic()) < self.end:
            if now < self.quiet_until: await asyncio.sleep(self.quiet_until - now)
            await getattr(self, self.rng.choices(list(acts), list(acts.values()))[0])()
            await asyncio.sleep(self.rng.random() * .1)

    async def conduct(self):
        "Now and then nobody asks for a moment, so that idle work has its turn."
        while time.monotonic() < self.end:
            await asyncio.sleep(min(15., self.a.minutes * 20))
            self.quiet_until = time.monotonic() + 1.5

    async def look(self):
        "Memory, descriptors, threads, and whether /health can be true."
        s, t0 = self.server, time.monotonic()
        with s.oneshot(): row = dict(rss=s.memory_info().rss, fds=s.num_fds(), threads=s.num_threads())
        h = self.truthful(json.loads((await ask(self.port, '/health'))[2]))
        metrics = (await ask(self.port, '/metrics'))[2].decode()
        row |= dict(t=t0, active=float(re.search(r'^mlxspec:mlx_active_memory_bytes (\S+)', metrics, re.M)[1]) - h['prefix']['bytes'])
        self.samples.append(row)
        return row

    def truthful(self, h):
        s, before = h['scheduler'], self.health.get('scheduler')
        ok = s['mode'] == self.a.mode and 0 <= s['running'] <= PLACES and s['running'] + s['queue_depth']['foreground'] <= PLACES + QUEUE and s['owner']['alive']
        ok &= s['active_lane'] in 'idle prefill plain mtp plain_batch mtp_batch cohort hyper'.split()
        ok &= all(1 <= int(w) <= PLACES for w in s['batch_histogram']) and h['prefix']['bytes'] <= MEMORY
        for get in (lambda s: s['completed']['foreground'], lambda s: s['failed'], lambda s: s['cancelled'], lambda s: s['waits']['count'], lambda s: sum(s['batch_histogram'].values())):
            ok &= before is None or get(s) >= get(before)
        if not ok: self.wrong('/health', json.dumps(s))
        self.health = h
        return h

    async def watch(self):
        while time.monotonic() < self.end:
            await self.look()
            await asyncio.sleep(max(.2, self.a.minutes / 10))

    async def idle(self):
        "Wait until the server has nothing to do."
        last = time.monotonic() + 60
        while time.monotonic() < last:
            h = json.loads((await ask(self.port, '/health'))[2])
            s = h['scheduler']
            if not s['running'] and not any(s['queue_depth'].values()) and s['owner']['beat_age_s'] < 5: return h
            await asyncio.sleep(.1)
        self.wrong('never idle', json.dumps(h))

    async def run(self, before):
        "All of it. before: called between the first answers and the trouble."
        await self.learn()
        await self.idle()
        first = await self.look()
        before()
        self.end = time.monotonic() + self.a.minutes * 60
        crowd = [asyncio.create_task(f) for f in (*(self.client() for _ in range(self.a.clients)), self.conduct(), self.watch())]
        for t in crowd: await t
        before()
        self.truthful(await self.idle())
        return first, await self.look()


def growth(samples, key):
    "How much more there is in the last fifth of the time than after the first fifth."
    n = len(samples)
    middle = lambda rows: statistics.median(r[key] for r in rows)
    return middle(samples[-max(1, n // 5):]) / middle(samples[n // 5:2 * n // 5 or 1]) - 1


def check(soak, first, last, told):
    "The bounds, one by one."
    n, s, faults = soak.n, soak.health['scheduler'], told['faults']
    struck = sum(faults.get(k, 0) for k in ('say_all', 'launch', 'verify_step')) # requests in forwards that found no memory
    ended = s['completed']['foreground'] + s['failed'] + s['cancelled']
    before = len(soak.want) + 4 + sum(range(2, PLACES + 1)) + 1 # asked by `learn`, and to warm up
    alone = n['asked'] + n['nonsense'] - n['queue_full']
    bounds = dict(
        answers=n['wrong'] == 0, someone_was_served=n['whole'] > 0, alive=not told['alive'], failures=n['struck'] <= struck,
        descriptors=last['fds'] <= first['fds'] + 2, threads=last['threads'] <= first['threads'] + 8,
        rss=soak.a.minutes < 1 or growth(soak.samples, 'rss') <= .03, # a short one has not seen everything yet
        active=last['active'] <= first['active'] * 1.02 + .05 * soak.health['prefix']['bytes'] + 1e5, # allocations are rounded up
        completed=s['completed']['foreground'] >= n['whole'] + before, ended=ended <= alone + before and s['failed'] >= n['told'] + n['struck'] - n['queue_timeout'],
        cancelled=s['cancelled'] <= n['left'] + n['too late'] + n['queue_timeout'])
    return bounds


def summary(soak, first, last, told):
    bounds, s, span = check(soak, first, last, told), soak.health['scheduler'], soak.samples
    mb = lambda b: round(b / 1e6, 1)
    return dict(mode=soak.a.mode, minutes=soak.a.minutes, clients=soak.a.clients, seed=soak.a.seed, requests=dict(soak.n), faults=told['faults'], alive=told['alive'],
                rss_mb=[mb(first['rss']), mb(max(r['rss'] for r in span)), mb(last['rss'])], rss_growth=round(growth(span, 'rss'), 4),
                active_mb=[mb(first['active']), mb(max(r['active'] for r in span)), mb(last['active'])],
                fds=[first['fds'], max(r['fds'] for r in span), last['fds']], threads=[first['threads'], max(r['threads'] for r in span), last['threads']],
                health={k: s[k] for k in ('completed', 'failed', 'cancelled', 'waits', 'batch_histogram', 'rows_histogram', 'drops')}, prefix=soak.health['prefix'],
                broken=[k for k, ok in bounds.items() if not ok] + soak.broken)


def main():
    p = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    p.add_argument('--minutes', type=float, default=10)
    p.add_argument('--clients', type=int, default=8)
    p.add_argument('--mode', default='mtp_batch')
    p.add_argument('--seed', type=int, default=1)
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as cache, open(Path(cache)/'log', 'w+') as log:
        args = [sys.executable, __file__, 'serve', str(a.seed), '--port', '0', '--scheduler-mode', a.mode, '--max-queue', str(QUEUE), '--queue-timeout-s', str(DEADLINE_S),
                '--max-active-requests', str(PLACES), '--prefill-chunk-tokens', '128', '--prefix-cache-bytes', str(MEMORY), '--prefix-disk-bytes', str(DISK)]
        server = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | dict(MLXSPEC_CACHE_DIR=cache))
        try:
            port = int(re.search(r':(\d+)/v1$', server.stdout.readline())[1])
            soak = Soak(port, server, a)
            first, last = asyncio.run(soak.run(lambda: server.send_signal(signal.SIGUSR2)))
            server.send_signal(signal.SIGUSR1)
            told = json.loads(server.stdout.readline())
        finally: server.terminate()
        server.communicate(timeout=30)
        out = summary(soak, first, last, told)
        if server.returncode: out['broken'].append(f'exit code {server.returncode}')
        log.seek(0)
        if out['broken']: sys.stderr.write(log.read()[-8000:])
    print(json.dumps(out, indent=1))
    return int(bool(out['broken']))


if __name__ == '__main__':
    if sys.argv[1:2] == ['serve']: serve(sys.argv[2:])
    else: sys.exit(main())
