"The catalogue: the code, the docs and the package say the same, and nothing of the inside gets out. (Told in nbs/40_errors.ipynb.)"
import ast
import json
from pathlib import Path

import pytest
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

import mlxspec
from mlxspec import core, engine, scheduler
from mlxspec.core import EngineError, MlxspecError, RequestError
from mlxspec.errors import HANDLERS, Code, catalogue_markdown, error_body, error_response, told

ROOT = Path(__file__).parent.parent
SPEC = {400: 'invalid_json invalid_type invalid_value unsupported_parameter context_length_exceeded invalid_json_schema invalid_grammar',
        401: 'invalid_api_key', 403: 'origin_not_allowed', 404: 'model_not_found unknown_url', 405: 'method_not_allowed', 408: 'request_timeout',
        413: 'request_too_large', 415: 'unsupported_media_type', 421: 'host_not_allowed', 429: 'queue_full rate_limited', 431: 'headers_too_large',
        499: 'cancelled', 500: 'engine_error numerical_error out_of_memory',
        503: 'loading_model queue_timeout server_shutting_down engine_stalled'}


def test_the_table_in_the_docs_is_the_enum():
    cells = json.loads((ROOT/'nbs'/'40_errors.ipynb').read_text())['cells']
    shown = [''.join(o['data'].get('text/markdown', '')) for c in cells for o in c.get('outputs', []) if 'data' in o]
    assert catalogue_markdown() in shown
    rows = [[x.strip(' `') for x in line.strip('|').split('|')] for line in catalogue_markdown().splitlines()[2:]]
    assert [(int(s), t, c) for s, t, c, _ in rows] == [(c.status, c.kind, c.name) for c in Code]


def test_statuses_and_types_are_those_that_clients_know():
    assert {s: {c.name for c in Code if c.status == s} for s in {c.status for c in Code}} == {s: set(w.split()) for s, w in SPEC.items()}
    kinds = {401: 'authentication_error', 403: 'permission_error', 404: 'not_found_error', 429: 'rate_limit_error', 500: 'server_error',
             503: 'unavailable_error'}
    assert all(c.kind == kinds.get(c.status, 'invalid_request_error') for c in Code)


def codes_in(path):
    "Codes that a module gives to `RequestError`, `later` or `refusal`, or names of `Code`."
    for n in ast.walk(ast.parse(path.read_text())):
        if isinstance(n, ast.Call) and getattr(n.func, 'id', '') == 'RequestError':
            yield from (x.value for x in [*n.args[2:3], *(k.value for k in n.keywords if k.arg == 'code')] if isinstance(x, ast.Constant))
        if isinstance(n, ast.Attribute) and getattr(n.value, 'id', '') == 'Code': yield n.attr


def test_every_code_in_the_package_is_in_the_catalogue():
    codes = {c for p in Path(mlxspec.__file__).parent.rglob('*.py') for c in codes_in(p)} - {'__members__'}
    assert {'invalid_json', 'context_length_exceeded', 'queue_full'} < codes <= set(Code.__members__)
    todo = [MlxspecError]
    assert core and engine and scheduler                      # their exceptions are among them
    while todo:
        c = todo.pop()
        todo += c.__subclasses__()
        assert c.status == Code[c.code].status, c


def test_error_bodies_have_all_four_keys():
    for code in Code: assert set(error_body('x', code)['error']) == {'message', 'type', 'param', 'code'}


@pytest.mark.parametrize('e', [ValueError('secret'), KeyError('/secret/path'), ExceptionGroup('secret', [OSError('secret')]), EngineError('x').with_traceback(None),
                               RecursionError(), RequestValidationError([dict(type='missing', loc=('body', 'x'), msg='m', input='secret')]),
                               HTTPException(500, 'secret'), HTTPException(418, 'secret')], ids=lambda e: type(e).__name__)
def test_nothing_of_the_inside_gets_out(e):
    r = error_response(e, 'req_7', 'GET /x')
    text = r.body.decode()
    assert 'secret' not in text and type(e).__name__ not in text and r.status_code in {c.status for c in Code}
    assert set(json.loads(text)) == {'error'}


def test_headers_that_belong_to_a_status():
    h = lambda e: error_response(e, 'req_1').headers
    assert h(RequestError('x', None, 'queue_full', 429, 7))['retry-after'] == '7'
    assert h(RequestError('x', None, 'invalid_api_key', 401))['www-authenticate'] == 'Bearer'
    assert h(RequestError('x', None, 'request_timeout', 408))['connection'] == h(RequestError('x', None, 'request_too_large', 413))['connection'] == 'close'
    assert h(HTTPException(405, headers={'allow': 'POST'}))['allow'] == 'POST' and 'retry-after' not in h(RequestError('x'))


def test_a_code_that_nobody_knows_is_a_fault_of_ours():
    assert told(RequestError('x', None, 'no_such_code'), 'req_1')[0] == 500


def test_there_is_one_handler(): assert len(set(HANDLERS.values())) == 1

