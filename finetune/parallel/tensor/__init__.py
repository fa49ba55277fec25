"""Tensor parallelism (Shoeybi et al. 1909.08053): each rank computes its heads and columns of every block.

Layers hold plain local tensors; the collectives sit at the borders of regions (attention, feed-forward), outside the
adapters. With sequence parallelism (Korthikanti et al. 2205.05198) the residual stream between regions is split by
tokens.
"""

from .apply import split_tied_vocabulary, tensor_parallel
from .plans import check_tensor_plan
from .vocabulary import VocabularySlice

__all__ = ["VocabularySlice", "check_tensor_plan", "split_tied_vocabulary", "tensor_parallel"]
