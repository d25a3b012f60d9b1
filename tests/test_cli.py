"The command line as a person or a script meets it: output, exit codes, one sentence per mistake."
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mlxspec import cli
from mlxspec.core import Emitted

MLXSPEC = str(Path(sys.executable).with_name('mlxspec'))
SHORT = '--max-tokens=12'


def run(*args, env=None, cwd=None, stdin=''):
    "Run the script in a process of its own."
    return subprocess.run([MLXSPEC, *args], capture_output=True, text=True, timeout=120, env={**os.environ, **(env or {})},
                          cwd=cwd, input=stdin)


def refused(done, *words, code=2):
    "Nothing on stdout, one sentence on stderr."
    assert (done.returncode, done.stdout) == (code, '')
    assert done.stderr.startswith('mlxspec: ') and done.stderr.count('\n') == 1 and done.stderr.rstrip()[-1] in '.?'
    for w in words: assert w in done.stderr


def main(capsys, *args):
    "Run in this process: exit code and what was printed."
    code = cli.main(list(args))
    return code, capsys.readouterr().out


def test_help_needs_no_mlx():
    code = ('import sys; from mlxspec.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n'
            'assert not {"mlx", "mlx_lm", "numpy", "rich", "fastapi"} & set(sys.modules)')
    for args in ([], ['--help'], ['--version'], ['version'], ['serve', '--help'], ['serve', '--print-config'], ['policy', 'show', '--help'],
                 ['policy', 'show'], ['policy', 'export'], ['policy', 'clear'], ['policy', '--help'], ['policy', '-h'], ['config', '--help']):
        done = subprocess.run([sys.executable, '-c', code, *args], capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout and not done.stderr, done.stderr


def test_help_lists_every_option():
    text = run('serve', '--help').stdout
    for r in cli.TABLE.values(): assert (r.flag in text.split()) == ('serve' in r.commands), r.flag
    assert all(c in run('--help').stdout for c in cli.COMMANDS)
    assert [line.split()[1] for line in run('policy', '--help').stdout.splitlines() if line.startswith('  ')] == ['show', 'export', 'clear']


def test_version():
    import mlxspec
    assert run('--version').stdout == f'mlxspec {mlxspec.__version__}\n'
    assert run('version').stdout.splitlines()[0] == f'mlxspec {mlxspec.__version__}'


@pytest.mark.parametrize('args, words', [
    (['demos'], ['Unknown command', 'Did you mean demo?']), (['--port', '1', 'serve'], ['after the command']),
    (['serve', '--prot', '1'], ['--prot', 'Did you mean --port?']), (['serve', '--por=1'], ['Did you mean --port?']),
    (['serve', '--port', 'x'], ['--port must be a whole number between 0 and 65535']), (['serve', '--port'], ['--port']),
    (['serve', '--scheduler-mode', 'hype'], ['--scheduler-mode must be serial, cooperative']), (['serve', '--blas', 'off'], ['MLXSPEC_BLAS']),
    (['serve', '--no-spec', 'maybe'], ['--no-spec must be 1, true']), (['serve', 'now'], ["Unexpected argument 'now'"]),
    (['serve', '--config', 'gone.toml'], ['Cannot read the config file gone.toml']),
    (['policy'], ['one more word: show, export or clear']), (['policy', 'shwo'], ['one more word']), (['polcy', 'show'], ['Did you mean policy?']),
    (['policy', 'show', '--port', '1'], ['--port is an option of mlxspec serve']), (['policy', 'show', '--url', 'x'], ['http://']),
    (['policy', 'show', '--url', 'http://127.0.0.1:1'], ['No server answers at http://127.0.0.1:1']), (['policy', 'clear', '--url', 'http://x'], ['--url']),
    (['generate'], ['mlxspec generate TEXT', '-p TEXT']), (['generate', 'x', '-p', 'y'], ['once']), (['generate', 'two', 'words'], ["'words'", 'quotes']), (['generate', ''], ['The prompt is empty.']), (['generate', '-p', ' \n'], ['The prompt is empty.']), (['generate', '-p', '-'], ['The prompt is empty.']),
    (['config', 'set', 'scheduler_mode', 'turbo'], ['--scheduler-mode must be serial, cooperative']), (['config', 'set', 'scheduler_mod', 'x'], ['Did you mean scheduler_mode?']),
    (['config', 'set', 'scheduler_mode'], ['scheduler_mode needs a value']),
    (['generate', '-p', 'x', '--host', 'y'], ['--host is an option of mlxspec serve']), (['generate', '-p', 'x', '--seed', 'y'], ['--seed']),
    (['generate', '-p', 'x', '--temperature', 'nan'], ['between 0 and 2']), (['generate', '-p', 'x', '--json', '--show'], ['--json and --show']),
    (['serve', '--cache-dir', '~nobody-of-this-name/x'], ['--cache-dir must be a path']), (['serve', '--config='], ['--config must be a path']),
    (['serve', '--served-model-name', b'\xff'], ['--served-model-name must be non-empty text'])])
def test_a_mistake_is_one_sentence(args, words, tmp_path): refused(run(*args, cwd=tmp_path), *words)


@pytest.mark.parametrize('args, words', [
    (['generate', '-p', 'x', '--model', 'gone/away/model'], ['gone/away/model']), (['serve', '--model', './gone'], ['./gone']),
    (['generate', '-p', 'x', '--drafter', 'lokup'], ['lokup', 'lookup']), (['demo', '--drafter', 'none'], ['nothing to compare']),
    (['generate', '-p', 'x', '--speculation', 'required', '--no-spec'], ['required'])])
def test_a_mistake_found_while_loading_is_one_sentence_too(args, words, tmp_path): refused(run(*args, cwd=tmp_path), *words)


def test_mistakes_in_the_environment_and_in_files(tmp_path):
    refused(run('serve', env=dict(MLXSPEC_NO_SPEC='maybe')), 'MLXSPEC_NO_SPEC must be 1, true, yes, on, 0, false, no or off')
    (tmp_path/'mlxspec.toml').write_text('prot = 1')
    refused(run('demo', cwd=tmp_path), 'mlxspec.toml', 'Did you mean port?')
    (tmp_path/'mlxspec.toml').write_text('prot =')
    refused(run('generate', '-p', 'x', cwd=tmp_path), 'mlxspec.toml is not valid TOML')


@pytest.mark.skipif(sys.platform != 'linux', reason='backends are extras on Linux only')
def test_mlx_without_a_backend_names_the_extras(tmp_path):
    (tmp_path/'mlx').mkdir()
    (tmp_path/'mlx'/'core.py').write_text('raise ImportError("libmlx.so: cannot open shared object file: No such file or directory")')
    for args in (['generate', '-p', 'x'], ['demo'], ['serve']):
        refused(run(*args, env=dict(PYTHONPATH=str(tmp_path))), 'libmlx.so', 'mlxspec[cpu]', 'mlxspec[cuda12]', 'mlxspec[cuda13]')


def test_a_busy_port_is_exit_3():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0)), s.listen()
        refused(run('serve', '--port', str(s.getsockname()[1])), 'port', code=3)


