"""Train the demo pair: tokenizer, target and MTP head, in PyTorch on a CPU.

    python tools/train_demo.py tokenizer            # assets: tokenizer, config, chat template, random weights
    python tools/train_demo.py target --steps 4000  # the target; resumes from its checkpoint
    python tools/train_demo.py head --steps 2000    # the head, on the frozen target
    python tools/train_demo.py export               # write what the checkpoints hold into the package

Needs torch, tokenizers, safetensors, numpy. What is taught lives in mlxspec/exercises.py and mlxspec/curriculum.py.
"""
import argparse, json, math, random, re, time
from pathlib import Path

import numpy as np, torch, torch.nn as nn, torch.nn.functional as F
from safetensors.torch import save_file, load_file
from tokenizers import Tokenizer, Regex, decoders, models, pre_tokenizers, trainers

import sys
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from mlxspec import curriculum as C, exercises as X

ASSETS = ROOT/'mlxspec'/'assets'
TARGET, HEAD = ASSETS/'mlxspec-demo', ASSETS/'mlxspec-demo-mtp'
def use_assets(d):
    global TARGET, HEAD
    TARGET, HEAD = d/'mlxspec-demo', d/'mlxspec-demo-mtp'

SPECIAL = ['<|endoftext|>', '<|im_start|>', '<|im_end|>', '<think>', '</think>', '<tool_call>', '</tool_call>']
CONFIG = dict(architectures=['Qwen3ForCausalLM'], model_type='qwen3', hidden_size=160, num_hidden_layers=8, intermediate_size=432, num_attention_heads=5,
              num_key_value_heads=5, head_dim=32, rms_norm_eps=1e-6, vocab_size=1280, max_position_embeddings=4096, rope_theta=10000.0, tie_word_embeddings=True,
              hidden_act='silu', attention_bias=False, bos_token_id=None, eos_token_id=2, pad_token_id=0, torch_dtype='bfloat16')
HEAD_CONFIG = dict(architectures=['Qwen3_5MTPForCausalLM'], model_type='qwen3_5_mtp', block_size=3, tie_word_embeddings=True, torch_dtype='bfloat16',
                   text_config=dict(model_type='qwen3_5_text', hidden_size=160, num_hidden_layers=1, num_attention_heads=5, num_key_value_heads=5, head_dim=32, intermediate_size=432, rms_norm_eps=1e-6, vocab_size=1280,
                                    max_position_embeddings=4096, rope_parameters=dict(rope_type='default', rope_theta=10000.0, partial_rotary_factor=0.5), layer_types=['full_attention'], mtp_num_hidden_layers=1,
                                    tie_word_embeddings=True, attn_output_gate=True, hidden_act='silu', attention_bias=False))
TEMPLATE = '''{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif -%}
{%- if system or tools %}{{ '<|im_start|>system\\n' + system }}
{%- if tools %}{{ ('\\n\\n' if system else '') + '# Tools' }}
{%- for tool in tools %}{% set f = tool.function or tool %}{{ '\\n- ' + f.name + '(' + (((f.parameters or {}).properties or {}) | list | join(', ')) + '): ' + (f.description or '') }}{% endfor %}
{%- endif %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- for message in turns %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for tool_call in message.tool_calls or [] %}{% set between = '\\n' if message.content or not loop.first else '' %}{% set tool_call = tool_call.function or tool_call %}
{{- between + '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' + (tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
'''

# --- tokenizer
def corpus(n, seed=0, again=300):
    "Conversations as text, for the merges, and the word lists in both forms that texts use: after a space, at a line start."
    r, made_up = random.Random(seed), X.syllables
    X.syllables = C.syllables = lambda r, n: r.choice(C.WORDS) # made-up words would fill the vocabulary with their syllables
    for _ in range(n):
        it = C.conversation(r, 1, tasks=dict.fromkeys(C.TASKS, 1)) # all kinds alike: the vocabulary does not hang on the mixture
        yield C.render(it.messages, it.tools) + it.answer + '<|im_end|>\n'
    X.syllables = C.syllables = made_up
    for w in C.WORDS + C.NAMES + C.CITIES + C.DAYS + X.MONTHS: yield ' '.join([w]*again) + '\n' + '\n'.join([w]*again)

