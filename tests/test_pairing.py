"""Whatever is wrong with a drafter is found when it is loaded, said in one sentence, and either ends the program or is left out with its
reason, as the options say."""
import json
import shutil

import mlx.core as mx
import pytest

from mlxspec.cli import main
from mlxspec.config import Settings
from mlxspec.core import MlxspecError, PairError
from mlxspec.engine import Engine
from mlxspec.memory import measure
from mlxspec.pairing import gather
from mlxspec.target import Target
from mlxspec.tiny import save_tiny, save_tiny_mtp
from mlxspec.tiny_drafters import save_tiny_dflash, save_tiny_eagle3

pytestmark = pytest.mark.usefixtures('quiet')


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    return tmp_path_factory.mktemp('pairing')


@pytest.fixture(scope='module')
def target(root):
    return Target.load(save_tiny(root / 'target', 'qwen3_5'))


def changed(path, src, config=None, weights=None):
    "A copy of a drafter with other settings or tensors."
    shutil.copytree(src, path, dirs_exist_ok=True)
    if config: (path / 'config.json').write_text(json.dumps(json.loads((path / 'config.json').read_text()) | config))
    if weights:
        ws = weights(dict(mx.load(str(path / 'model.safetensors'))))
        mx.eval(ws)
        (path / 'model.safetensors').unlink()
        mx.save_safetensors(str(path / 'model.safetensors'), ws, metadata={'format': 'mlx'})
    return str(path)


def broken(root):
    "Name of a fault -> what is asked for, and words of the sentence."
    mtp, eagle, dflash = save_tiny_mtp(root / 'mtp'), save_tiny_eagle3(root / 'eagle'), save_tiny_dflash(root / 'dflash')
    (root / 'empty').mkdir()
    (root / 'weightless').mkdir()
    (root / 'weightless' / 'config.json').write_text('{"model_type": "qwen3_5_mtp"}')
    renamed = lambda w: {('fc.extra' if k == 'fc.weight' else k): v for k, v in w.items()}
    return dict(
        nothing_there=(str(root / 'no' / 'such'), 'neither a drafter kind'),
        a_file=(str(mtp / 'config.json'), 'nor a directory'),
        empty=(str(root / 'empty'), 'no config.json'),
        weightless=(str(root / 'weightless'), 'no weights'),
        unknown=(changed(root / 'unknown', mtp, dict(model_type='from_tomorrow')), 'model_type from_tomorrow'),
        missing=(changed(root / 'missing', mtp, weights=lambda w: {k: v for k, v in w.items() if k != 'fc.weight'}), 'fc.weight'),
        extra=(changed(root / 'extra', eagle, weights=renamed), 'fc.extra'),
        unsaid_quantisation=(changed(root / 'packed', eagle, weights=packed_fc), 'fc.scales'),
        hidden_size=(str(save_tiny_mtp(root / 'wide', hidden_size=48)), 'hidden size 48, target has 32'),
        vocabulary=(str(save_tiny_mtp(root / 'words', vocab_size=300)), 'vocabulary of 300, target has 264'),
        draft_vocabulary=(changed(root / 'd2t', eagle, weights=lambda w: w | dict(d2t=w['d2t'] + 999)), 'd2t leads to ids outside'),
        no_such_layer=(str(save_tiny_eagle3(root / 'deep', taps=(0, 1, 9))), 'has only 4'),
        block_size=(f'{dflash}@9', 'blocks of 8 rows; K = 9 is more'),
        no_head_inside=('qwen3_5_mtp', 'no mtp.* tensors'),
        needs_a_directory=('eagle3', 'directory of its own'),
        other_family=(f'{mtp}@eagle3', 'cannot be loaded as an eagle3 head'),
        no_such_family=(f'{mtp}@magic', 'no drafter kind magic'))


def asked(drafter, **more):
    "Settings as the command line would make them; K or a family after @."
    name, _, tail = drafter.partition('@')
    extra = {} if not tail else dict(draft_block_size=int(tail)) if tail.isdigit() else dict(draft_kind=tail)
    options = dict(drafter=name) | extra | more
    return Settings(**options, origins={n: f'--{n}' for n in options})


def test_every_fault_has_its_sentence(root, target):
    for name, (drafter, words) in broken(root).items():
        for said in ({}, dict(speculation='required')):
            with pytest.raises(MlxspecError) as e: gather(target, asked(drafter, **said))
            assert words in str(e.value) and e.value.exit_code == 2 and '\n' not in str(e.value), (name, str(e.value))
        d = gather(target, asked(drafter, speculation='auto'))
        assert not d.made and d.reason == 'pair_error' and words in d.sentence, name