def test_print_config(tmp_path):
    (tmp_path/'mlxspec.toml').write_text('top_k = 7')
    lines = run('serve', '--print-config', '--port', '9', env=dict(MLXSPEC_HOST='::1'), cwd=tmp_path).stdout.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert (rows['port'], rows['host'], rows['top_k']) == (['9', '--port'], ['::1', 'MLXSPEC_HOST'], ['7', 'mlxspec.toml'])
    assert list(rows) == list(cli.TABLE)


def test_policy(capsys, tmp_path, monkeypatch):
    from mlxspec.evidence import Estimate
    from mlxspec.hints import Hint, HintFile, HintKey, hint_dir
    show = lambda what: main(capsys, 'policy', what, '--cache-dir', str(tmp_path))
    code, text = show('show')
    assert code == 0 and text.startswith(f'Nothing is stored in {tmp_path}/mtp-policy. `mlxspec serve` stores ') and show('export') == (0, '[]\n')
    key = HintKey('t', 'd', 'M5-16c', 4, '0.32.4', '0.32.2')
    for k, by in ((4, 'measured'), (2, 'static_default')):
        e = Estimate(1.01, .97, 1.06, 10., 9.9, 2.5, (.5,) * (k - 1), .5)
        HintFile(hint_dir(tmp_path), HintKey(**vars(key) | dict(block_size=k))).save(Hint('enable', by, .5, 4, 4, e, 1.77e9 + k, 'T', 'D'))
    (hint_dir(tmp_path)/'0.json').write_text('{}')
    code, text = show('show')
    lines = text.splitlines()
    assert code == 0 and lines[0] == 'T with D, on M5-16c, K = 2' and lines[1].strip() == 'not measured: hardware default, MTP is on'
    assert lines[4] == 'T with D, on M5-16c, K = 4' and lines[5].strip() == 'measured, MTP is on: 1.01 times plain speed (0.97 to 1.06)'
    told = json.loads(show('export')[1])
    assert [(b['schema_version'], b['state'], b['block_size'], b['key']['mlx'], b['settled_by']) for b in told] == [
        (1, 'settled', 2, '0.32.4', 'static_default'), (1, 'settled', 4, '0.32.4', 'measured')]
    assert show('clear') == (0, '3 stored verdicts removed.\n') and show('clear') == (0, '0 stored verdicts removed.\n')
    monkeypatch.setenv('MLXSPEC_CACHE_DIR', str(tmp_path/'elsewhere'))
    assert 'elsewhere' in main(capsys, 'policy', 'show')[1]


