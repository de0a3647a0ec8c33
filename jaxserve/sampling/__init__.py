"""From logits to tokens: masks, bias, penalties, truncation, the draw, log probabilities.

Pure functions of arrays, to be called inside a jitted program. This room never knows rows, requests, meshes or the
host; a vocabulary that is sharded over devices only shows in the shape of its sums (see `lanes`).
"""
