"Hint files among vandals: flipped bytes, killed writers, rivals, directories that cannot be written."
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxspec import hints
from mlxspec.evidence import Estimate
from mlxspec.hints import Hint, HintFile, HintKey, all_hints, canonical, clear_hints, decode, encode

KEY = HintKey('t0', 'd0', 'M5-16c', 4, '0.32.4', '0.32.2')
EST = Estimate(1.34, 1.21, 1.48, 10.2, 7.6, 2.9, (.8, .6, .5), .62)
HINT = Hint('enable', 'measured', .62, 4, 4, EST, 1_770_000_000.)
DATA = encode(HINT, KEY)
WRITER = '''
import sys
from pathlib import Path
from mlxspec.evidence import Estimate
from mlxspec.hints import Hint, HintFile, HintKey
f = HintFile(Path(sys.argv[1]), HintKey('t0', 'd0', 'M5-16c', 4, '0.32.4', '0.32.2'))
est = Estimate(1.34, 1.21, 1.48, 10.2, 7.6, 2.9, (.8, .6, .5), .62)
print('ready', flush=True)
n = 0
while n != int(sys.argv[2]):
    n += 1
    f.save(Hint('enable' if n % 2 else 'decline', 'measured', .62, 4, 4, est, 1e9 + n))
'''

def writer(directory, n=-1):
    p = subprocess.Popen([sys.executable, '-c', WRITER, str(directory), str(n)], stdout=subprocess.PIPE)
    assert p.stdout.readline() == b'ready\n'
    return p

@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.integers(0, len(DATA) - 1), st.integers(0, 255))
def test_one_byte_changed(i, b):
    data = DATA[:i] + bytes([b]) + DATA[i + 1:]
    try: assert decode(data, KEY) == HINT
    except ValueError: pass

@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)))
def test_strange_json_is_no_hint(value):
    with pytest.raises(ValueError): decode(json.dumps(value).encode(), KEY)

@pytest.mark.parametrize('change', [dict(estimate=None), dict(estimate=[]), dict(estimate={'kept': 3}), dict(key=3), dict(verdict='perhaps'), dict(more=1)])
def test_a_right_checksum_is_not_enough(change):
    body = json.loads(DATA)
    body.pop('sum')
    body |= change
    body['sum'] = hints.hashlib.sha256(canonical(body)).hexdigest()
    with pytest.raises(ValueError): decode(canonical(body), KEY)

def test_at_every_moment_of_a_write_the_file_is_the_old_one_or_the_new_one(tmp_path):
    "Looked at before and after every call that the writer makes: a process may be killed at any of them."
    path, other, calls = tmp_path / 'a.json', encode(replace(HINT, verdict='decline'), KEY), []
    hints.write_atomically(path, DATA)
    def look(frame, event, arg):
        if event.startswith('c_'): calls.append((arg.__name__, path.read_bytes()))
    sys.setprofile(look)
    try: hints.write_atomically(path, other)
    finally: sys.setprofile(None)
    assert {content for _, content in calls} == {DATA, other} and calls[0][1] == DATA
    names = [name for name, _ in calls]
    first_new = next(name for name, content in calls if content == other)
    assert names.index('write') < names.index('flush') < names.index('fsync') < names.index('replace') and first_new == 'replace'
    assert [p.name for p in tmp_path.iterdir()] == ['a.json']

def test_every_cut(tmp_path):
    for n in range(len(DATA)):
        with pytest.raises(ValueError): decode(DATA[:n], KEY)

@pytest.mark.parametrize('bad', [DATA[:100], b'', b'\xff\xfe', b'[' * 60_000, b' ' * 100_000, DATA.replace(b'"version":1', b'"version":2'),
                                 encode(HINT, replace(KEY, block_size=8))], ids='cut empty binary nested long newer foreign'.split())