def test_generate(capsys):
    ask = ['generate', '-p', 'Repeat: one two one two one two', '--max-tokens', '24']
    code, text = main(capsys, *ask)
    body = json.loads(main(capsys, *ask, '--json', '--seed', '7')[1])
    plain = json.loads(main(capsys, *ask, '--json', '--no-spec')[1])
    shown = main(capsys, *ask, '--show')[1]
    answer = body['choices'][0]['message']['content']
    assert code == 0 and text.rstrip('\n') == answer.rstrip('\n') == plain['choices'][0]['message']['content'].rstrip('\n')
    assert answer.strip() in shown.replace('‹', '').replace('›', '')
    assert body['object'] == 'chat.completion' and body['metrics']['mlxspec']['seed'] == 7
    assert body['usage']['completion_tokens'] == plain['usage']['completion_tokens'] <= 24
    assert plain['metrics']['speculative_decoding']['num_draft_tokens'] == 0


def test_generate_reads_standard_input():
    said = [run('generate', *args, SHORT, stdin='Count from 1 to 5.') for args in (['-p', '-'], ['-'], ['Count from 1 to 5.'], ['--no-spec', 'Count from 1 to 5.'])]
    assert {(d.returncode, d.stdout, d.stderr) for d in said} == {(0, said[0].stdout, '')} and said[0].stdout


def test_demo(capsys):
    code, text = main(capsys, 'demo', '--json', '--prompt', 'Repeat: red blue red blue', '--prompt', 'Count from 1 to 9.', SHORT)
    report = json.loads(text)
    assert code == 0 and report['same_text'] and len(report['answers']) == 2 and report['model'] == 'mlxspec-demo'
    for a in report['answers']:
        assert a['differs_at'] is None and a['completion_tokens'] <= 12 and list(a['arms']) == ['lookup', 'qwen3_5_mtp', 'together']
        for arm in a['arms'].values():
            assert 0 <= arm['accepted'] <= arm['drafted'] and arm['ratio'] > 0
            assert ''.join(p['text'] for p in arm['pieces']) == a['text']


def test_demo_fails_when_a_text_changes(capsys, monkeypatch):
    class Wrong:
        "An engine whose drafter changes the third token."
        def __init__(self, engine): self.engine = engine
        def __enter__(self): return self
        def __exit__(self, *_): self.engine.close()
        def __getattr__(self, name): return getattr(self.engine, name)
        def generate(self, prompt, speculate=True, **params):
            r = self.engine.generate(prompt, speculate=speculate, **params)
            if speculate: r.tokens[2] = Emitted(r.tokens[2].id + 1, 'lookup')
            return r
    load = cli.load
    monkeypatch.setattr(cli, 'load', lambda settings: Wrong(load(settings)))
    code, text = main(capsys, 'demo', '--prompt', 'Count from 1 to 9.', SHORT)
    assert code == 1 and 'TEXTS DIFFER: prompt 1 from token 3.' in text
    code, text = main(capsys, 'demo', '--json', '--prompt', 'Count from 1 to 9.', SHORT)
    assert code == 1 and json.loads(text)['answers'][0]['differs_at'] == 2


