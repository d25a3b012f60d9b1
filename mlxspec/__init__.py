"Exact speculative decoding for MLX: the same text, only faster, measured."
__version__ = '0.1.0'

from mlxspec.blas import preload

preload()   # before MLX, which this file never imports

_LAZY = {'Engine': 'mlxspec.engine', 'Params': 'mlxspec.core', 'stream_generate': 'mlxspec.dropin'}
__all__ = list(_LAZY)


def __getattr__(name):
    if name not in _LAZY: raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    from importlib import import_module
    return getattr(import_module(_LAZY[name]), name)


def __dir__(): return sorted({*globals(), *__all__})
