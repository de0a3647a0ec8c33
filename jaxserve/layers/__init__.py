"""The parts that decoders are built of: projections, norms, rope, mlp, and the contract between a model and its caller.

Written over flat tokens: an activation is f[T, D] whatever sequences the tokens belong to. This room never knows
pages, meshes, files or configurations of a checkpoint.
"""
