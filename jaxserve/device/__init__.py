"""The device half: rows, KV and the compiled programs of a step. JAX only; knows no scheduler and no text."""
