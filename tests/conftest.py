"""One thread of computation for each of pytest-xdist's workers, and no deadline for what hypothesis tries."""

import os

from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:
    # Small tensors gain nothing from more. It is read by torch when that is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("vitprobe", deadline=None)  # a first call imports, and machines are shared
settings.load_profile("vitprobe")
