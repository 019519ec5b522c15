"""One thread of computation for each of pytest-xdist's workers: small tensors gain nothing from more."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when it is imported
