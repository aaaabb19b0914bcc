"""STRIDE: which training documents made this language model say that?"""

__version__ = "0.1.0"

from stride_cli.startup import choose_kernel_cache

choose_kernel_cache()  # before numba is imported
