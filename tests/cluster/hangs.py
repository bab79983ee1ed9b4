"""A check that never comes to its function: importing it starts a child, writes both ids down, and waits."""

import os
import subprocess
import sys
import time
from pathlib import Path

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(os.environ["CHILD_FILE"]).write_text(f"{os.getpid()} {child.pid}")
time.sleep(600)
