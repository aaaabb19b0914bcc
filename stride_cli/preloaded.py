"""Imports everything that opening a model and running a method on it imports; for processes that fork.

Nothing is computed and no device is asked for, so that there are no threads and no contexts that a fork would
lose.
"""

from __future__ import annotations

import gc

import scipy.optimize  # noqa: F401
import transformers
import transformers.modeling_utils

from stride_cli.startup import freeze

for _name in ("AutoModelForCausalLM", "NanoChatForCausalLM", "PreTrainedTokenizerFast"):
    getattr(transformers, _name)  # imported when first asked for
gc.collect()
freeze()  # pages that the collector does not touch stay shared
