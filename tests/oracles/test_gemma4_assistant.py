"Drafted ids of the Gemma 4 assistant against transformers and mlx-vlm, round by round."
import json
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlxspec.core import Params
from mlxspec.drafters.gemma4_assistant import build_gemma4_assistant
from mlxspec.law import DraftLaw, Law
from mlxspec.target import Target
from mlxspec.tiny import save_tiny, save_tiny_assistant

pytestmark = pytest.mark.oracle
N, PROMPT = 30, [82, 101, 100, 44, 32, 103, 114]


def rounds(target, drafter, k):
    "Rounds of plain decoding, and what we draft at every place: (tokens, hidden state before the pending one, cache, drafts)."
    target.tap()
    cache, tokens = target.make_cache(), list(PROMPT)
    f = target.forward(mx.array([tokens]), cache, hidden=True)
    state = drafter.open(SimpleNamespace(tokens=tokens, prompt_len=len(tokens), params=Params()))
    for _ in range(N):
        tokens.append(int(mx.argmax(f.logits[0, -1]).item()))
        drafter.observe([state], [tokens[-f.hidden.shape[1]:]], [f.hidden[0]], [0])
        drafter.look([state], [cache])
        yield list(tokens), f.hidden[:, -1:], state.shared, drafter.propose([state], [k - 1], [DraftLaw(Law(Params(), target.vocab_size), len(tokens))])[0].tokens.tolist()
        f = target.forward(mx.array([tokens[-1:]]), cache, hidden=True)


@pytest.mark.parametrize('ordered', (False, True), ids=('dense', 'ordered'))
@pytest.mark.parametrize('k', (2, 4))
def test_mlx_vlm_drafts_the_same(tmp_path, k, ordered):
    "Also past the window. mlx-vlm puts the query at the last cached token; given the pending token's place, it agrees."
    vlm = pytest.importorskip('mlx_vlm.speculative.drafters.gemma4_assistant')
    mx.disable_compile()
    target = Target.load(save_tiny(tmp_path / 'target', 'gemma4'))
    path = save_tiny_assistant(tmp_path / 'head', ordered=ordered)
    theirs = vlm.Model(vlm.ModelConfig.from_dict(json.loads((path / 'config.json').read_text())))
    theirs.load_weights(list(theirs.sanitize(mx.load(str(path / 'model.safetensors'))).items()))
    theirs.bind(target.model)
    for tokens, hidden, shared, mine in rounds(target, build_gemma4_assistant(target, path, k), k):
        n = len(tokens) - 1
        theirs.set_shared_kv(shared, n, position=n, kv_valid_len=n)
        assert mine == theirs.draft_block(tokens[-1], hidden, None, k, lambda x: mx.argmax(x, axis=-1), greedy=True)[0].tolist(), n


@pytest.mark.parametrize('ordered', (False, True), ids=('dense', 'ordered'))
def test_transformers_drafts_the_same(tmp_path, ordered):
    "Inside the window: past it transformers keeps two keys more, and after a rejection the rejected row."
    torch = pytest.importorskip('torch')
    tf = pytest.importorskip('transformers.models.gemma4_assistant.modeling_gemma4_assistant')
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Generator
    from transformers.models.gemma4_assistant.configuration_gemma4_assistant import Gemma4AssistantConfig
    mx.disable_compile()
    target = Target.load(save_tiny(tmp_path / 'target', 'gemma4', sliding_window=64))
    path = save_tiny_assistant(tmp_path / 'head', ordered=ordered, sliding_window=64)
    def torch_weights(p): return {k: torch.tensor(v.tolist(), dtype=torch.long if 'ordering' in k else torch.float32) for k, v in mx.load(str(p / 'model.safetensors')).items()}
    text = json.loads((tmp_path / 'target' / 'config.json').read_text()) | dict(use_double_wide_mlp=True, attn_implementation='eager')
    big = Gemma4ForCausalLM(Gemma4TextConfig(**{k: v for k, v in text.items() if k != 'model_type'})).eval()
    big.load_state_dict(torch_weights(tmp_path / 'target'))
    config = json.loads((path / 'config.json').read_text())
    small = tf.Gemma4AssistantForCausalLM(Gemma4AssistantConfig(**{k: v for k, v in config.items() if k not in ('model_type', 'block_size')})).eval()
    lacking = small.load_state_dict(torch_weights(path), strict=False)
    assert not lacking.unexpected_keys and set(lacking.missing_keys) <= {'lm_head.weight'}
    small.tie_weights()
    small.generation_config.num_assistant_tokens = 3
    for tokens, _, _, mine in rounds(target, build_gemma4_assistant(target, path, 4), 4):
        ids = torch.tensor([tokens])
        gen = Generator(small, big.get_input_embeddings(), big.generation_config)
        gen.main_model_max_length = 10**6
        with torch.no_grad(): out = big(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
        theirs, _ = gen.get_candidates(ids, {}, out, is_first_iteration=False, n_last_matches=0)
        assert mine == theirs[0, len(tokens):].tolist(), len(tokens)
