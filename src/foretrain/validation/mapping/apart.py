"""Steps whose published time is a sum over blocks that were timed one by one.

The steps of one node in VIA-Research/vTrain (data/ground_truth_single.csv) are sums to five digits:
pp = 1 gives c + m head + L update + m L layer for m micro-batches and L layers, with one `layer`
and `head` for each hidden size, tp and micro-batch (32 of each behind 450 rows), and the layers
of pp 2 and 4 are the same numbers. So
- each block stands for itself: the device was idle when it began, and nothing overlaps;
- nothing is recomputed, whatever use_checkpoint of the configuration says: the time that a sample
  adds to a layer (hidden 2048: 1.88, 1.08, 0.61, 0.45 ms for tp 1, 2, 4, 8) is that of three passes
  of the matrices, not four (src/predictor.py of the source: the last stage recomputes nothing);
- the vocabulary is not padded: a rank has vocab_size // tp rows (src/model/gpt_modeling.py), odd
  ones for tp = 1, whose products cost five times those of tp = 2.
"""

from __future__ import annotations

from foretrain.validation.mapping.words import Assumed
from foretrain.validation.rows import Row


def is_apart(row: Row) -> bool:
    """Returns whether the time of a row is a sum over blocks that ran one by one."""
    return row.family == "vtrain_groundtruth" and (row.n_gpus or 0) <= (row.gpus_per_node or 8)


def map_apart(assumed: Assumed) -> str:
    """Returns the recompute setting of such a row."""
    assumed.add("recompute = none (stated as full; the times are those of three passes)")
    assumed.add("sum of blocks timed one by one, vocabulary not padded")
    return "none"
