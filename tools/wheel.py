"Check that a wheel holds what a user needs and nothing else: python tools/wheel.py dist/mlxspec-*.whl"
import sys
import zipfile

DEMO = 'mlxspec/assets/mlxspec-demo/'
NEEDED = {'mlxspec/py.typed', 'mlxspec/cli.py',
          *(DEMO + f for f in ('config.json', 'model.safetensors', 'tokenizer.json', 'tokenizer_config.json'))}
LIMIT = 8 * 1024 * 1024   # bytes of assets


def faults(wheel):
    "Sentences about what is wrong with the wheel."
    sizes = {i.filename: i.file_size for i in zipfile.ZipFile(wheel).infolist()}
    for name in sorted(NEEDED - sizes.keys()): yield f'{name} is missing.'
    for name in sizes:
        if not name.startswith(('mlxspec/', 'mlxspec-')): yield f'{name} does not belong in it.'
    if sizes.get(DEMO + 'model.safetensors', 0) < 10_000: yield 'The demo weights are not there.'
    assets = sum(s for n, s in sizes.items() if n.startswith('mlxspec/assets/'))
    if assets > LIMIT: yield f'The assets take {assets / 2**20:.1f} MiB, more than {LIMIT / 2**20:.0f}.'


if __name__ == '__main__':
    found = [f'{w}: {f}' for w in sys.argv[1:] for f in faults(w)]
    if found or not sys.argv[1:]: sys.exit('\n'.join(found) or __doc__)
