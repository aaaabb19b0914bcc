"""Shared by all tests: tiny models, a corpus of chunks in memory, and a quiet environment."""

from __future__ import annotations

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("STRIDE_NO_PROGRESS", "1")
