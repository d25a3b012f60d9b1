"Docs in step: README, site map, option table, and notebooks that the site can be built from."
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from nbdev.config import get_config

from mlxspec.config import options_markdown

ROOT = Path(__file__).parent.parent
NBS = sorted((ROOT/'nbs').glob('*.ipynb'))
README = (ROOT/'README.md').read_text()
sys.path.insert(0, str(ROOT/'tools'))


def cells(nb, kind): return [''.join(c['source']) for c in json.loads(nb.read_text())['cells'] if c['cell_type'] == kind]


def commands():
    "The shell blocks of the README."
    return re.findall(r'^```sh\n(.*?)^```', README, re.M | re.S)


def test_readme_is_the_index_page():
    from readme import readme
    assert readme(get_config(ROOT)) == README


def test_readme_links_lead_somewhere():
    for target in re.findall(r'\]\((?!http)([^)#]+)', README): assert (ROOT/target).exists(), target


def test_one_command_runs_and_one_tests():
    runs = [c for c in commands() if 'pip install' in c]
    assert len(runs) == 2 and all(len(c.splitlines()) == 1 for c in runs)
    assert runs[0].strip().endswith('.venv/bin/mlxspec demo && .venv/bin/mlxspec serve')
    last = (ROOT/'.ci'/'run').read_text().strip().splitlines()[-1]
    assert runs[1].strip().endswith(f'&& {last}')          # CI ends with the README's test command
    extras = tomllib.loads((ROOT/'pyproject.toml').read_text())['project']['optional-dependencies']
    for c in runs:
        for name in re.search(r'\.\[(.*?)\]', c)[1].split(','): assert name in extras
        assert c.split(' && ')[1].split('install ')[1] in (ROOT/'.ci'/'run').read_text() or runs.index(c) == 0


def test_the_site_has_every_page_once_in_order():
    side = yaml.safe_load((ROOT/'_quarto.yml').read_text())['website']['sidebar']['contents']
    listed = [p for s in side for p in (s['contents'] if isinstance(s, dict) else [s])]
    assert listed == ['index.ipynb', *(p.name for p in NBS if p.name != 'index.ipynb')]


@pytest.mark.parametrize('nb', NBS, ids=lambda p: p.stem)
def test_no_page_keeps_what_went_to_stderr(nb):
    "It depends on the machine: warnings, progress bars."
    for c in json.loads(nb.read_text())['cells']:
        for o in c.get('outputs', []): assert o.get('name') != 'stderr', (c['id'], o['text'])


def test_the_option_table_is_in_the_docs():
    out = [''.join(o['data'].get('text/markdown', '')) for c in json.loads((ROOT/'nbs'/'01_config.ipynb').read_text())['cells']
           for o in c.get('outputs', []) if 'data' in o]
    assert options_markdown() in out


@pytest.mark.parametrize('nb', NBS, ids=lambda p: p.stem)
def test_a_page_begins_as_pages_do(nb):
    head = cells(nb, 'markdown')[0].splitlines()
    assert head[0].startswith('# ') and head[2].startswith('> ')
    code = cells(nb, 'code')
    if any(c.startswith('#| export') for c in code): assert code[0].startswith('#| default_exp ')