def packed_fc(w): return w | dict(zip(('fc.weight', 'fc.scales', 'fc.biases'), mx.quantize(w['fc.weight'], 32, 4), strict=True))


def trellis(w): return {k.replace('fc.weight', 'fc.trellis'): v for k, v in w.items()}


def nine(root):
    "One of each kind of fault in a pair -> what is asked for, and words of the sentence."
    mtp = save_tiny_mtp(root / 'nine' / 'mtp')
    (root / 'nine' / 'bare').mkdir()
    (root / 'nine' / 'bare' / 'config.json').write_text('{"model_type": "qwen3_5_mtp"}')
    other = save_tiny(root / 'nine' / 'other', 'llama')
    table = json.loads((other / 'tokenizer.json').read_text())
    vocab = table['model']['vocab']
    vocab['a'], vocab['b'] = vocab['b'], vocab['a']
    (other / 'tokenizer.json').write_text(json.dumps(table))
    return dict(
        vocabulary=(str(save_tiny_mtp(root / 'nine' / 'words', vocab_size=300)), 'vocabulary of 300, target has 264'),
        hidden_size=(str(save_tiny_mtp(root / 'nine' / 'wide', hidden_size=48)), 'hidden size 48, target has 32'),
        tokenizer=(str(other), 'another tokenizer than target'),
        k_out_of_range=(f'{save_tiny_dflash(root / "nine" / "dflash")}@9', 'blocks of 8 rows; K = 9 is more'),
        tensors=(changed(root / 'nine' / 'missing', mtp, weights=lambda w: {k: v for k, v in w.items() if k != 'fc.weight'}), 'fc.weight'),
        no_weights=(str(root / 'nine' / 'bare'), 'no weights'),
        quantisation=(changed(root / 'nine' / 'odd', mtp, dict(quantization_config=dict(quant_method='exl3')), trellis), 'packed by exl3'),
        no_path=(str(root / 'nine' / 'nowhere' / 'at all'), 'neither a drafter kind'),
        memory=(str(mtp), 'the largest context that fits is'))


def test_nine_faults_from_start_to_answer(root, target, capsys):
    "`required` ends with 2 and the sentence; `auto` serves plain text, with the reason for /health and in the answer's stats."
    limit = measure(target, gather(target, asked(str(save_tiny_mtp(root / 'fits')))).made, 8).total(100) / 1e9 # of the pair; the target alone takes 512 there
    for name, (drafter, words) in nine(root).items():
        path, _, k = drafter.partition('@')
        more = dict(draft_block_size=int(k)) if k else dict(memory_limit=limit, context_length=512) if name == 'memory' else {}
        flags = [f for n, v in more.items() for f in (f'--{n.replace("_", "-")}', str(v))]
        assert main(['generate', '-p', 'x', '--model', str(root / 'target'), '--drafter', path, '--speculation', 'required', *flags]) == 2, name
        said = capsys.readouterr().err.strip()
        assert words in said and '\n' not in said, (name, said)
        with Engine.load(root / 'target', path, speculation='auto', cache_dir=root / 'cache', max_tokens=3, **more) as e:
            seen, r = e.snapshot()['speculation'], e.generate('Hello')
        reason = 'no_memory' if name == 'memory' else 'pair_error'
        assert (seen['drafters'], seen['reason']) == ([], reason) and words in seen['detail'], (name, seen)
        assert r.stats.reasons[reason] == 3 and not r.stats.drafted, name


def test_auto_serves_plain_and_says_why(root, target):
    with Engine.load(root / 'target', str(save_tiny_mtp(root / 'wide2', hidden_size=48)), speculation='auto', cache_dir=root / 'cache') as e:
        r = e.generate('Hello', max_tokens=4)
        assert r.stats.reasons['pair_error'] == 4 and not r.stats.drafted
        said = e.snapshot()['speculation']
        assert said['drafters'] == [] and said['reason'] == 'pair_error' and 'hidden size 48' in said['detail']