def test_an_interrupt_is_quiet():
    # A shell that runs the tests in the background makes its children deaf to SIGINT; a person at a terminal does not.
    listen = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen([MLXSPEC, 'demo'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listen) as p:
        p.stdout.readline()                                # the first answer is there
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=60)
    assert (p.returncode, err) == (130, '')


BUSY = """
import sys, mlx.core as mx, mlxspec.target as t
from mlxspec.cli import main
def load(*a):
    print('loading', flush=True)
    while True: mx.eval(mx.ones((256, 256)) @ mx.ones((256, 256)))
t.load_files = load
sys.exit(main())
"""


@pytest.mark.parametrize('args', [['generate', 'x'], ['serve', '--port', '0']], ids=lambda a: a[0])
def test_an_interrupt_while_loading_is_one_line_and_no_abort(args):
    listen = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen([sys.executable, '-c', BUSY, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=listen) as p:
        assert p.stdout.readline() == 'loading\n'
        p.send_signal(signal.SIGINT)
        try: out, err = p.communicate(timeout=60)
        finally: p.kill()
    assert (p.returncode, out, err) == (130, '', 'mlxspec: interrupted while loading.\n')


def test_what_takes_long_says_so(tmp_path, capsys):
    from mlxspec.tiny import save_tiny, save_tiny_adapter
    model, kept = str(save_tiny(tmp_path/'tiny [4bit]', 'llama')), str(tmp_path/'cache')
    ask = ['generate', 'ab ab ab', '--model', model, '--max-tokens', '4', '--draft-block-size', '2', '--cache-dir', kept]
    told = []
    for more in ([], [], ['--no-spec']):
        assert cli.main([*ask, *more]) == 0
        told.append(capsys.readouterr())
    assert [t.err for t in told] == ['mlxspec: measuring which verify widths of tiny [4bit] are exact here, once per machine ...\n', '', '']
    assert len({t.out for t in told}) == 1 and told[0].out.strip()
    for more, says in ((['--kv-bits', '8'], 'groups of 64 do not divide the 8 numbers of a head'), (['--max-kv-size', '64'], 'makes its caches itself'),
                       (['--kv-bits', '5'], '--kv-bits must be 4 or 8, not'), (['--adapter-path', str(tmp_path/'gone')], 'There is no adapter at'),
                       (['--adapter-path', str(save_tiny_adapter(tmp_path/'wide', 'llama', hidden_size=64))], 'does not fit tiny [4bit]')):
        assert cli.main([*ask, *more]) == 2
        out, err = capsys.readouterr()
        assert out == '' and err.startswith('mlxspec: ') and err.count('\n') == 1 and says in err


def test_a_repository_without_a_network(capsys, monkeypatch, tmp_path):
    from huggingface_hub import constants
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path))
    says = 'mlxspec: nobody/no-such-model is not on this machine'
    assert cli.main(['generate', 'x', '--model', 'nobody/no-such-model']) == 2
    assert capsys.readouterr().err == f'{says}; fetching it from huggingface.co.\n{says}, and HF_HUB_OFFLINE keeps it from being fetched.\n'
    done = run('serve', '--port', '0', '--model', 'nobody/no-such-model', env=dict(HF_HUB_OFFLINE='0', HF_ENDPOINT='http://127.0.0.1:9', HF_HOME=str(tmp_path)))
    assert (done.returncode, done.stdout) == (2, '') and done.stderr.splitlines()[-1] == f'{says}, and huggingface.co cannot be reached.'


def test_a_reader_that_goes_away_is_nobodys_fault():
    r, w = os.pipe()
    os.close(r)
    done = subprocess.run([MLXSPEC, 'version'], stdout=w, stderr=subprocess.PIPE, text=True)
    os.close(w)
    assert (done.returncode, done.stderr) == (141, '')


SAY = ['generate', '-p', 'Repeat: é é “x”', '--max-tokens', '4']


@pytest.mark.parametrize('env', [dict(PYTHONIOENCODING='ascii'), dict(LC_ALL='C', PYTHONUTF8='0', PYTHONCOERCECLOCALE='0')])
def test_a_locale_without_utf8_still_answers(env, monkeypatch):
    for name in ('PYTHONUTF8', 'PYTHONIOENCODING', 'LC_ALL'): monkeypatch.delenv(name, raising=False)
    done = run('demo', '--prompt', SAY[2], '--max-tokens', '2', env=env)
    assert (done.returncode, done.stderr) == (0, '') and '1. Repeat: \\xe9 \\xe9 \\u201cx\\u201d' in done.stdout