def test_a_damaged_file_is_put_aside_once(tmp_path, caplog, bad):
    f = HintFile(tmp_path, KEY)
    f.path.write_bytes(bad)
    assert f.load() is None
    assert f.path.with_suffix('.bad').read_bytes() == bad and not f.path.exists()
    assert f.load() is None
    assert [r.levelname for r in caplog.records] == ['WARNING']
    f.save(HINT)
    assert f.load() == HINT

def test_a_file_without_a_checksum_or_without_end_is_no_hint():
    body = json.loads(DATA)
    del body['sum']
    with pytest.raises(ValueError, match='checksum'): decode(canonical(body), KEY)
    assert decode(DATA + b' ' * (hints.MAX_BYTES - len(DATA)), KEY) == HINT
    with pytest.raises(ValueError, match='longer'): decode(DATA + b' ' * (hints.MAX_BYTES - len(DATA) + 1), KEY)

@pytest.mark.parametrize('verdict, by, lasts', [('enable', 'measured', True), ('enable', 'static_default', False), ('decline', 'measured', False)])
@pytest.mark.parametrize('sign', [1, -1], ids=['old', 'from the future'])
def test_what_expires(verdict, by, lasts, sign):
    h, month = replace(HINT, verdict=verdict, settled_by=by), sign * 30 * 86400
    assert not h.expired(h.written_at + month) and h.expired(h.written_at + month + sign) is not lasts

def test_a_good_file_that_came_meanwhile_is_not_put_aside(tmp_path, monkeypatch):
    f, locked = HintFile(tmp_path, KEY), hints.locked
    f.path.write_bytes(b'damaged')
    def later(directory): # another server wins the lock first
        f.path.write_bytes(DATA)
        return locked(directory)
    monkeypatch.setattr(hints, 'locked', later)
    assert f.load() is None and not f.path.with_suffix('.bad').exists() and f.load() == HINT

def test_a_fingerprint_is_of_names_contents_and_borders(tmp_path):
    def of(**files):
        d = tmp_path / str(len(list(tmp_path.iterdir())))
        d.mkdir()
        for name, data in files.items(): (d / name.replace('_', '.')).write_bytes(data)
        return hints.fingerprint(d)
    head = (2).to_bytes(8, 'little') + b'{}'
    weights = lambda change=b'': head + b'a' * 50_000 + change + b'a' * (50_000 - len(change))
    base = dict(config_json=b'{}', model_safetensors=weights(), model_safetensors_index_json=b'{}')
    others = [dict(config_json=b'{ }'), dict(model_safetensors=weights(b'b' * 8192)), dict(model_safetensors_index_json=b'[]'), dict(other_safetensors=b'')]
    assert of(**base) == of(**base, README_md=b'words') # nothing that matters
    assert len({of(**base), of(), *(of(**base | o) for o in others)}) == len(others) + 2
    assert of(a_safetensors=head, b_safetensors=head) != of(a_safetensors=head, c_safetensors=head)
    assert of(a_index_json=b'Xb.index.jsonY') != of(a_index_json=b'X', b_index_json=b'Y')

def test_hint_version_is_in_the_file(monkeypatch):
    monkeypatch.setattr(hints, 'HINT_VERSION', 2)
    with pytest.raises(ValueError, match='version 1, not 2'): decode(DATA, KEY)
    assert decode(encode(HINT, KEY), KEY) == HINT
    from mlxspec.policy import SCHEMA_VERSION
    assert SCHEMA_VERSION == 1      # two numbers, two reasons to change them

@pytest.mark.parametrize('field', asdict(KEY))
def test_every_field_of_the_key_changes_the_file(field):
    other = replace(KEY, **{field: 8 if field == 'block_size' else 'other'})
    assert other.name != KEY.name
    with pytest.raises(ValueError): decode(DATA, other)

def test_a_full_disk_leaves_the_old_hint(tmp_path, monkeypatch, caplog):
    f = HintFile(tmp_path, KEY)
    f.save(HINT)
    def full(fd): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(hints.os, 'fsync', full)
    for _ in range(3): f.save(replace(HINT, verdict='decline'))
    assert [p.name for p in tmp_path.iterdir() if p.name != '.lock'] == [f.path.name]
    assert f.load() == HINT
    assert len(caplog.records) == 1 and 'memory only' in caplog.text

