"""openai-node and the Anthropic SDK for Node; what they leave behind is what the Python SDKs do."""

import shutil

from harness import install as put

from . import python_sdks

QUICK = True
PINS = ["openai@7.59.0", "@anthropic-ai/sdk@1.14.0"]
SCRIPT = python_sdks.SCRIPT


def install():
    return put.npm("node-sdks", PINS)


def scenario(case):
    (case.work / "node_modules").symlink_to(case.installed / "node_modules")
    script = case.work / "node_sdks.mjs"
    shutil.copy(python_sdks.SDK / script.name, script)
    case.run(["node", script, case.url])
    python_sdks.checks(case)