def test_the_command_line_ends_with_2(root, target, capsys):
    bad = str(save_tiny_mtp(root / 'wide3', hidden_size=48))
    for more in ([], ['--speculation', 'required']):
        assert main(['generate', '-p', 'x', '--model', str(root / 'target'), '--drafter', bad, *more]) == 2
        assert 'hidden size 48, target has 32' in capsys.readouterr().err
    memory = ['generate', '-p', 'x', '--model', str(root / 'target'), '--memory-limit', '0.0002']
    assert main(memory) == 2 and 'Not enough memory for a context of 512 tokens: target' in capsys.readouterr().err
    assert main(['generate', '-p', 'x', '--model', str(root / 'mtp')]) == 2 # a head is no target
    assert 'mtp' in capsys.readouterr().err


def test_several_at_once_in_order(root, target):
    names = [str(save_tiny_dflash(root / 'dflash2')), 'lookup', str(save_tiny_eagle3(root / 'eagle2'))]
    with Engine.load(root / 'target', ','.join(names), cache_dir=root / 'cache', mtp_gate='force', max_tokens=12) as e:
        assert e.drafters == ('dflash', 'lookup', 'eagle3')
        plain = e.generate('Hello, hello, hello', speculate=False)
        for kinds in (True, ('eagle3',), ('lookup', 'eagle3')):
            r = e.generate('Hello, hello, hello', speculate=kinds)
            assert [t.id for t in r.tokens] == [t.id for t in plain.tokens] and r.stats.rounds
            assert set(r.stats.sources) <= ({'dflash'} if kinds is True else set(kinds))


@pytest.mark.parametrize('bits', (None, 4))
@pytest.mark.parametrize('dtype', (mx.float16, mx.bfloat16))
def test_precisions_go_together(root, target, dtype, bits):
    "16 bits and packed, in every combination; and packed when it is loaded."
    from mlxspec.tiny import packed, save_weights, tiny_config, tiny_model
    path = save_tiny(root / f'{dtype}{bits}', 'llama', dtype)
    if bits: save_weights(path, packed(tiny_model('llama', dtype), 4), tiny_config('llama') | dict(eos_token_id=258, quantization=dict(group_size=32, bits=4)))
    for draft_bits in (None, 8):
        with Engine.load(path, str(save_tiny(root / f'small{dtype}', 'llama', dtype, seed=1)), quantize_drafter=draft_bits, cache_dir=root / 'cache',
                         mtp_gate='force', exactness='off', mtp_allow_inexact=True, max_tokens=6) as e:
            assert e.generate('Hi').stats.rounds


def test_a_prediction_comes_first_and_changes_nothing(root, target):
    with Engine.load(root / 'target', cache_dir=root / 'cache', mtp_gate='force', max_tokens=32) as e:
        plain = e.generate('Hello', speculate=False)
        ids = tuple(t.id for t in plain.tokens)
        r = e.generate('Hello', prediction=ids)
        assert tuple(t.id for t in r.tokens) == ids and r.stats.rounds + r.stats.plain_steps == 4 # 32 tokens, K = 8
        assert r.stats.sources == {'prediction': [28, 28]}
        for text in ('', 'something else entirely', plain.text):
            assert [t.id for t in e.generate('Hello', prediction=text).tokens] == list(ids)
        assert not e.generate('Hello', prediction=ids, speculate=('lookup',)).stats.sources.get('prediction')
        with pytest.raises(MlxspecError, match='prediction has 600 tokens'): e.generate('Hello', prediction=(1,) * 600)


def test_a_prediction_is_wider_than_the_head(root, target):
    "A head keeps its own K; a prediction that comes with a request takes what is exact. One K for all when it was asked for."
    for k, widest in ((None, (3, 8)), (2, (2, 2)), (5, (5, 5))):
        with Engine.load(root / 'target', str(save_tiny_mtp(root / 'narrow')), cache_dir=root / 'cache', mtp_gate='force', enable_mtp_b1=True, max_tokens=40, draft_block_size=k) as e:
            r = e.generate('Hello')
            ids = tuple(t.id for t in r.tokens)
            assert max(r.stats.per_step_drafted) == widest[0] - 1 and set(r.stats.sources) == {'qwen3_5_mtp'}
            r = e.generate('Hello', prediction=ids)
            assert tuple(t.id for t in r.tokens) == ids and r.stats.rounds + r.stats.plain_steps == -(-40 // widest[1])


def test_packing_to_an_odd_number_of_bits_is_refused(root, target):
    with pytest.raises(PairError, match='cannot be packed to 7 bits'): gather(target, asked(str(save_tiny_eagle3(root / 'eagle3')), quantize_drafter=7))
