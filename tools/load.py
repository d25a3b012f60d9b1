"""A bounded load test of the server, on the loopback device: hundreds of sockets, an engine that fails, an engine that dies.

    python tools/load.py [--sockets 500]

Nothing is computed: the engine is scripted (tools/obedient.py), so what is measured is the server. It takes less than two minutes
and prints a table for the documentation."""
import argparse
import asyncio
import json
import platform
import re
import subprocess
import sys
import threading
import time
from datetime import date
from pathlib import Path

OBEDIENT = Path(__file__).with_name('obedient.py')


def start(*args):
    "A server, and its port."
    p = subprocess.Popen([sys.executable, str(OBEDIENT), '--port', '0', *args], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) # a pipe that nobody reads would fill
    return p, int(re.search(r':(\d+)/v1$', p.stdout.readline())[1])


def end(p):
    p.terminate()
    p.communicate(timeout=30)
    return p.returncode


async def ask(port, path, body=None): # -> status, bytes of the answer, seconds
    "One request on a connection of its own."
    t0 = time.perf_counter()
    r, w = await asyncio.open_connection('127.0.0.1', port)
    raw = b'' if body is None else json.dumps(body).encode()
    kind = b'' if body is None else b'Content-Type: application/json\r\nContent-Length: %d\r\n' % len(raw)
    w.write(b'%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%s\r\n' % (b'GET' if body is None else b'POST', path.encode(), kind) + raw)
    got = await r.read()
    w.close()
    return int(got.split()[1]), got, time.perf_counter() - t0


def chat(text, **more): return dict(messages=[dict(role='user', content=text)], max_tokens=10**6) | more


def percentile(xs, p): return sorted(xs)[min(len(xs) - 1, int(p / 100 * len(xs)))]


def probe(port):
    "From a process of its own, ask every few milliseconds whether the server lives, until somebody writes to it; then the times."
    times, over = [], threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    while not over.wait(.005):
        times.append(asyncio.run(ask(port, '/health/live'))[2])
        if len(times) == 1: print(flush=True)
    print(json.dumps(times))


async def crowd(port, n):
    "n sockets at once against 32 places, while one request is active and stays so; meanwhile somebody asks whether the server lives."
    active = asyncio.create_task(ask(port, '/v1/chat/completions', chat('stream 800 5', stream=True)))
    while not json.loads((await ask(port, '/health'))[1].partition(b'\r\n\r\n')[2])['scheduler']['running']: await asyncio.sleep(.01)  # noqa: ASYNC110 (another process changes it)
    watch = subprocess.Popen([sys.executable, __file__, '--probe', str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220 (once)
    await asyncio.to_thread(watch.stdout.readline)
    got = await asyncio.gather(*(ask(port, '/v1/chat/completions', chat('stream 4 5', stream=True)) for _ in range(n - 1)), active)
    alive = json.loads(watch.communicate('stop')[0])
    done, full = [g for g in got if g[0] == 200 and b'[DONE]' in g[1]], [g for g in got if g[0] == 429 and b'retry-after' in g[1].lower()]
    assert (len(done), len(full)) == (33, n - 33), (len(done), len(full))
    return (f'{n} sockets, 1 active and 32 waiting places', f'{len(done)} answered whole, {len(full)} got 429 with Retry-After',
            f'/health/live p50 {percentile(alive, 50) * 1e3:.0f} ms, p99 {percentile(alive, 99) * 1e3:.0f} ms, at most {max(alive) * 1e3:.0f} ms')


async def failures(port):
    "Requests that fail in three ways among good ones; the good ones do not change."
    choices = lambda g: json.dumps(json.loads(g[1].partition(b'\r\n\r\n')[2])['choices'])
    good = chat('hello', seed=1)
    first, n = choices(await ask(port, '/v1/chat/completions', good)), 0
    for _ in range(50):
        for word, code in (('fail', b'engine_error'), ('memory', b'out_of_memory')):
            status, got, _ = await ask(port, '/v1/chat/completions', chat(word))
            assert status == 500 and code in got
        _, got, _ = await ask(port, '/v1/chat/completions', chat('fail later', stream=True))
        assert b'"error"' in got and b'[DONE]' not in got
        assert choices(await ask(port, '/v1/chat/completions', good)) == first
        n += 1
    return 'target raises, memory is short, stream breaks', f'{3 * n} failures, each told once', f'{n} good requests between them, byte-identical'


async def death(p, port):
    "The thread that computes ends while a stream and 20 others wait."
    stream = ask(port, '/v1/chat/completions', chat('die', stream=True))
    got = await asyncio.gather(stream, *(ask(port, '/v1/chat/completions', chat('hello')) for _ in range(20)))
    slowest = max(g[2] for g in got)
    health = (await ask(port, '/health'))[0]
    p.communicate(timeout=30)
    assert b'engine_stalled' in got[0][1] and health == 503 and p.returncode == 70
    return 'owner thread dies', f'{len(got)} clients told within {slowest * 1e3:.0f} ms, none hangs', f'/health {health}, exit code {p.returncode}'


async def overhead(port, pid, streams, pause, tokens):
    """What the server adds to a token: CPU time of its process (user and system) over tokens, while an engine without work gives one
    token per step to each of several streams, `pause` milliseconds apart."""
    import psutil
    server = psutil.Process(pid)
    used = lambda: sum(server.cpu_times()[:2])
    await ask(port, '/v1/chat/completions', chat('stream 200 0', stream=True))
    before, t0 = used(), time.perf_counter()
    got = await asyncio.gather(*(ask(port, '/v1/chat/completions', chat(f'chorus {tokens} {pause}', stream=True)) for _ in range(streams)))
    n, cpu, wall = streams * tokens, used() - before, time.perf_counter() - t0
    assert all(b'[DONE]' in g[1] and g[1].count(b'"content":"x"') == tokens for g in got)
    pace = f'a step every {pause} ms' if pause else 'as fast as it goes'
    return (f'{streams} streams of {tokens} tokens, one per step, {pace}',
            f'{cpu / n * 1e6:.0f} us of CPU per token, engine stand-in and metrics included', f'{n / wall:.0f} tokens/s')


def main():
    a = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    a.add_argument('--sockets', type=int, default=500)
    a.add_argument('--probe', type=int, metavar='PORT', help=argparse.SUPPRESS)
    a = a.parse_args()
    if a.probe: return probe(a.probe)
    p, port = start()
    load = lambda *how: lambda: overhead(port, p.pid, *how)
    works = lambda: crowd(port, a.sockets), lambda: failures(port), load(8, 0, 2000), load(8, 4, 1000), load(1, 4, 1000)
    rows = []
    for work in works:
        rows.append(asyncio.run(work()))
        print(*rows[-1], sep=' | ', file=sys.stderr, flush=True)
    assert end(p) == 0
    rows.append(asyncio.run(death(*start())))
    print(f'{date.today()}, Python {platform.python_version()}, {platform.system()} {platform.machine()}\n\n| load | outcome | and |\n|---|---|---|')
    for row in rows: print('|', ' | '.join(row), '|')


if __name__ == '__main__': main()
