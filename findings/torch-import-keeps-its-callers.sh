#!/usr/bin/env bash
# `import torch` inside a function keeps that function's local variables, and those of its callers, after they return.
#
# Versions: torch 2.13.0, numpy 2.4.6 (without numpy even a collection frees nothing).
# Behaviour: `torch.fx.wrap`, which runs while torch is imported, leaves its own frame in a cycle with one of its local
# variables. A frame holds the one that called it, so that the whole stack of the first import waits for the garbage
# collector. After `gc.freeze()`, which is there to be called right after imports, no collection finds it any more.
# Surprise: programs that start fast import torch late, in the function that loads a model, and freeze the collector so
# that it does not walk over half a million imported objects. The first model that they load then stays to the end of
# the process, whoever lets it go; the second does not.
# Way round: import torch and transformers in a thread (`ThreadPoolExecutor(1).submit(import_module, "torch").result()`),
# whose stack holds nothing else; or `gc.collect()` before `gc.freeze()`, which takes a third of a second.
# Seen: "freed after return, after a collection: plain False, True; frozen False, False; in a thread True, True"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$work/look.py" <<'PYTHON'
import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module


class Weights: ...


def load(apart):
    weights = Weights()
    if apart:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(import_module, "torch").result()
    else:
        import torch  # noqa: F401
    return weakref.ref(weights)


gc.disable()
found = load(sys.argv[1] == "apart")
returned = found() is None
if sys.argv[1] != "plain":
    gc.freeze()
gc.collect()
print(f"{returned}, {found() is None}")
PYTHON
declare -A seen
for how in plain frozen apart; do seen[$how]=$("$work/venv/bin/python" -W ignore "$work/look.py" "$how" 2> "$work/log"); done
echo "freed after return, after a collection: plain ${seen[plain]}; frozen ${seen[frozen]}; in a thread ${seen[apart]}"
[ "${seen[plain]}" = "False, True" ] && [ "${seen[frozen]}" = "False, False" ] && [ "${seen[apart]}" = "True, True" ]
