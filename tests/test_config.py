"The option table from every side: sources, words, files, and that nothing in it is dead."
import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mlxspec
from mlxspec.config import FALSE, SAMPLING, TABLE, TRUE, load_settings, read_file
from mlxspec.core import ConfigError

PACKAGE = Path(mlxspec.__file__).parent
OTHER = dict(float=0.5, str='x', Path=Path('x'))
BOOLS = [r.name for r in TABLE.values() if r.kind == 'bool']


def other(row):
    "A value that is not the default."
    if row.choices: return next((c for c in row.choices if c != row.default), row.default)
    if row.kind == 'int': return max(3, row.lo or 0)
    return (not row.default) if row.kind == 'bool' else OTHER[row.kind]


def toml(value):
    "A value as TOML writes it."
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, (int, float)) else f'"{value}"'


@pytest.mark.parametrize('name', TABLE)
def test_every_option_from_every_source(name, tmp_path):
    row, value = TABLE[name], other(TABLE[name])
    config = tmp_path/'c.toml'
    config.write_text('')
    if name == 'config': value = config
    assert getattr(load_settings({name: str(value)}, {}, []), name) == value
    s = load_settings({}, {row.env: f' {value} '}, [])
    assert (getattr(s, name), s.origin(name)) == (value, row.env)
    s = load_settings({}, {row.env: '  '}, [])
    assert (getattr(s, name), s.origin(name)) == (row.default, 'default')
    if name == 'config' or not row.commands: return
    config.write_text(f'{name} = {toml(value)}')
    s = load_settings({}, {}, [config])
    assert (getattr(s, name), s.origin(name)) == (value, str(config))
    assert getattr(load_settings({}, {}, []).replace(**{name: value}), name) == value


@pytest.mark.parametrize('name', BOOLS)
def test_every_word_of_every_boolean(name):
    for words, value in (TRUE, True), (FALSE, False):
        for w in words:
            for form in (w, w.upper(), f'\t{w} '):
                assert getattr(load_settings({}, {TABLE[name].env: form}, []), name) is value
    for bad in ('maybe', '2', 'y', 't', '-1', 'none', 'nul l'):
        with pytest.raises(ConfigError, match=f'^{TABLE[name].env} must be 1, true, yes, on, 0, false, no or off, not '):
            load_settings({}, {TABLE[name].env: bad}, [])


def test_command_line_over_environment_over_file_over_user_file(tmp_path):
    near, far = tmp_path/'near.toml', tmp_path/'far.toml'
    near.write_text('port = 3'), far.write_text('port = 4\nhost = "far"')
    env = dict(MLXSPEC_PORT='2')
    assert load_settings(dict(port='1'), env, [near, far]).port == 1
    assert load_settings({}, env, [near, far]).port == 2
    assert load_settings({}, {}, [near, far]).port == 3
    s = load_settings({}, {}, [far])
    assert (s.port, s.host, s.origin('port')) == (4, 'far', str(far))


def test_usual_files(tmp_path, monkeypatch):
    user = tmp_path/'config'/'mlxspec'
    user.mkdir(parents=True), (user/'mlxspec.toml').write_text('port = 4\nhost = "user"')
    monkeypatch.setenv('XDG_CONFIG_HOME', str(tmp_path/'config')), monkeypatch.chdir(tmp_path)
    assert load_settings({}, {}).port == 4
    Path('mlxspec.toml').write_text('port = 3')
    assert load_settings({}, {}).port == 3
    Path('named.toml').write_text('top_k = 9')
    s = load_settings(dict(config='named.toml'), {})      # takes the place of ./mlxspec.toml, not of the user's
    assert (s.top_k, s.port, s.host) == (9, 4, 'user')
    with pytest.raises(ConfigError, match='^Cannot read the config file gone.toml: No such file'):
        load_settings(dict(config='gone.toml'), {})


@pytest.mark.parametrize('text, sentence', [
    ('port', 'is not valid TOML'), ('port = [1]', 'must be a whole number'), ('port = 1.5', 'must be a whole number'),
    ('port = true', 'must be a whole number'), ('no_spec = 1', 'must be true or false'), ('prot = 1', 'Did you mean port'),
    ('[port]\nx = 1', 'must be a whole number'), ('[serve]\nport = 1', "Unknown option 'serve'"), ('temperature = nan', 'between 0 and 2'),
    ('scheduler_mode = "hyperr"', 'scheduler_mode in .* must be serial, cooperative, ar_batch, mtp_batch, mtp_cohort_experimental or hyper, not'), ('config = "x"', 'set MLXSPEC_CONFIG instead'),
    ('blas = "off"', 'set MLXSPEC_BLAS instead'), ('model = ""', 'must be non-empty text')])
def test_a_wrong_file_is_one_sentence(text, sentence, tmp_path):
    f = tmp_path/'c.toml'
    f.write_text(text)
    with pytest.raises(ConfigError, match=sentence) as e: read_file(f)
    assert str(f) in str(e.value) and '\n' not in str(e.value)


def test_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match='Is a directory'): read_file(tmp_path)
    (tmp_path/'b').write_bytes(b'\xff\xfe')
    with pytest.raises(ConfigError, match='is not valid TOML'): read_file(tmp_path/'b')


def modules():
    "Source of every exported module, by path in the package."
    return {p.relative_to(PACKAGE): p.read_text() for p in PACKAGE.rglob('*.py') if p.name != '_modidx.py'}


def test_only_config_reads_the_environment():
    readers = {p.name for p, s in modules().items() for n in ast.walk(ast.parse(s))
               if isinstance(n, ast.Attribute) and n.attr in ('environ', 'getenv') or isinstance(n, ast.alias) and n.name in ('environ', 'getenv')}
    assert readers == {'config.py'}


def reads(tree):
    "Names of options that a module reads: settings.NAME, or 'NAME' handed to a function such as raw_env."
    for n in ast.walk(tree):
        if isinstance(n, ast.Attribute) and getattr(n.value, 'attr', getattr(n.value, 'id', '')) in ('settings', 's'): yield n.attr
        if isinstance(n, ast.Call): yield from (a.value for a in n.args if isinstance(a, ast.Constant))


def test_no_option_is_dead():
    "Some other module reads each of them; the sampling defaults go together."
    used = {name for p, s in modules().items() if p.name != 'config.py' for name in reads(ast.parse(s))} | {'config'}
    if 'params' in used: used |= set(SAMPLING)
    if 'places' in used: used |= {'max_active_requests'}
    assert sorted(set(TABLE) - used) == []


def test_config_imports_nothing_heavy():
    code = 'import sys, mlxspec.config; print(*sys.modules)'
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True, env=dict(os.environ)).stdout.split()
    assert not {'mlx', 'mlx.core', 'mlx_lm', 'numpy', 'transformers', 'rich', 'fastapi', 'platformdirs'} & set(out)
