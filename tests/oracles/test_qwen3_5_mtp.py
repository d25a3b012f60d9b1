"Drafted ids of the qwen3_5_mtp head against mlx-vlm's drafter, round by round."
import json
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlxspec.core import Params
from mlxspec.drafters.qwen3_5_mtp import build_qwen3_5_mtp
from mlxspec.law import DraftLaw, Law
from mlxspec.target import Target
from mlxspec.tiny import save_tiny, save_tiny_mtp

pytestmark = pytest.mark.oracle
N, PROMPT = 24, [72, 105, 33, 72, 105]


def theirs(path, model):
    "mlx-vlm's drafter with the same weights, bound to the same target."
    vlm = pytest.importorskip('mlx_vlm.speculative.drafters.qwen3_5_mtp')
    raw = json.loads((path / 'config.json').read_text())
    text = raw['text_config']
    flat = {k: text[k] for k in ('rope_theta', 'partial_rotary_factor') if k in text} # of Qwen3-Next
    rope = text.setdefault('rope_parameters', dict(type='default') | flat)
    rope['mrope_section'] = [1, 1, 0] # it insists; text positions are the same in all sections
    config = vlm.ModelConfig.from_dict(raw)
    net = vlm.Model(config)
    net.load_weights(list(net.sanitize(mx.load(str(path / 'model.safetensors'))).items()))
    return net.bind(model)


@pytest.mark.parametrize('kind, raw, k', [
    *(('qwen3_5', raw, k) for raw in (False, True) for k in (2, 3, 5)),
    ('qwen3_5_moe', False, 3), ('qwen3_5_moe', True, 4), ('qwen3_next', True, 3)]) # raw experts: fused, and one by one
def test_drafts_agree_in_every_round(tmp_path, kind, raw, k):
    mx.disable_compile()
    target = Target.load(save_tiny(tmp_path / 'target', kind))
    path = save_tiny_mtp(tmp_path / 'head', raw=raw, kind=kind)
    ours, vlm = build_qwen3_5_mtp(target, path, k), theirs(path, target.model)
    target.tap()
    cache, tokens, hidden = target.make_cache(), list(PROMPT), []
    f = target.forward(mx.array([tokens]), cache, hidden=True)
    state = ours.open(SimpleNamespace(tokens=tokens, prompt_len=len(tokens), params=Params()))
    for _ in range(N): # rounds of plain decoding: a draft is asked for at every position
        tokens.append(int(mx.argmax(f.logits[0, -1]).item()))
        hidden.append(f.hidden)
        ours.observe([state], [tokens[-f.hidden.shape[1]:]], [f.hidden[0]], [0])
        law = DraftLaw(Law(Params(), target.vocab_size), len(tokens))
        mine = ours.propose([state], [k - 1], [law])[0].tokens.tolist()
        vlm.reset(target.model)
        vlm.prefill_from_target_hidden(mx.array([tokens[:-1]]), mx.concatenate(hidden, axis=1), tokens[-1], None, greedy=True)
        assert mine == vlm.draft_block(tokens[-1], None, None, k, None, greedy=True)[0].tolist()
        f = target.forward(mx.array([tokens[-1:]]), cache, hidden=True)
