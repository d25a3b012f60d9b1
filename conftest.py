"Let nbval run the notebooks that nbdev cleaned, by nbdev's own rules."
import os

from nbdev.config import get_config
from nbdev.test import nb_test_cells

# Stored outputs must be the same on every machine: MLX's bundled BLAS is, a system OpenBLAS is not.
os.environ.setdefault('MLXSPEC_BLAS', 'off')
# Tests never read or write the caches of the person who runs them.
os.environ.setdefault('HF_HUB_OFFLINE', '1')


def pytest_collection_modifyitems(items):
    flags = get_config(__file__).tst_flags
    flags, runs = flags.split() if isinstance(flags, str) else flags, {}
    for it in items:
        cell = getattr(it, 'cell', None)       # nbval's items carry their cell
        if cell is None: continue
        if it.path not in runs: runs[it.path] = {c.id for c in nb_test_cells(it.path, flags)}
        if cell.id not in runs[it.path]: it.options['skip'] = True
        if cell.execution_count is None: cell.execution_count = 1   # nbdev-clean empties it; nbval reads that as "never run"
