"""Rollback, kind by kind: random histories of blocks and commits against a rebuild from the kept tokens, every leaf compared."""
import random

import mlx.core as mx
import pytest

from mlxspec.cache import leaves, written
from mlxspec.target import Target
from mlxspec.tiny import byte_tokenizer, tiny_model

HISTORIES = 200 # blocks per kind


@pytest.fixture(scope='module', autouse=True)
def uncompiled(): mx.disable_compile()


def rebuild(target, ids):
    cache = target.make_cache()
    for t in ids: target.prefill(mx.array([[t]]), cache)
    return cache


def same(a, b):
    return [written(c) for c in a] == [written(c) for c in b] and all(
        mx.array_equal(x, y) for c, d in zip(a, b, strict=True) for x, y in zip(leaves(c), leaves(d), strict=True))


@pytest.mark.parametrize('kind', ('llama', 'gemma3', 'qwen3_5', 'lfm2'))
def test_random_histories(kind):
    target, rng = Target(tiny_model(kind), byte_tokenizer(), {}, kind), random.Random(kind)
    for _ in range(HISTORIES // 10):
        cache, kept = target.make_cache(), [rng.randrange(264) for _ in range(rng.choice([1, 5, 14, 20]))]
        target.prefill(mx.array([kept]), cache)
        for _ in range(10): # ten blocks per cache: one history goes on
            block = [rng.randrange(264) for _ in range(rng.randint(1, 8))]
            keep = rng.randint(0, len(block))
            with target.transaction(cache, len(block)) as txn:
                txn.forward(mx.array([block]))
                txn.commit(keep)
            kept += block[:keep]
        assert same(cache, rebuild(target, kept)), kept
    assert target.rollback == dict(llama='trim', gemma3='trim', qwen3_5='replay', lfm2='reread')[kind]


@pytest.mark.parametrize('kind', ('gemma3', 'qwen3_5'))
def test_reading_again_is_right_too(kind):
    "The fallback for unknown recurrences, on models that have a cheaper way."
    target = Target(tiny_model(kind), byte_tokenizer(), {}, kind)
    target.rollback = 'reread'
    cache, kept = target.make_cache(), list(range(1, 20))
    target.prefill(mx.array([kept]), cache)
    for keep in (0, 1, 3, 4):
        with target.transaction(cache, 4) as txn:
            txn.forward(mx.array([[9, 8, 7, 6]]))
            txn.commit(keep)
        kept += [9, 8, 7, 6][:keep]
        assert same(cache, rebuild(target, kept))
