"""Options that people bring from mlx-lm: packed keys and values, a ring, an adapter. The text is mlx-lm's with the same option, with
drafts or without, and what cannot be is refused by name."""
import harness as h
import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step
from mlx_lm.models import base
from mlx_lm.models.cache import QuantizedKVCache

from mlxspec.config import Settings
from mlxspec.core import Cancelled, ConfigError, ModelError
from mlxspec.device import detect
from mlxspec.drafters.lookup import Lookup
from mlxspec.engine import Engine
from mlxspec.exactness import Exactness, finish
from mlxspec.host import fingerprint
from mlxspec.kv import KV
from mlxspec.pairing import make_exactness
from mlxspec.target import Target
from mlxspec.tiny import byte_tokenizer, save_tiny, save_tiny_adapter, tiny_model

pytestmark = pytest.mark.usefixtures('quiet')
WIDE = dict(head_dim=64, seed=3)


Q4 = KV(4)
def target(kind='llama', kv=Q4, **changes): return Target(tiny_model(kind, **WIDE | changes), byte_tokenizer(), {}, kind, kv=kv)
def said(t, ids, n=h.N, **kw): return [x for x, _ in generate_step(mx.array(ids), t.model, max_tokens=n, **kw)]
def packed(kv): return dict(kv_bits=kv.bits, kv_group_size=kv.group, quantized_kv_start=0)


# ---- packed keys and values

@pytest.mark.parametrize('kind, kv', [('llama', KV(4)), ('qwen3', KV(8)), ('qwen3_5', KV(4, 32))], ids=lambda x: getattr(x, 'mode', x))
def test_packed_text_is_mlx_lms_and_drafts_do_not_change_it(kind, kv):
    t = target(kind, kv)
    for text in h.PROMPTS: # the first is a single token: its first step finds an empty cache
        ids = t.tokenizer.encode(text)
        plain = h.run(t, ids)
        assert plain.output == said(t, ids, **packed(kv)), text
        for name, k in (('oracle', 5), ('half', 3), ('liar0', 4), ('liar2', 6), ('lookup', 8)):
            r = h.run(t, ids, k, [h.drafter(name, t, plain.output)])
            assert r.output == plain.output, (text, name)
            h.adds_up(r)
            if name == 'oracle': assert r.stats.rounds and r.stats.accepted
            if len(ids) == 1 and name != 'lookup': assert r.stats.reasons['cache_not_trimmable'] == 1


def test_packing_is_no_small_thing():
    "Were the first chunk packed before it is looked at, or nothing packed at all, the tests above would notice."
    t = target()
    ids = t.tokenizer.encode(h.PROMPTS[2])
    ours = h.run(t, ids).output
    assert ours != said(t, ids) and ours != said(t, ids, prompt_cache=[QuantizedKVCache(64, 4) for _ in t.model.layers])


def test_chunks_are_mlx_lms(monkeypatch):
    "The first chunk sees numbers, later ones see packed rows."
    t, kv = target(), KV(4)
    ids = t.tokenizer.encode(h.PROMPTS[2])
    whole = h.run(t, ids).output
    small = h.prefill_step
    monkeypatch.setattr(h, 'prefill_step', lambda t, r: small(t, r, 7))
    ours = h.run(t, ids).output
    assert ours == said(t, ids, prefill_step_size=7, **packed(kv)) != whole


def test_the_probe_runs_on_packed_rows(monkeypatch):
    "Attention over packed rows that says something else in a block is found, and made exact row by row."
    inside = base.quantized_scaled_dot_product_attention
    def odd(queries, *args, **kw):
        out = inside(queries, *args, **kw)
        return out * (1 + 1e-6) if queries.shape[-2] > 1 else out
    t = target()
    for attention, way in ((inside, 'block'), (odd, 'row_attention')):
        monkeypatch.setattr(base, 'quantized_scaled_dot_product_attention', attention)
        x = Exactness(t, 2)
        finish(x.probe())
        assert x.summary()['strategy'] == way and x.level(2, 100) == 'identical', x.trials


def test_a_probe_that_nobody_waits_for():
    "Ctrl-C while an engine starts does not wait for the last width."
    t = target()
    steps = iter([False, False, True])
    with pytest.raises(Cancelled): make_exactness(t, (Lookup(),), detect(), Settings(), lambda: next(steps))
    assert next(steps, None) is None


# ---- a ring

def test_a_ring_is_mlx_lms_and_drafts_end_where_it_comes_round():
    t = target('qwen3', KV(most=64))
    ids = t.tokenizer.encode(h.PROMPTS[2])
    plain = h.run(t, ids, max_tokens=90)
    assert plain.output == said(t, ids, 90, max_kv_size=64) != said(t, ids, 90)
    for name, k in (('oracle', 5), ('half', 4), ('liar1', 8), ('lookup', 8)):
        r = h.run(t, ids, k, [h.drafter(name, t, plain.output)], max_tokens=90)
        assert r.output == plain.output and r.stats.reasons['cache_not_trimmable'], name
        if name == 'oracle': assert r.stats.accepted
    x = Exactness(t, 4)
    finish(x.probe(need=4000))
    assert max(x.table.known) <= 56 and x.level(4, 40) == 'identical' and x.max_width(60) == 1


