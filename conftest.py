"""Let nbval run the notebooks that nbdev cleaned, by nbdev's own rules, and keep tests away from what is personal.

Notebook kernels and subprocesses inherit the environment that is set here."""
import os
import tempfile

from nbdev.config import get_config
from nbdev.test import nb_test_cells

# Only MLXSPEC_BLAS may be chosen from outside. MLX's bundled BLAS gives the same ids on every machine, a system one does not.
chosen = os.environ.get('MLXSPEC_BLAS', 'off')
for name in [n for n in os.environ if n.startswith('MLXSPEC_')]: del os.environ[name]
os.environ.update(MLXSPEC_BLAS=chosen, HF_HUB_OFFLINE='1')

# Without ipywidgets tqdm warns in every kernel that imports mlx-lm; nbval would take it for a changed output.
os.environ['PYTHONWARNINGS'] = 'ignore:IProgress not found'
os.environ['TRANSFORMERS_NO_ADVISORY_WARNINGS'] = '1'   # as mlx-lm sets it; a notebook may import transformers first

# No config file or measurement of the person who runs the tests is read or written.
home = tempfile.TemporaryDirectory(prefix='mlxspec-test-')
os.environ.update(XDG_CONFIG_HOME=home.name, MLXSPEC_CACHE_DIR=home.name)


def pytest_collection_modifyitems(items):
    "Skip the cells that nbdev would skip; nbval fails on the others only for what they do."
    flags = get_config(__file__).tst_flags
    flags, runs = flags.split() if isinstance(flags, str) else flags, {}
    for it in items:
        cell = getattr(it, 'cell', None)       # nbval's items carry their cell
        if cell is None: continue
        if it.path not in runs: runs[it.path] = {c.id for c in nb_test_cells(it.path, flags)}
        if cell.id not in runs[it.path]: it.options['skip'] = True
        if cell.execution_count is None: cell.execution_count = 1   # nbdev-clean empties it; nbval reads that as "never run"
