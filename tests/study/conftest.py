import gc
import sys
from pathlib import Path

import pytest

# The generator of study folders is a plain module beside the tests.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", autouse=True)
def fast_collections():
    """statsmodels' multipletests collects garbage at every call; frozen objects are not looked at."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
