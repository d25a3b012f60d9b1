"Drafted ids of the GLM head against transformers, at every place of a text, through split-mtp."
import json
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from mlxspec.core import Params
from mlxspec.drafters.glm4_moe_lite_mtp import build_glm4_moe_lite_mtp
from mlxspec.law import DraftLaw, Law
from mlxspec.split import split_mtp
from mlxspec.target import Target
from mlxspec.tiny import save_tiny_glm

pytestmark = pytest.mark.oracle
N, PROMPT = 20, [72, 105, 33, 72, 105]


def share(path):
    "Transformers takes embedding and head from the target, so the published copies must be copies. Weights that bfloat16 holds stay what they are."
    files = sorted(path.glob('*.safetensors'))
    weights = [mx.load(str(f)) for f in files]
    own, head = ({k: v if 'correction_bias' in k else v.astype(mx.bfloat16).astype(mx.float32) for k, v in w.items()} for w in weights)
    head |= {'model.layers.3.embed_tokens.weight': own['model.embed_tokens.weight'], 'model.layers.3.shared_head.head.weight': own['lm_head.weight']}
    mx.eval(own, head)
    for f, w in zip(files, (own, head), strict=True): mx.save_safetensors(str(f), w, metadata={'format': 'pt'})


def widened(net):
    "The same numbers in float32."
    net.update(tree_map(lambda w: w.astype(mx.float32), net.parameters()))


def theirs(path):
    "The target of transformers and its MTP model, from the raw checkpoint."
    torch = pytest.importorskip('torch')
    from transformers import Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel
    config = Glm4MoeLiteConfig(**{k: v for k, v in json.loads((path / 'config.json').read_text()).items() if k not in ('model_type', 'head_dim')}, attn_implementation='eager')
    config.num_mtp_layers, config.mtp_mlp_layer_types = 1, ['sparse']
    Glm4MoeLiteForCausalLM._keys_to_ignore_on_load_unexpected = [r'model\.layers\.3.*'] # it knows layer 47 only
    big = Glm4MoeLiteForCausalLM.from_pretrained(path, config=config, dtype=torch.float32).eval()
    return torch, big, MtpModel.from_pretrained(big).eval(), lambda: MtpCache(config=big.config.get_mtp_config())


def test_transformers_drafts_the_same(tmp_path):
    "Its MTP model makes one draft per layer, so K is 2."
    path = save_tiny_glm(tmp_path / 'raw')
    share(path)
    torch, big, mtp, new_cache = theirs(path)
    mx.disable_compile()
    target = Target.load(path)
    drafter = build_glm4_moe_lite_mtp(target, split_mtp(str(path), tmp_path / 'head', say=lambda s: None), None)
    widened(drafter.net)
    target.tap()
    cache, tokens = target.make_cache(), list(PROMPT)
    f = target.forward(mx.array([tokens]), cache, hidden=True)
    state, drafted = drafter.open(SimpleNamespace(tokens=tokens, prompt_len=len(tokens), params=Params())), []
    for _ in range(N):
        tokens.append(int(mx.argmax(f.logits[0, -1]).item()))
        drafter.observe([state], [tokens[-f.hidden.shape[1]:]], [f.hidden[0]], [0])
        mine = drafter.propose([state], [1], [DraftLaw(Law(Params(), target.vocab_size), len(tokens))])[0].tokens.tolist()
        ids, n = torch.tensor([tokens]), len(tokens) - 1
        with torch.no_grad():
            hidden = big(ids[:, :-1], output_hidden_states=True, use_cache=False).hidden_states[-1]
            said, _, _ = mtp(input_ids=ids[:, 1:], last_hidden_states=hidden, attention_mask=None, position_ids=torch.arange(1, n + 1)[None], mtp_cache=new_cache())
        assert mine == said[0].tolist(), n
        drafted += mine
        f = target.forward(mx.array([tokens[-1:]]), cache, hidden=True)
    assert len(set(drafted)) > 5
