"""Neuron statistics: dead neurons, sparsity and gates, measured so that they can be compared.

`census(model, batches, down=["h.*.mlp.c_proj"])` counts the neurons of any PyTorch model;
`NeuronAccumulator` does the counting alone. Definitions: `docs/metrics.md`.
"""

from ffnlab.census.accumulator import NeuronAccumulator
from ffnlab.census.figures import figures
from ffnlab.census.health import NonFiniteError
from ffnlab.census.measure import Census, CensusError, census

__all__ = ["Census", "CensusError", "NeuronAccumulator", "NonFiniteError", "census", "figures"]