@pytest.mark.skipif(os.name == 'nt' or os.geteuid() == 0, reason='the superuser may write anywhere')
def test_read_only_directory(tmp_path, caplog):
    f = HintFile(tmp_path, KEY)
    f.save(HINT)
    tmp_path.chmod(0o500)
    try:
        for _ in range(3): f.save(replace(HINT, verdict='decline'))
        assert f.load() == HINT
        f.path.chmod(0o600)
        f.path.write_bytes(b'damaged')
        assert f.load() is None
    finally: tmp_path.chmod(0o700)
    assert [r.levelname for r in caplog.records] == ['WARNING', 'WARNING']  # memory only; damaged

def test_missing_directory_that_cannot_be_made(tmp_path, caplog):
    (tmp_path / 'file').write_text('in the way')
    f = HintFile(tmp_path / 'file' / 'mtp-policy', KEY)
    for _ in range(3): f.save(HINT)
    assert f.load() is None
    assert len(caplog.records) == 1

def test_nothing_is_created_by_looking(tmp_path):
    assert HintFile(tmp_path / 'cache' / 'mtp-policy', KEY).load() is None
    assert not (tmp_path / 'cache').exists()

def test_a_lock_that_is_held_stops_nobody(tmp_path):
    f = HintFile(tmp_path, KEY)
    with hints.locked(tmp_path) as ours:
        assert ours
        f.save(HINT)
        assert f.load() == HINT
        leftover = tmp_path / '.x-0.tmp'
        leftover.write_bytes(b'')
        f.load()
        assert leftover.exists()    # it may be somebody's who is writing now
    f.load()
    assert not leftover.exists()

def test_two_processes(tmp_path):
    ps = [writer(tmp_path, 40) for _ in range(2)]
    f, seen = HintFile(tmp_path, KEY), 0
    while any(p.poll() is None for p in ps):
        if f.path.exists():
            assert f.load() is not None
            seen += 1
    assert [p.wait() for p in ps] == [0, 0] and seen
    assert not list(tmp_path.glob('*.bad')) and not list(tmp_path.glob('.*.tmp'))

def kill_writers(directory, times, caplog):
    f, rng = HintFile(directory, KEY), random.Random(times)
    f.save(HINT)
    caplog.set_level(logging.ERROR, 'mlxspec') # for this test only
    leftovers = 0
    for _ in range(times):
        p = writer(directory)
        time.sleep(rng.uniform(0, .03))
        p.send_signal(signal.SIGKILL)
        assert p.wait() == -signal.SIGKILL
        leftovers += len(list(directory.glob('.*.tmp')))
        h = f.load()
        assert h is not None and h.estimate == EST
        assert not list(directory.glob('*.bad')) and not list(directory.glob('.*.tmp'))
    return leftovers

@pytest.mark.skipif(os.name == 'nt', reason='no SIGKILL')
def test_killed_while_writing(tmp_path, caplog): kill_writers(tmp_path, 10, caplog)

@pytest.mark.slow
@pytest.mark.skipif(os.name == 'nt', reason='no SIGKILL')
def test_killed_while_writing_a_hundred_times(tmp_path, caplog):
    assert kill_writers(tmp_path, 100, caplog) > 0  # at least one died half-way

def test_for_people(tmp_path):
    for k in (8, 4): HintFile(tmp_path, replace(KEY, block_size=k)).save(replace(HINT, written_at=k))
    (tmp_path / 'strange.json').write_text('[]')
    (tmp_path / 'damaged.bad').write_text('')
    assert [(k.block_size, h.written_at) for k, h in all_hints(tmp_path)] == [(4, 4), (8, 8)]
    assert clear_hints(tmp_path) == 3 and all_hints(tmp_path) == []
    assert [p.name for p in tmp_path.iterdir()] == ['.lock']
    assert all_hints(tmp_path / 'nowhere') == [] and clear_hints(tmp_path / 'nowhere') == 0
