"""Imports in the tests' fork server what torch imports on every rank at its first DTensor and first optimizer's step.

It takes a second of computing, which hundreds of ranks then share.
"""

import os
import sys

import torch._dynamo  # noqa: F401

sys.path.remove(os.path.dirname(__file__))
