"""Pure formulas: parameters, FLOPs, matmuls, memory, collectives, overlap, pipeline, step."""
