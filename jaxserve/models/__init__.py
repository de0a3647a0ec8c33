"""The model families: one file each, mathematics, axis names and a name map. `registry` finds them by architecture.

A model never loops over its layers and knows nothing of quantisation, kernels, meshes, caches or the engine.
"""
