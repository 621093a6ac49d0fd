import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it: what is tested is then what runs
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [ROOT, os.path.join(ROOT, "tests")]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])  # for the pool's processes

import pytest  # noqa: E402

from pool import Pool  # noqa: E402


@pytest.fixture(scope="session")
def pool():
    pool = Pool()
    yield pool
    pool.close()
