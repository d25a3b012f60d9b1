"Fixtures that several test files use."
import logging

import mlx.core as mx
import pytest


@pytest.fixture(scope='module')
def quiet():
    "Nothing is compiled, and drafters that fail on purpose do not fill the log."
    mx.disable_compile()
    logging.getLogger('mlxspec').setLevel(logging.CRITICAL)
    yield
    logging.getLogger('mlxspec').setLevel(logging.WARNING)
