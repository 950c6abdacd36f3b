"""The process groups of a rank: formed, watched, held, aborted to free waiting threads, and formed again.

`rank_groups` is what the rest of a rank uses. Only modules that handle groups or tensors import torch; `rank_groups`,
`ring`, `departures` and `positions` do not.
"""
