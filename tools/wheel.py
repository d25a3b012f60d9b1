"Check that a wheel holds the package as it is in this tree, demo weights included: python tools/wheel.py dist/*.whl"
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
WEIGHTS = 'mlxspec/assets/mlxspec-demo/model.safetensors'
LIMIT = 8 * 1024 * 1024   # bytes of assets


def tree():
    "Files of the package, by their names in a wheel."
    files = (p for p in (ROOT/'mlxspec').rglob('*') if p.is_file() and '__pycache__' not in p.parts)
    return {p.relative_to(ROOT).as_posix() for p in files}


def faults(wheel):
    "Sentences about what is wrong with the wheel."
    sizes = {i.filename: i.file_size for i in zipfile.ZipFile(wheel).infolist()}
    package = {n for n in sizes if not n.split('/')[0].endswith('.dist-info')}
    for name in sorted(tree() - package): yield f'{name} is missing.'
    for name in sorted(package - tree()): yield f'{name} does not belong in it.'
    if sizes.get(WEIGHTS, 0) < 100_000: yield 'The demo weights are not there.'
    assets = sum(s for n, s in sizes.items() if n.startswith('mlxspec/assets/'))
    if assets > LIMIT: yield f'The assets take {assets / 2**20:.1f} MiB, more than {LIMIT / 2**20:.0f}.'


if __name__ == '__main__':
    found = [f'{w}: {f}' for w in sys.argv[1:] for f in faults(w)]
    if found or not sys.argv[1:]: sys.exit('\n'.join(found) or __doc__)
