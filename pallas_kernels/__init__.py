"""Kernels in Pallas: one folder an op, with its public function, a plain reference, the GPU kernel and its cases.

Knows arrays only, nothing of engines, models or layers.
"""
