"Blocks that the dflash drafter fills, against mlx-vlm's, round by round."
import json
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlxspec.core import Params
from mlxspec.drafters.dflash import build_dflash
from mlxspec.law import DraftLaw, Law
from mlxspec.target import Target
from mlxspec.tiny import byte_tokenizer, tiny_model
from mlxspec.tiny_drafters import save_tiny_dflash

pytestmark = pytest.mark.oracle
N, PROMPT = 24, [72, 105, 33, 72, 105]


def theirs(path, model):
    "mlx-vlm's drafter with the same weights, bound to the same target."
    vlm = pytest.importorskip('mlx_vlm.speculative.drafters.qwen3_dflash')
    net = vlm.Model(vlm.ModelConfig.from_dict(json.loads((path / 'config.json').read_text())))
    net.load_weights(list(net.sanitize(mx.load(str(path / 'model.safetensors'))).items()))
    return net.bind(model)


@pytest.mark.parametrize('kind', ('qwen3', 'qwen3_5', 'gemma3'))
@pytest.mark.parametrize('k', (2, 5, 8))
@pytest.mark.parametrize('causal', (False, True), ids=('free', 'causal'))
def test_blocks_agree_in_every_round(tmp_path, kind, k, causal):
    mx.disable_compile()
    target = Target(tiny_model(kind), byte_tokenizer(), {}, kind)
    layers = ['full_attention' if causal else 'sliding_attention', 'full_attention'] # theirs masks a ring as if it were in time order
    path = save_tiny_dflash(tmp_path, layer_types=layers, dflash_config=dict(mask_token_id=263, target_layer_ids=[0, 1], causal=causal))
    ours, vlm = build_dflash(target, path, k), theirs(path, target.model)
    target.tap(*ours.hidden)
    theirs_cache, cache, tokens = vlm.reset(target.model), target.make_cache(), list(PROMPT)
    f = target.forward(mx.array([tokens]), cache, hidden=True)
    state = ours.open(SimpleNamespace(tokens=tokens, prompt_len=len(tokens), params=Params()))
    for _ in range(N): # rounds of plain decoding: a block is asked for at every position
        rows = mx.concatenate([f.taps[i] for i in ours.hidden], axis=-1)
        tokens.append(int(mx.argmax(f.logits[0, -1]).item()))
        ours.observe([state], [tokens[-rows.shape[1]:]], [rows[0]], [0])
        law = DraftLaw(Law(Params(), target.vocab_size), len(tokens))
        mine = ours.propose([state], [k - 1], [law])[0].tokens.tolist()
        assert mine == vlm.draft_block(tokens[-1], rows, theirs_cache, k, lambda x: mx.argmax(x, axis=-1))[0].tolist()
        f = target.forward(mx.array([tokens[-1:]]), cache, hidden=True)