def train_tokenizer(n=4000):
    "Byte-level BPE with single digits; every byte has a token, so any text can be said."
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(corpus(n), trainers.BpeTrainer(vocab_size=CONFIG['vocab_size'], special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    TARGET.mkdir(parents=True, exist_ok=True)
    t.save(str(TARGET/'tokenizer.json'))
    words = C.WORDS + C.NAMES + C.CITIES + C.DAYS + X.MONTHS
    print('vocabulary', t.get_vocab_size(), 'single tokens: after a space', sum(len(t.encode(' ' + w).ids) == 1 for w in words), 'at a line start', sum(len(t.encode(w).ids) == 1 for w in words), 'of', len(words))
    tc = dict(tokenizer_class='PreTrainedTokenizerFast', eos_token='<|im_end|>', pad_token='<|endoftext|>', bos_token=None, unk_token=None, model_max_length=4096, clean_up_tokenization_spaces=False,
              tool_parser_type='json_tools', added_tokens_decoder={str(i): dict(content=s, lstrip=False, rstrip=False, normalized=False, single_word=False, special=i < 3) for i, s in enumerate(SPECIAL)})
    write(TARGET/'tokenizer_config.json', tc)
    (TARGET/'chat_template.jinja').write_text(TEMPLATE)
    write(TARGET/'generation_config.json', dict(eos_token_id=[2, 0], pad_token_id=0, do_sample=False, temperature=0.0))

def write(p, d): p.parent.mkdir(parents=True, exist_ok=True); p.write_text(json.dumps(d, indent=1) + '\n')

# --- model: mlx-lm's qwen3, with its tensor names
def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a*cos - b*sin, b*cos + a*sin], -1)

def angles(n, dims, theta=10000., start=0):
    t = torch.arange(start, start+n).float()[:, None] * theta ** (-torch.arange(0, dims, 2).float()/dims)
    return t.cos(), t.sin()

def norm(d): return nn.RMSNorm(d, eps=1e-6)
def lin(i, o): return nn.Linear(i, o, bias=False)
class RMS(nn.Module):
    def __init__(s, d): super().__init__(); s.weight = nn.Parameter(torch.ones(d))
    def forward(s, x): x = x.float(); return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * s.weight

def attend(q, k, v):
    "Causal attention by plain products: at these lengths its backward pass is three times faster on a CPU than the fused one's."
    s = q*q.shape[-1]**-.5 @ k.mT
    n, m = s.shape[-2:]
    return torch.softmax(s + torch.full((n, m), -1e4, dtype=s.dtype).triu(m-n+1), -1) @ v

class Attention(nn.Module):
    def __init__(s, H, n, hd, gated=False, rotary=1.0):
        super().__init__()
        s.n, s.hd, s.gated, s.rot = n, hd, gated, int(hd*rotary)
        s.q_proj, s.k_proj, s.v_proj, s.o_proj = lin(H, n*hd*(2 if gated else 1)), lin(H, n*hd), lin(H, n*hd), lin(n*hd, H)
        s.q_norm, s.k_norm = RMS(hd), RMS(hd)
    def forward(s, x, cs, cache=None):
        B, L, _ = x.shape
        q = s.q_proj(x).view(B, L, s.n, -1)
        if s.gated: q, gate = q.chunk(2, -1)
        k, v = s.k_proj(x).view(B, L, s.n, s.hd), s.v_proj(x).view(B, L, s.n, s.hd).transpose(1, 2)
        q, k = s.q_norm(q).transpose(1, 2), s.k_norm(k).transpose(1, 2)
        if s.rot == s.hd: q, k = rope(q, *cs), rope(k, *cs)
        else: q, k = (torch.cat([rope(t[..., :s.rot], *cs), t[..., s.rot:]], -1) for t in (q, k))
        q, k = q.to(v.dtype), k.to(v.dtype)
        if cache is not None:
            if cache: k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
            cache[:] = [k, v]
        o = attend(q, k, v).transpose(1, 2).reshape(B, L, -1)
        return s.o_proj(o*torch.sigmoid(gate.reshape(B, L, -1)) if s.gated else o)

class MLP(nn.Module):
    def __init__(s, H, I): super().__init__(); s.gate_proj, s.up_proj, s.down_proj = lin(H, I), lin(H, I), lin(I, H)
    def forward(s, x): return s.down_proj(F.silu(s.gate_proj(x))*s.up_proj(x))

