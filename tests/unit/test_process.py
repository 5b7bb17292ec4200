"""Processes whose parent dies."""

import subprocess
import sys

ADOPTS = """
import subprocess, psutil
from shared.process import adopt_orphans
adopt_orphans()
said = subprocess.run(["sh", "-c", "sleep 60 >&2 & echo $!"], stdout=subprocess.PIPE, check=True).stdout
(orphan,) = psutil.Process().children()
orphan.kill()
assert orphan.pid == int(said)
"""


def test_what_a_child_leaves_behind_when_it_ends_is_adopted():
    subprocess.run([sys.executable, "-c", ADOPTS], check=True, timeout=30)
