"""The host half: which sequence computes how many tokens in a step, and what their text is. Never imports jax."""