class Layer(nn.Module):
    def __init__(s, c, **kw):
        super().__init__()
        H = c['hidden_size']
        s.self_attn, s.mlp = Attention(H, c['num_attention_heads'], c['head_dim'], **kw), MLP(H, c['intermediate_size'])
        s.input_layernorm, s.post_attention_layernorm = RMS(H), RMS(H)
    def forward(s, x, cs, cache=None):
        x = x + s.self_attn(s.input_layernorm(x), cs, cache)
        return x + s.mlp(s.post_attention_layernorm(x))

class Body(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.embed_tokens = nn.Embedding(c['vocab_size'], c['hidden_size'])
        s.layers, s.norm, s.hd = nn.ModuleList(Layer(c) for _ in range(c['num_hidden_layers'])), RMS(c['hidden_size']), c['head_dim']
    def forward(s, ids, cache=None):
        x, past = s.embed_tokens(ids), cache[0][0].shape[2] if cache and cache[0] else 0
        cs = angles(ids.shape[1], s.hd, start=past)
        for i, l in enumerate(s.layers): x = l(x, cs, cache[i] if cache is not None else None)
        return s.norm(x)

class Target(nn.Module):
    "Hidden after the final norm; `logits` is the tied head."
    def __init__(s, c=CONFIG): super().__init__(); s.model = Body(c); init(s)
    def forward(s, ids, cache=None): return s.model(ids, cache)
    def logits(s, h): return F.linear(h, s.model.embed_tokens.weight)

class Head(nn.Module):
    "The qwen3_5_mtp layer: entry i pairs token[i+1] with the target's hidden[i] and guesses token[i+2]."
    def __init__(s, c=HEAD_CONFIG['text_config']):
        super().__init__()
        H, rot = c['hidden_size'], c['rope_parameters']['partial_rotary_factor']
        s.fc, s.pre_fc_norm_embedding, s.pre_fc_norm_hidden, s.norm = lin(2*H, H), RMS(H), RMS(H), RMS(H)
        s.layers = nn.ModuleList([Layer(c, gated=True, rotary=rot)]); s.dims = int(c['head_dim']*rot); init(s)
    def forward(s, emb, hidden, depth=3):
        """The head's hidden at every position for drafts 1..depth of a round.

        Draft j+1 at entry p is made j steps after the target was last seen: its own hidden of entry p-1 stands in for the target's, and it attends to true entries up to p-j and to its own after that.
        """
        l, a, B, L = s.layers[0], s.layers[0].self_attn, *emb.shape[:2]
        cs, e, outs, ks, vs = angles(L, s.dims), s.pre_fc_norm_embedding(emb), [], [], []
        turn = lambda t: torch.cat([rope(t[..., :a.rot], *cs), t[..., a.rot:]], -1)
        for j in range(depth):
            x = s.fc(torch.cat([e, s.pre_fc_norm_hidden(hidden)], -1)); n = l.input_layernorm(x)
            q, gate = a.q_proj(n).view(B, L, a.n, -1).chunk(2, -1)
            q = turn(a.q_norm(q).transpose(1, 2)); k = turn(a.k_norm(a.k_proj(n).view(B, L, a.n, a.hd)).transpose(1, 2)); v = a.v_proj(n).view(B, L, a.n, a.hd).transpose(1, 2)
            ks.append(k.to(v.dtype)); vs.append(v); q = q.to(v.dtype)*a.hd**-.5
            sc = q @ ks[0].mT + torch.full((L, L), -1e4, dtype=q.dtype).triu(1-j) # true entries: up to p-j
            own = [(torch.roll(ks[m], j-m, 2), torch.roll(vs[m], j-m, 2)) for m in range(1, j+1)]
            w = torch.softmax(torch.cat([sc] + [(q*k_).sum(-1, keepdim=True) for k_, _ in own], -1), -1).to(v.dtype)
            o = w[..., :L] @ vs[0] + sum(w[..., L+i:L+i+1]*v_ for i, (_, v_) in enumerate(own))
            x = x + a.o_proj(o.transpose(1, 2).reshape(B, L, -1)*torch.sigmoid(gate.reshape(B, L, -1)))
            out = s.norm(x + l.mlp(l.post_attention_layernorm(x))); outs.append(out); hidden = torch.roll(out, 1, 1)
        return outs

def init(m):
    for n, p in m.named_parameters():
        if 'embed_tokens' in n: nn.init.normal_(p, std=.1)
        elif n.endswith(('o_proj.weight', 'down_proj.weight')): nn.init.zeros_(p)
        elif n.endswith('q_norm.weight'): nn.init.constant_(p, 2.5) # normalised queries and keys are too soft at 1
        elif p.ndim == 2: nn.init.normal_(p, std=p.shape[1]**-.5 * .8)

BACK, SAY = .22, .6 # how loud the wired heads are beside an embedding

@torch.no_grad()
def wire_spelling(m, tok):
    "Start the embeddings from what tokens are made of: a random vector, plus one for every letter at its place. \" chair\", \"chair\" and \"ch\" begin alike."
    E, letters = m.model.embed_tokens.weight, {}
    E *= .75
    for i in range(len(SPECIAL), E.shape[0]):
        for place in enumerate(tok.id_to_token(i).lstrip('Ġ')[:6]):
            if place not in letters: letters[place] = .0285*torch.randn(E.shape[1])
            E[i] += letters[place]

@torch.no_grad()
def wire_copying(m, c):
    """Start with a copying circuit (Olsson et al. 2022, "induction heads"), which a long training would find by itself.

    Layer 0: one head looks one token back, one looks two back; each writes what it saw into a subspace of its own.
    Layer 1: two heads look for the place whose previous token is the current one, and write what stands there. Two more look for the
    place whose token before last is the previous one: the same answer as long as text is copied, and the right one after a word that
    was replaced. Layer 2: one head, faintly, looks two places behind what is about to be said ("replace A with B").
    Everything rests on random rotations, and training goes on from there.
    """
    H, hd, half = c['hidden_size'], c['head_dim'], c['head_dim']//2
    E, (l0, l1, l2) = m.model.embed_tokens.weight, [m.model.layers[i].self_attn for i in range(3)]
    E[:, 0] = .3                                                        # a constant that queries of position can stand on
    basis = torch.cat([torch.zeros(1, 4*hd), torch.linalg.qr(torch.randn(H-1, 4*hd))[0]]).split(hd, 1) # [H, hd] each, orthonormal, free of the constant
    said, before, before2 = basis[:2], basis[2], basis[3]                # what is about to be said; the token before; the one before that
    u = torch.zeros(hd); u[[0, 1, 2]] = 1.                               # the three fastest rotations tell neighbours apart
    slow = list(range(half//2, half)) + list(range(half+half//2, hd))    # dimensions that barely rotate within a text
    def look_back(h, n, put):
        r = slice(h*hd, (h+1)*hd)
        l0.q_proj.weight[r] = 0; l0.k_proj.weight[r] = 0
        l0.q_proj.weight[r, 0] = u; l0.k_proj.weight[r, 0] = rope(u[None], *angles(1, hd, start=n))[0]
        l0.v_proj.weight[r] = said[0].T; l0.o_proj.weight[:, r] = BACK*put
    def match(l, h, q, k, out, gain):
        r = slice(h*hd, (h+1)*hd)
        l.q_proj.weight[r] = 0; l.k_proj.weight[r] = 0
        l.q_proj.weight[r][slow] = q.T[:half]; l.k_proj.weight[r][slow] = k.T[:half]
        l.v_proj.weight[r] = out.T; l.o_proj.weight[:, r] = gain*out
    look_back(0, 1, before); look_back(1, 2, before2)
    for h in range(2): match(l1, h, said[0], before, said[h], SAY); match(l1, 2+h, before, before2, said[h], SAY)
    match(l2, 0, said[0], before2, said[0], SAY/6)

# --- data: chunks of conversations, seeded by their number, cut into batches of like length
class Data:
    def __init__(s, seed, steps, tokens=4096, per=1600, drill=(1900, 2400)):
        s.drill = drill
        s.tok, s.seed, s.steps, s.tokens, s.per = Tokenizer.from_file(str(TARGET/'tokenizer.json')), seed, steps, tokens, per
    def encode(s, items):
        "(ids, 1 where an answer token is to be predicted) per conversation."
        a = s.tok.encode_batch([C.render(i.messages, i.tools) for i in items])
        b = s.tok.encode_batch([i.answer + '<|im_end|>' for i in items])
        return [(x.ids + y.ids, [0]*len(x.ids) + [1]*len(y.ids)) for x, y in zip(a, b)]
    def pad(s, rows):
        L = -(-max(len(i) for i, _ in rows)//8)*8
        ids = torch.zeros(len(rows), L+1, dtype=torch.long); m = torch.zeros(len(rows), L+1, dtype=torch.bool)
        for j, (i, w) in enumerate(rows): ids[j, :len(i)] = torch.tensor(i); m[j, :len(i)] = torch.tensor(w, dtype=torch.bool)
        return ids, m
    def batches(s, rows, r=None):
        rows, out, cur = sorted(rows, key=lambda x: len(x[0])), [], []
        for x in rows:
            if cur and (len(cur)+1)*(-(-len(x[0])//8)*8) > s.tokens//4: out.append(cur); cur = []
            cur.append(x)
        out.append(cur)
        if r: r.shuffle(out)
        return out
    def size(s, step): return min(1., .2 + step/600) if s.steps > 1 else 1.
    def stream(s, step=0, mix=4, start=(0, 0)):
        """Steps for ever, each a few small batches: short, middling and long exercises, so that every step sees every kind.

        The place in the stream depends only on the step: a resumed run sees what the first would have.
        """
        chunk, at = start
        while True:
            s.start = chunk, at # a place to begin from when resuming
            r = random.Random(s.seed*1000003 + chunk)
            size = lambda: s.size(at)*(r.random() if r.random() < .6 else 1)
            if s.drill[0] <= at < s.drill[1]: # short edits for a while: one word in a handful is new, not one in fifty
                tasks = {**dict.fromkeys(C.TASKS, .3), C.edit: 9, C.spell: 2, C.edit_json: 1}
                items = [C.conversation(r, .25*r.random(), tasks=tasks) for _ in range(s.per)]
            else: items = [C.conversation(r, size()) for _ in range(s.per)]
            bs = s.batches(s.encode(items))
            n = len(bs)//mix
            parts = [bs[i*n:(i+1)*n] for i in range(mix)]
            for p in parts: r.shuffle(p)
            for group in zip(*parts):
                if at >= step: yield [s.pad(b) for b in group]
                at += 1
            chunk += 1
    def held(s, n, seed=10**6):
        "n held-out exercises of every task."
        r = random.Random(seed)
        return [C.conversation(r, 1, held=True, tasks={f: 1}) for f in C.TASKS for _ in range(n)]

# --- optimiser: Muon for matrices, Adam for the rest
def newton_schulz(g, steps=5):
    x = g.to(torch.bfloat16) / (g.norm(dim=(-2, -1), keepdim=True) + 1e-7).to(torch.bfloat16)
    t = x.shape[-2] > x.shape[-1]
    if t: x = x.mT
    for _ in range(steps):
        a = x@x.mT
        x = 3.4445*x + (-4.775*a + 2.0315*a@a)@x
    return (x.mT if t else x).float()

class Muon(torch.optim.Optimizer):
    "Momentum, orthogonalised (Jordan 2024); matrices of one shape are done together."
    def __init__(s, ps, lr=.02, momentum=.95, wd=.01): super().__init__(ps, dict(lr=lr, momentum=momentum, wd=wd))
    @torch.no_grad()
    def step(s):
        for g in s.param_groups:
            by = {}
            for p in g['params']:
                if p.grad is None: continue
                b = s.state[p].setdefault('m', torch.zeros_like(p)); b.lerp_(p.grad, 1-g['momentum'])
                by.setdefault(p.shape, []).append((p, p.grad.lerp(b, g['momentum'])))
            for (r, c), xs in by.items():
                u = newton_schulz(torch.stack([x for _, x in xs])) * max(1, r/c)**.5
                for (p, _), d in zip(xs, u): p.mul_(1 - g['lr']*g['wd']).add_(d, alpha=-g['lr'])

def optimisers(m, lr):
    mats = [p for n, p in m.named_parameters() if p.ndim == 2 and 'embed' not in n]
    rest = [p for n, p in m.named_parameters() if p.ndim < 2 or 'embed' in n]
    return [Muon(mats, lr=lr), torch.optim.AdamW(rest, lr=lr*.1, betas=(.9, .98), weight_decay=0.)]

def schedule(step, steps, warm=100, tail=.35):
    "Warm up, hold, fall to zero over the last third."
    return min(1, (step+1)/warm, (steps-step)/(tail*steps))

class Ema:
    def __init__(s, m, decay=.995): s.w, s.d = {k: v.detach().clone() for k, v in m.state_dict().items()}, decay
    @torch.no_grad()
    def update(s, m, step):
        d = min(s.d, (step+1)/(step+10))
        for k, v in m.state_dict().items(): s.w[k].lerp_(v, 1-d)

# --- training
def amp(): return torch.autocast('cpu', torch.bfloat16)

@torch.no_grad()
def accuracy(m, data, items):
    "Per task: answers whose every token is the greedy choice (for an exact answer that is: the answer is right)."
    rows = [(i, w, it.task) for (i, w), it in zip(data.encode(items), items)]; ok = {}
    for b in data.batches(rows):
        ids, w = data.pad([(i, x) for i, x, _ in b])
        good = (m.logits(m(ids[:, :-1])).argmax(-1) == ids[:, 1:]) | ~w[:, 1:]
        for g, (_, _, t) in zip(good.all(1).tolist(), b): ok.setdefault(t, []).append(g)
    return {t: sum(v)/len(v) for t, v in ok.items()}

def log_line(path, **kw):
    s = json.dumps(kw); print(s, flush=True)
    with open(path, 'a') as f: f.write(s + '\n')

def run_workers(f, a):
    "f(rank, a) in a.workers processes that share every step: on a busy machine they wait for each other once a step, threads at every product."
    if a.workers == 1: return f(0, a)
    (a.work/'meet').unlink(missing_ok=True)
    torch.multiprocessing.spawn(worker, (f, a), nprocs=a.workers)

def worker(rank, f, a):
    use_assets(a.assets)
    torch.set_num_threads(max(1, a.threads//a.workers))
    torch.distributed.init_process_group('gloo', init_method=f'file://{a.work}/meet', rank=rank, world_size=a.workers)
    f(rank, a)

def share_gradients(m, a):
    "Add up what the workers found."
    if a.workers == 1: return
    ps = [p for p in m.parameters() if p.requires_grad]
    flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for p in ps]); torch.distributed.all_reduce(flat)
    for p, g in zip(ps, flat.split([p.numel() for p in ps])): p.grad = g.view_as(p)

def train_target(rank, a):
    torch.manual_seed(a.seed); data = Data(a.seed, a.steps, a.tokens); m = Target(); ema = Ema(m); opts = optimisers(m, a.lr); step, spent, start = 0, 0., (0, 0)
    ck, out = a.work/'target.pt', a.work/'target.jsonl'
    if ck.exists():
        d = torch.load(ck, weights_only=False); m.load_state_dict(d['m']); ema.w = d['ema']; step, spent, start = d['step'], d['spent'], d.get('start', start)
        for o, s in zip(opts, d['opts']): o.load_state_dict(s)
    else: wire_spelling(m, data.tok); wire_copying(m, CONFIG); ema = Ema(m)
    held = [i for i in data.held(12) if i.task != 'story']
    t0, seen, losses = time.time(), 0, []
    for group in data.stream(step, start=start):
        if step >= a.steps: break
        for o in opts:
            for g in o.param_groups: g.setdefault('base', g['lr']); g['lr'] = g['base']*schedule(step, a.steps)
        n, loss = sum(int(w[:, 1:].sum()) for _, w in group), 0.
        for ids, w in group[rank::a.workers]:
            with amp(): logits = m.logits(m(ids[:, :-1])[w[:, 1:]])
            l = F.cross_entropy(logits.float(), ids[:, 1:][w[:, 1:]], reduction='sum')/n; l.backward(); loss += l.item()*a.workers
        share_gradients(m, a)
        nn.utils.clip_grad_norm_(m.parameters(), 1.)
        for o in opts: o.step(); o.zero_grad(set_to_none=True)
        step += 1; seen += sum(i.numel() for i, _ in group); losses.append(loss); ema.update(m, step)
        if rank: continue
        if step % 25 == 0: log_line(out, step=step, loss=round(float(np.mean(losses)), 4), size=round(data.size(step), 2), tok_s=int(seen/(time.time()-t0)), minutes=round((spent+time.time()-t0)/60, 1)); losses = []
        if step % a.every == 0 or step == a.steps:
            torch.save(dict(m=m.state_dict(), ema=ema.w, opts=[o.state_dict() for o in opts], step=step, start=data.start, spent=spent+time.time()-t0), ck.with_suffix('.tmp')); ck.with_suffix('.tmp').rename(ck)
            e = Target(); e.load_state_dict(ema.w); acc = accuracy(e, data, held)
            log_line(out, step=step, held_out=round(float(np.mean(list(acc.values()))), 3), **{k: round(v, 2) for k, v in acc.items()})

# --- the head
@torch.no_grad()
def continue_texts(m, data, items, n=160, temperature=0., seed=0):
    "The target's own answers, batched by prompt length: ids of prompt and answer per item."
    enc = [data.tok.encode(C.render(i.messages, i.tools)).ids for i in items]; by, out = {}, [None]*len(items); g = torch.Generator().manual_seed(seed)
    for k, e in enumerate(enc): by.setdefault(len(e), []).append(k)
    for L, group in by.items():
        for c in range(0, len(group), 64):
            part = group[c:c+64]; ids = torch.tensor([enc[k] for k in part]); cache = [[] for _ in range(CONFIG['num_hidden_layers'])]; x, done, new = ids, torch.zeros(len(part), dtype=torch.bool), []
            for _ in range(n):
                lg = m.logits(m(x, cache)[:, -1]).float()
                t = torch.multinomial(torch.softmax(lg/temperature, -1), 1, generator=g) if temperature else lg.argmax(-1, keepdim=True)
                new.append(t); done |= t[:, 0] == 2; x = t
                if done.all(): break
            for row, k in zip(torch.cat(new, 1).tolist(), part): out[k] = enc[k] + (row[:row.index(2)+1] if 2 in row else row)
    return [(o, [0]*len(e) + [1]*(len(o)-len(e))) for o, e in zip(out, enc)]

def teach(m, ids, w):
    "What the head sees and should say: embeddings and hiddens of entries, the target's logits one entry on, which entries count."
    h = m(ids); lg = m.logits(h)
    w = w[:, 2:].clone(); w[:, :3] = False # the first entries have nothing behind them for drafts 2 and 3
    return m.model.embed_tokens(ids[:, 1:-1]).detach(), h[:, :-2], lg[:, 1:-1], w

@torch.no_grad()
def acceptance(m, head, data, rows):
    "Drafts accepted by position along the target's own greedy text: how often the first is right, the first two, the first three."
    hit, n = np.zeros(3), 0
    for b in data.batches(rows):
        ids, w = data.pad(b); e, h, lg, w = teach(m, ids, w); best = lg.argmax(-1)
        right = [m.logits(o).argmax(-1) == best for o in head(e, h)]; run = right[0]
        runs = [run]
        for j in (1, 2): run = torch.roll(run, 1, 1) & right[j]; runs.append(run)
        hit += [float((r & w).sum()) for r in runs]; n += int(w.sum())
    return (hit/n).round(4).tolist()

def own_stories(m, data, a):
    "Stories in the target's own words, greedy and sampled: what a head has to follow where the curriculum leaves a choice."
    f, r = a.work/'stories.json', random.Random(a.seed+5)
    if not f.exists():
        prompts = [C.conversation(r, 1, tasks={C.story: 1}) for _ in range(a.stories)]; h = len(prompts)//2
        f.write_text(json.dumps(continue_texts(m, data, prompts[:h]) + continue_texts(m, data, prompts[h:], temperature=1., seed=1)))
    return json.loads(f.read_text())

def train_stories(a):
    m = Target(); m.load_state_dict({k: v.float() for k, v in load_file(TARGET/'model.safetensors').items()}); own_stories(m, Data(a.seed+7, 1), a)

def train_head(rank, a):
    torch.manual_seed(a.seed+1); data = Data(a.seed+7, 1, a.tokens, drill=(0, 0)); m = Target(); m.requires_grad_(False)
    m.load_state_dict({k: v.float() for k, v in load_file(TARGET/'model.safetensors').items()})
    head = Head(); ema = Ema(head); opts = optimisers(head, a.lr); step, spent, start = 0, 0., (0, 0); ck, out = a.work/'head.pt', a.work/'head.jsonl'
    if ck.exists():
        d = torch.load(ck, weights_only=False); head.load_state_dict(d['m']); ema.w = d['ema']; step, spent, start = d['step'], d['spent'], d.get('start', start)
        for o, s in zip(opts, d['opts']): o.load_state_dict(s)
    held = data.encode([i for i in data.held(12) if i.task != 'story']) # what the target says, but for its few mistakes
    own, plain, t0, losses = own_stories(m, data, a), data.encode, time.time(), []
    data.encode = lambda items: [own[sum(x[0]) % len(own)] if i.task == 'story' else x for i, x in zip(items, plain(items))]
    for group in data.stream(step, start=start):
        if step >= a.steps: break
        for o in opts:
            for g in o.param_groups: g.setdefault('base', g['lr']); g['lr'] = g['base']*schedule(step, a.steps)
        n, ces = sum(int(w[:, 3:].sum()) for _, w in group), np.zeros(3)
        for ids, w in group[rank::a.workers]:
            with torch.no_grad(), amp(): e, h, lg, w = teach(m, ids, w)
            aim = torch.softmax(lg[w].float(), -1)
            with amp(): ls = [F.cross_entropy(m.logits(o[w]).float(), aim, reduction='sum')/n for o in head(e, h)]
            (ls[0] + .5*ls[1] + .3*ls[2]).backward(); ces += [l.item()*a.workers for l in ls]
        share_gradients(head, a)
        nn.utils.clip_grad_norm_(head.parameters(), 1.)
        for o in opts: o.step(); o.zero_grad(set_to_none=True)
        step += 1; losses.append(ces); ema.update(head, step)
        if rank: continue
        if step % 25 == 0: log_line(out, step=step, loss=np.mean(losses, 0).round(4).tolist(), minutes=round((spent+time.time()-t0)/60, 1)); losses = []
        if step % a.every == 0 or step == a.steps:
            torch.save(dict(m=head.state_dict(), ema=ema.w, opts=[o.state_dict() for o in opts], step=step, start=data.start, spent=spent+time.time()-t0), ck)
            e_ = Head(); e_.load_state_dict(ema.w); p = acceptance(m, e_, data, held); log_line(out, step=step, accepted_by_position=p, accepted_k3=round((p[0]+p[1])/2, 4))

def bf16(w): return {k: v.detach().to(torch.bfloat16).contiguous() for k, v in w.items()}

def history(f):
    "A training log, thinned out: the loss every 50 steps, held-out accuracy or acceptance whenever it was measured."
    es = [json.loads(l) for l in f.read_text().splitlines()]
    return [{k: v for k, v in e.items() if k in ('step', 'loss', 'held_out', 'accepted_by_position')} for e in es if 'loss' not in e or e['step'] % 50 == 0]

def export(a, random_weights=False):
    for name, d in (('target', TARGET), ('head', HEAD)):
        if (f := a.work/f'{name}.jsonl').exists() and not random_weights: (d/'training.json').write_text('[' + ',\n '.join(map(json.dumps, history(f))) + ']\n')
    write(TARGET/'config.json', CONFIG); write(HEAD/'config.json', HEAD_CONFIG)
    torch.manual_seed(0)
    t = Target().state_dict() if random_weights else torch.load(a.work/'target.pt', weights_only=False)['ema']
    save_file(bf16(t), TARGET/'model.safetensors', metadata=dict(format='mlx'))
    h = Head().state_dict() if random_weights or not (a.work/'head.pt').exists() else torch.load(a.work/'head.pt', weights_only=False)['ema']
    save_file(bf16(h), HEAD/'model.safetensors', metadata=dict(format='mlx'))
    for p in (TARGET, HEAD): (p/'model.safetensors').chmod(0o644)
    print({p.name: p.stat().st_size for d in (TARGET, HEAD) for p in d.iterdir()})

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('what', choices=['tokenizer', 'target', 'head', 'export'])
    p.add_argument('--steps', type=int, default=4000); p.add_argument('--lr', type=float, default=.012); p.add_argument('--tokens', type=int, default=3072)
    p.add_argument('--seed', type=int, default=0); p.add_argument('--every', type=int, default=250); p.add_argument('--threads', type=int, default=2)
    p.add_argument('--workers', type=int, default=2); p.add_argument('--stories', type=int, default=800); p.add_argument('--work', type=Path, default=ROOT/'_train'); p.add_argument('--assets', type=Path, default=ASSETS)
    a = p.parse_args(); a.work.mkdir(parents=True, exist_ok=True); use_assets(a.assets); torch.set_num_threads(a.threads)
    if a.what == 'tokenizer': train_tokenizer(); export(a, random_weights=True)
    elif a.what == 'target': run_workers(train_target, a)
    elif a.what == 'head':
        if a.workers > 1 and not (a.work/'stories.json').exists(): train_stories(a)
        run_workers(train_head, a)
    else: export(a)

if __name__ == '__main__': main()
