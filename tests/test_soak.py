"A short soak of a real server: many clients, cancellations and faults (tools/soak.py; nbs/43_soak.ipynb tells of a long one)."
import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent.parent/'tools'/'soak.py'
MODES = dict(cooperative=.12, mtp_batch=1, serial=1, ar_batch=1, mtp_cohort_experimental=1, hyper=1) # minutes


@pytest.mark.parametrize('mode', [next(iter(MODES)), *(pytest.param(m, marks=pytest.mark.slow) for m in list(MODES)[1:])])
def test_soak(mode):
    done = subprocess.run([sys.executable, str(SOAK), '--mode', mode, '--minutes', str(MODES[mode])], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout, done.stderr[-4000:])
    out = json.loads(done.stdout)
    assert out['broken'] == [] and out['alive'] == {} and out['requests']['whole'] > 0
