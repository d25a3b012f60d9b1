"""A real server around an engine that does what the last message says; for tests and for tools/load.py.

    python tools/obedient.py --port 0 [--hurry] [options of `mlxspec serve`]

Words a message may begin with: `stream N MS` (N steps, MS milliseconds apart), `chorus N MS` (the same, but all such requests take
each step together, as a batch does), `flood` (a hundred large steps), `fail` and
`fail later` (an exception that quotes the prompt, before or after the first token), `memory`, `die` (the thread that computes
ends), `stall S` (one step of S seconds). Anything else is answered with the message itself and the seed."""
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

from mlxspec import cli, connection, edge, feed, scheduler, serving
from mlxspec.core import Cancelled, Chunk, Emitted, RequestError, RequestStats
from mlxspec.stand_in import StandIn, StandInJob, recite


def token(text): return Chunk(text, (Emitted(65, 'target'),), (text,))


def die():
    "End the owner's thread as an error in the scheduler would."
    def broken(*_, **__): raise RuntimeError('no more turns')
    scheduler.take = broken


def script(prompt, params):
    "What the engine does for a prompt."
    text = ''.join(map(chr, prompt))
    word, *rest = text.split() or ['']
    if word == 'stream':
        for _ in range(int(rest[0])): yield from (int(rest[1]) / 1e3, token('x'))
    elif word == 'flood': yield from [token('x' * 100_000)] * 100
    elif word == 'fail':
        if rest: yield from ('a', 'b')
        yield ValueError(f'cannot do {text!r}')
    elif word == 'memory': yield MemoryError(f'no room for {text!r}')
    elif word == 'die': yield from ('a', die, 'b')
    elif word == 'stall': yield from ('a', float(rest[0]), 'b')
    else: yield from (*text, str(params.seed), '.')


class Chorus:
    "Requests that take every step together."
    def __init__(self): self.parts, self.singing, self.lock = [], False, threading.Lock()

    def join(self, sched, ms, params, on_chunk):
        stats, future, stop = RequestStats(prompt_tokens=1, seed=params.seed), Future(), threading.Event()
        with self.lock:
            self.parts.append((recite((token('x'),) * params.max_tokens, params, stats, on_chunk), future, stop))
            first, self.singing = not self.singing, True
        if first: sched.submit_stepper(self.sing(ms))
        return StandInJob(params, stats, future, stop.set)

    def sing(self, ms):
        while self.more():
            if ms: time.sleep(ms / 1e3)
            for part in self.parts[:]:
                steps, future, stop = part
                if next(steps, None) and not stop.is_set(): continue
                self.parts.remove(part)
                if stop.is_set(): future.set_exception(Cancelled('The client went away.'))
                else: future.set_result(None)
            yield 'plain_batch'

    def more(self):
        with self.lock:
            self.singing = bool(self.parts)
            return self.singing


class Obedient(StandIn):
    "It has room for long prompts, and knows every character."
    vocab_size, context_length = 0x110000, 4096
    def __init__(self, settings):
        super().__init__(write=script, max_queue=settings.max_queue)
        self.chorus = Chorus()
    def submit(self, prompt, params, on_chunk, **more):
        if not all(0 <= t < self.vocab_size for t in prompt): raise RequestError('There are no such tokens.', 'prompt')
        word, *rest = ''.join(map(chr, prompt)).split() or ['']
        if word == 'chorus': return self.chorus.join(self.sched, int(rest[1]), replace(params, max_tokens=int(rest[0])), on_chunk)
        return super().submit(prompt, params, on_chunk, **more)


def main(argv):
    if '--hurry' in argv:
        argv.remove('--hurry')
        connection.HEAD_S = edge.BODY_S = feed.SLOW_S = .6
        feed.PING_S, serving.DRAIN_S, serving.LINGER_S = .2, .5, .3
    threading.excepthook = lambda args: None # the end of the owner's thread is what was asked for
    try: serving.serve(cli.load_settings(cli.parse(['serve', *argv])[2]), Obedient)
    except cli.MlxspecError as e: return cli.complain(str(e), e.exit_code)
    except KeyboardInterrupt: return 130
    return 0


if __name__ == '__main__': sys.exit(main(sys.argv[1:]))
