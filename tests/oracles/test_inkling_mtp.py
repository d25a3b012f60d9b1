"Drafted ids of Inkling's blocks against mlx-vlm's and transformers', at every place of a text."
import json
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlxspec.core import Params
from mlxspec.drafters.inkling_mtp import block_tensors, build_inkling_mtp
from mlxspec.law import DraftLaw, Law
from mlxspec.target import Target, body_of
from mlxspec.tiny import TinyInkling, TinyInklingArgs, save_tiny_inkling

pytestmark = pytest.mark.oracle
N, PROMPT = 20, [72, 105, 33, 72, 105] # past the window, which is 8


def pair(path, blocks, local=(0,)):
    "A target and its head; the directory is filled. Full layers sharpen their attention from place 8 on."
    mx.disable_compile()
    target = Target.load(save_tiny_inkling(path, blocks, local, log_scaling_n_floor=8), classes=(TinyInkling, TinyInklingArgs))
    return target, build_inkling_mtp(target, None, None)


def places(target, drafter, n): # n: drafts
    "At every place of a greedy text: the tokens so far, the states before the final norm of all but the last, what we draft."
    target.tap('pre')
    cache, tokens, hidden = target.make_cache(), list(PROMPT), []
    f = target.forward(mx.array([tokens]), cache, hidden=True)
    state = drafter.open(SimpleNamespace(tokens=tokens, prompt_len=len(tokens), params=Params()))
    for _ in range(N):
        tokens.append(int(mx.argmax(f.logits[0, -1]).item()))
        hidden.append(f.taps['pre'])
        drafter.observe([state], [tokens[-hidden[-1].shape[1]:]], [hidden[-1][0]], [0])
        law = DraftLaw(Law(Params(), target.vocab_size), len(tokens))
        yield tokens, mx.concatenate(hidden, axis=1), drafter.propose([state], [n], [law])[0].tokens.tolist()
        f = target.forward(mx.array([tokens[-1:]]), cache, hidden=True)


def vlm(path, target, blocks):
    "mlx-vlm's drafter with the same weights, bound to the same target."
    theirs = pytest.importorskip('mlx_vlm.speculative.drafters.inkling_mtp.inkling_mtp')
    config = pytest.importorskip('mlx_vlm.speculative.drafters.inkling_mtp.config').InklingMTPConfig
    raw = json.loads((path / 'config.json').read_text())
    text = raw['text_config'] | dict(num_mtp_layers=blocks, mtp_local_layer_ids=raw['mtp_config']['local_layer_ids'])
    net = theirs.InklingMTPDraftModel(config.from_dict(dict(text_config=text)))
    weights = net.sanitize(block_tensors(path)) | {'norm.weight': body_of(target.model).norm.weight}
    net.load_weights(list(weights.items()))
    return net.bind(target.model)


@pytest.mark.parametrize('k', (2, 3, 5))
def test_one_block_drafts_as_mlx_vlm_does(tmp_path, k):
    target, drafter = pair(tmp_path, 1)
    theirs, seen = vlm(tmp_path, target, 1), set()
    for tokens, hidden, mine in places(target, drafter, k - 1):
        theirs.reset(target.model)
        theirs.prefill_from_target_hidden(mx.array([tokens[:-1]]), hidden, tokens[-1], None, greedy=True)
        assert mine == theirs.draft_block(tokens[-1], None, None, k, None, greedy=True)[0].tolist()
        seen |= set(mine)
    assert len(seen) > 5


@pytest.mark.parametrize('blocks', (2, 3))
def test_a_chain_of_mlx_vlms_blocks_drafts_the_same(tmp_path, blocks):
    "Its blocks, one per draft, each over a history of its own."
    target, drafter = pair(tmp_path, blocks)
    theirs = vlm(tmp_path, target, blocks)
    for tokens, hidden, mine in places(target, drafter, blocks):
        theirs.reset(target.model)
        ids, x, said = list(tokens[1:]), hidden, []
        for j in range(blocks): # block j reads h^{j-1} with the tokens j places on; the last of these are drafts
            x = theirs._forward_seq(mx.array([ids]), x, j, mx.int32)
            said.append(int(mx.argmax(theirs._block_logits(x)[0, -1]).item()))
            ids = [*ids[1:], said[-1]]
        assert mine == said


