"""STRIDE: which training documents made this language model say that?"""

__version__ = "0.1.0"