def test_a_prompt_that_is_no_text():
    for text in ('\udcff', '\ud83d'): # a stray byte of a command line, and half a character
        with pytest.raises(cli.ConfigError, match='^The prompt is not UTF-8'): cli.prompt_text(text)
    assert cli.prompt_text('\udcc3\udca9') == 'é'
    for args in (['-p', '-'], ['-p', b'\xff\xfe']):
        done = subprocess.run([MLXSPEC, 'generate', *args], input=b'\xff\xfe', capture_output=True)
        assert done.returncode == 2 and done.stdout == b'' and done.stderr.startswith(b'mlxspec: The prompt is not UTF-8 (')


def shell(line):
    "The script as a shell line starts it."
    return subprocess.run(['sh', '-c', line.replace('mlxspec', MLXSPEC)], capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(sys.platform != 'linux', reason='/dev/full')
@pytest.mark.parametrize('line, code, err', [
    ('mlxspec version >&-', 0, ''), ('mlxspec version >&- 2>&- <&-', 0, ''), ('mlxspec generate -p "" 2>&-', 2, ''),
    ('mlxspec generate -p - <&-', 2, 'mlxspec: The prompt is empty: standard input is closed.\n'),
    ('mlxspec version >/dev/full', 74, 'mlxspec: Cannot write the output: No space left on device.\n')])
def test_closed_and_full_streams(line, code, err):
    done = shell(line)
    assert (done.returncode, done.stdout, done.stderr) == (code, '', err)


def test_a_directory_that_is_gone(tmp_path):
    done = shell(f'cd {tmp_path} && mkdir gone && cd gone && rmdir ../gone && mlxspec generate -p x')
    assert (done.returncode, done.stdout) == (2, '') and done.stderr.startswith('mlxspec: The current directory is gone')


def test_a_marked_text_for_a_reader_that_went_away():
    r, w = os.pipe()
    os.close(r)
    console = cli.console()
    console.file = open(w, 'w', buffering=1)
    with pytest.raises(BrokenPipeError): console.print('x\n' * 9999)
    with contextlib.suppress(BrokenPipeError): console.file.close()


def test_config_set_and_doctor(tmp_path):
    where = dict(MLXSPEC_CONFIG=str(tmp_path/'c.toml'), MLXSPEC_CACHE_DIR=str(tmp_path), MLXSPEC_PORT='0')
    def run(*args):
        done = subprocess.run([str(Path(sys.executable).with_name('mlxspec')), *args],
                              capture_output=True, text=True, env=os.environ | where)
        return done.returncode, done.stdout, done.stderr
    (tmp_path/'c.toml').write_text('# mine\n')
    code, out, err = run('config', 'set', '--host', '::1', '--no-spec')
    assert (code, err) == (0, '') and (tmp_path/'c.toml').read_text() == '# mine\nno_spec = true\nhost = "::1"\n'
    assert any(line.split()[:2] == ['host', '::1'] for line in run('config', 'show')[1].splitlines())
    assert run('config', 'set')[0] == 2
    code, out, err = run('config', 'set', 'spec_entry_pin', '0') # a file may not say it
    assert (code, out) == (2, '') and 'MLXSPEC_SPEC_ENTRY_PIN' in err and [p.name for p in tmp_path.iterdir() if 'toml' in p.name] == ['c.toml']
    code, out, err = run('config', 'set', 'scheduler_mode', 'ar_batch', '--no-spec', 'max_active_requests=3', '--no-spec', 'false')
    assert (code, err) == (0, '') and (tmp_path/'c.toml').read_text().splitlines()[2:] == ['host = "::1"', 'max_active_requests = 3', 'scheduler_mode = "ar_batch"'], out + err
    shown = json.loads(run('config', 'show', '--json')[1])
    assert shown['scheduler_mode'] == dict(value='ar_batch', origin=str(tmp_path/'c.toml')) and shown['max_active_requests']['value'] == 3 and shown['no_spec']['value'] is False and shown['api_key']['value'] is None
    code, out, err = run('doctor', '--json', '--host', '127.0.0.1')
    assert (code, err, json.loads(out)['ok']) == (0, '', True), out
    code, out, err = run('doctor', '--host', '0.0.0.0')
    assert (code, err) == (1, '') and 'BAD  key' in out