def hugging(path, target, blocks):
    "Transformers' MTP model with the same weights, and the target's final norm, which it does not apply."
    torch = pytest.importorskip('torch')
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel
    from transformers.models.inkling.configuration_inkling import InklingTextConfig
    from transformers.models.inkling.modeling_inkling import InklingForCausalLM
    raw = json.loads((path / 'config.json').read_text())
    text = raw['text_config'] | dict(num_mtp_layers=blocks, mtp_local_layer_ids=raw['mtp_config']['local_layer_ids'])
    text['conv_kernel_size'] = text.pop('sconv_kernel_size')
    big = InklingForCausalLM(InklingTextConfig(**text, mlp_layer_types=['dense'] * text['num_hidden_layers'], layer_types=['hybrid'] * text['num_hidden_layers'],
                                               attn_implementation='eager')).eval()
    mtp = MtpModel(big, blocks).eval()
    as_torch = lambda w: torch.tensor(np.array(w.astype(mx.float32)))
    own = target.model
    with torch.no_grad():
        big.get_input_embeddings().weight.copy_(as_torch(own.model.embed_tokens.weight))
        big.lm_head.weight.copy_(as_torch(own.lm_head.weight))
    mtp.tie_with_main_model(big)
    state, missing = mtp.state_dict(), set()
    for k, w in block_tensors(path).items(): missing |= {*rename(k, as_torch(w), state)} - set(state)
    assert not missing
    mtp.load_state_dict(state)
    norm = as_torch(own.model.norm.weight)
    rms = lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + text['rms_norm_eps']) * norm
    return torch, mtp, rms, lambda: MtpCache(config=big.config.get_mtp_config())


NAMES = {'transformer_block.': 'mtp_block.', 'embed_norm': 'enorm', 'hidden_norm': 'hnorm', 'input_proj': 'eh_proj', '.attn.': '.self_attn.', 'wq_du': 'q_proj',
         'wk_dv': 'k_proj', 'wv_dv': 'v_proj', 'wr_du': 'r_proj', 'wo_ud': 'o_proj', 'attn_norm': 'input_layernorm', 'mlp_norm': 'post_attention_layernorm',
         'sconv.weight': 'sconv.conv1d.weight', 'w2_md': 'down_proj', 'rel_logits_proj.weight': 'rel_logits_proj.proj'}


def rename(key, w, state):
    "Put one tensor in its place; the names it was put under."
    for a, b in NAMES.items(): key = key.replace(a, b)
    if 'w13_dn' in key: put = {key.replace('w13_dn', 'gate_proj'): w[::2], key.replace('w13_dn', 'up_proj'): w[1::2]}
    else: put = {key: w}
    for k, v in put.items():
        if k in state: state[k].copy_(v)
    return put


@pytest.mark.parametrize('blocks, local', ((1, ()), (2, ()), (3, ()), (1, (0,)), (3, (0, 2))))
def test_transformers_drafts_the_same(tmp_path, blocks, local):
    "Its MTP model masks nothing in sliding blocks but the future, so those are compared as long as the text is inside the window."
    target, drafter = pair(tmp_path, blocks, local)
    torch, mtp, norm, new_cache = hugging(tmp_path, target, blocks)
    seen = set()
    for tokens, hidden, mine in places(target, drafter, blocks):
        if local and len(tokens) > 9: break
        ids, x, said, cache, n = torch.tensor([tokens[1:]]), torch.tensor(np.array(hidden)), [], new_cache(), len(tokens) - 1
        with torch.no_grad():
            for j in range(blocks):
                x = mtp.forward_layer(j, x, torch.arange(1 + j, n + 1 + j)[None], cache, input_ids=ids)
                said.append(int(mtp._project_to_logits(norm(x))[0, -1].argmax()))
                ids = torch.cat([ids[:, 1:], torch.tensor([[said[-1]]])], dim=-1)
        assert mine == said
        seen |= set(mine)
    assert len(seen) > (2 if local else 5)