@pytest.mark.parametrize('kind, kv, why', [
    ('gemma3', KV(8), 'gemma3 has a sliding window among its caches, which cannot be packed'), ('gemma2', KV(8), 'gemma2 does not run like this'),
    ('llama', KV(most=64), 'llama makes its caches itself'), ('qwen3', KV(8, 128), 'kv_group_size = 64 would'), ('qwen3', KV(8, most=99), 'exclude each other')])
def test_what_cannot_be_is_refused_by_name(kind, kv, why):
    with pytest.raises(ConfigError, match=why): target(kind, kv)


# ---- an engine

def asked(path, prompt=h.PROMPTS[2] * 9, **options):
    "Two answers of an engine: with drafts, and without; then what it is."
    with Engine.load(path, **dict(mtp_gate='force', max_tokens=16, draft_block_size=3, prefix_cache_bytes=0) | options) as e:
        r, plain = e.generate(prompt, ignore_eos=True), e.generate(prompt, ignore_eos=True, speculate=False)
        assert [t.id for t in r.tokens] == [t.id for t in plain.tokens]
        again = e.generate(prompt, ignore_eos=True) if options.get('prefix_cache_bytes') else r
        assert again.text == r.text
        return r, fingerprint(e, 'serial'), again


def test_an_engine_with_packed_rows(tmp_path):
    path = save_tiny(tmp_path/'tiny', 'llama', **WIDE)
    options = dict(cache_dir=tmp_path/'cache', drafter='lookup')
    prints, texts = set(), set()
    for bits in (None, 4):
        r, fp, again = asked(path, kv_bits=bits, prefix_cache_bytes=1 << 24, **options)
        prints.add(fp), texts.add(r.text)
        assert r.stats.rounds and r.stats.level == 'identical' and again.stats.cached_tokens > 256
    assert len(prints) == len(texts) == 2
    assert len(list((tmp_path/'cache'/'exactness').glob('*.json'))) == 2 # both were probed
    for mode in ('ar_batch', 'mtp_batch', 'hyper'):
        with pytest.raises(ConfigError, match=f'^Mode {mode} cannot run with kv_bits = 4: .*serial and cooperative'):
            Engine.load(path, kv_bits=4, scheduler_mode=mode, **options)
    assert asked(path, kv_bits=4, scheduler_mode='cooperative', **options)[0].stats.rounds


def test_an_engine_with_a_ring(tmp_path):
    path = save_tiny(tmp_path/'tiny', 'qwen3', seed=3)
    r, fp, _ = asked(path, h.PROMPTS[2], max_kv_size=64, max_tokens=60, drafter='lookup')
    t = Target.load(path)
    assert [x.id for x in r.tokens] == said(t, t.tokenizer.encode(h.PROMPTS[2]), 60, max_kv_size=64)
    assert r.stats.reasons['exactness_context'] and r.stats.rounds # no width was proven exact that far


def test_an_engine_with_an_adapter(tmp_path):
    path, adapter = save_tiny(tmp_path/'tiny', 'llama'), save_tiny_adapter(tmp_path/'mine', 'llama')
    other = save_tiny_adapter(tmp_path/'other', 'llama', seed=9)
    options = dict(cache_dir=tmp_path/'cache', drafter='lookup')
    model, tokenizer = load(str(path), adapter_path=str(adapter))
    want = [x for x, _ in generate_step(mx.array(tokenizer.encode(h.PROMPTS[2])), model, max_tokens=16)]
    found = {}
    for a in (None, adapter, other):
        r, found[a], _ = asked(path, h.PROMPTS[2], adapter_path=a, **options)
        assert ([x.id for x in r.tokens] == want) == (a == adapter)
    assert len(set(found.values())) == 3 and len(list((tmp_path/'cache'/'exactness').glob('*.json'))) == 3
    with pytest.raises(ConfigError, match='adapter_path is for Engine.load'): Engine.from_model(model, tokenizer, adapter_path=adapter)


@pytest.mark.parametrize('spoil, says', [
    (lambda p: (p/'adapters.safetensors').unlink(), 'has no adapters.safetensors'), (lambda p: (p/'adapter_config.json').write_text('{'), 'does not fit tiny: '),
    (lambda p: (p/'adapter_config.json').write_text('{}'), 'does not fit tiny: '), (lambda p: (p/'adapters.safetensors').write_bytes(b'x'), 'does not fit tiny: '),
    (lambda p: save_tiny_adapter(p, 'llama', hidden_size=64), 'does not match model parameter shape .* more'), (lambda p: save_tiny_adapter(p, 'lfm2'), 'does not fit tiny')])
def test_an_adapter_of_something_else(spoil, says, tmp_path):
    path, adapter = save_tiny(tmp_path/'tiny', 'llama'), save_tiny_adapter(tmp_path/'mine', 'llama')
    spoil(adapter)
    with pytest.raises(ModelError, match=says) as e: Target.load(path, adapter=adapter)
    assert '\n' not in str(e.value) and str(e.value)[-1] == '.'
