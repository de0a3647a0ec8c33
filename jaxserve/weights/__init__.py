"""Weights: what they are to a model, where they lie on the devices, and how a checkpoint becomes them.

`leaf` is all that models and layers see. Readers know files, `load` knows neither files nor architectures.
"""
