"""Scripts of this folder that need a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def run(script, **variables):
    """What a script says, with these variables in its environment; it must succeed."""
    command = [sys.executable, str(HERE / script)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
