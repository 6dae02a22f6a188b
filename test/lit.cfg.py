"""lit's configuration: `lit -v test`, or through pytest by `test_lit.py`.

The tools are those of the environment whose Python runs lit, activated or not.
"""

import os
import sys
from pathlib import Path

import lit.formats

# lit runs this file with `config` and `lit_config` among its globals.
suite = globals()["config"]
root = Path(__file__).resolve().parent
tools = Path(sys.executable).parent

suite.name = "alpa"
suite.suffixes = [".mlir"]
suite.excludes = ["Inputs"]
suite.test_format = lit.formats.ShTest(execute_external=False)
suite.test_source_root = str(root)
suite.test_exec_root = str(root.parent / "build" / "lit")
suite.environment["PATH"] = os.pathsep.join([str(tools), suite.environment.get("PATH", "")])

for tool in ("alpa-opt", "filecheck"):
    if not (tools / tool).exists():
        globals()["lit_config"].fatal(f"{tool} is not in {tools}: run pip install -e '.[test]'")
