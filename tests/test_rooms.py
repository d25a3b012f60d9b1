"The plan of the house: rooms import only from rooms above them, and those that need no MLX stay without it."
import ast
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
NO_MLX = ('core config access connection metrics blas text sequence reply policy evidence hints gate budget pilot policy_cli admission bands scheduler shelf errors '
          'stand_in wire wire_chat wire_completions edge feed host server serving demo exercises curriculum doctor cli').split()
HEAVY = {'mlx', 'mlx_lm', 'transformers', 'torch'}


def rooms():
    "Module path in the package -> stem of its notebook."
    found = {}
    for nb in (ROOT/'nbs').glob('[0-9]*.ipynb'):
        text = '\n'.join(''.join(c['source']) for c in json.loads(nb.read_text())['cells'])
        if m := re.search(r'^#\| *default_exp +(\S+)', text, re.M): found[m[1]] = nb.stem
    return found


def imported(module):
    "Modules of the package that a module imports, anywhere in it, by their path in the package."
    here = ['mlxspec', *module.split('.')][:-1]
    for n in ast.walk(ast.parse((ROOT/'mlxspec'/(module.replace('.', '/') + '.py')).read_text())):
        if isinstance(n, ast.Import): names = [a.name for a in n.names]
        elif isinstance(n, ast.ImportFrom):
            base = '.'.join([*(here[:len(here) - n.level + 1] if n.level else []), *([n.module] if n.module else [])])
            names = [base, *(f'{base}.{a.name}' for a in n.names)]
        else: continue
        yield from (x.removeprefix('mlxspec.') for x in names if x.startswith('mlxspec.'))


def test_imports_point_up():
    known = rooms()
    wrong = [f'{nb} imports {known[m]}' for room, nb in known.items() for m in imported(room) if m in known and known[m] > nb]
    assert not wrong


def test_every_module_has_a_notebook():
    modules = {str(p.relative_to(ROOT/'mlxspec').with_suffix('')).replace('/', '.') for p in (ROOT/'mlxspec').rglob('*.py')}
    assert {m for m in modules if not m.endswith(('__init__', '_modidx'))} == set(rooms())


def test_rooms_without_mlx_stay_without_it():
    here = [m for m in NO_MLX if m in rooms()]
    code = f'import sys\nfor m in {here}: __import__("mlxspec." + m)\nprint(*sys.modules)'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(done.stdout.split())
