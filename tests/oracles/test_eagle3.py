"Drafted ids of the eagle3 head against mlx-vlm's drafter, round by round."
import json
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlxspec.core import Params
from mlxspec.drafters.eagle3 import build_eagle3
from mlxspec.law import DraftLaw, Law
from mlxspec.target import Target
from mlxspec.tiny import byte_tokenizer, tiny_model
from mlxspec.tiny_drafters import save_tiny_eagle3

pytestmark = pytest.mark.oracle
N, PROMPT = 24, [72, 105, 33, 72, 105]


def theirs(path, model):
    "mlx-vlm's drafter with the same weights; it reads one of the two layouts."
    vlm = pytest.importorskip('mlx_vlm.speculative.drafters.eagle3')
    net = vlm.Model(vlm.ModelConfig.from_dict(json.loads((path / 'config.json').read_text())))
    weights = net.sanitize(mx.load(str(path / 'model.safetensors')))
    if net.d2t is None: weights.pop('d2t', None) # a whole vocabulary may have the table too
    net.load_weights(list(weights.items()))
    net.bind = lambda target: net # it would take the target's embedding whenever the shapes agree, also in place of its own
    return net


@pytest.mark.parametrize('kind', ('llama', 'qwen3_5', 'gemma3'))
@pytest.mark.parametrize('k', (2, 3, 6))
@pytest.mark.parametrize('vocab', (200, 264))
def test_drafts_agree_in_every_round(tmp_path, kind, k, vocab):
    mx.disable_compile()
    target = Target(tiny_model(kind), byte_tokenizer(), {}, kind)
    path = save_tiny_eagle3(tmp_path, draft_vocab=vocab)
    ours, vlm = build_eagle3(target, path, k), theirs(path, target.model)
    target.tap(*ours.hidden)
    cache, tokens, states = target.make_cache(), list(PROMPT), []
    f = target.forward(mx.array([tokens]), cache, hidden=True)
    state = ours.open(SimpleNamespace(tokens=tokens, prompt_len=len(tokens), params=Params()))
    for _ in range(N): # rounds of plain decoding: drafts are asked for at every position
        states.append(mx.concatenate([f.taps[i] for i in ours.hidden], axis=-1))
        tokens.append(int(mx.argmax(f.logits[0, -1]).item()))
        ours.observe([state], [tokens[-states[-1].shape[1]:]], [states[-1][0]], [0])
        law = DraftLaw(Law(Params(), target.vocab_size), len(tokens))
        mine = ours.propose([state], [k - 1], [law])[0].tokens.tolist()
        vlm.reset(target.model)
        vlm.prefill_from_target_hidden(mx.array([tokens[:-1]]), mx.concatenate(states, axis=1), tokens[-1], None, greedy=True)
        assert mine == vlm.draft_block(tokens[-1], None, None, k, None, greedy=True)[0].tolist()
        f = target.forward(mx.array([tokens[-1:]]), cache, hidden=True)
