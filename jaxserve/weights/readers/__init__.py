"""One file for each checkpoint format; each offers what `weights.checkpoint.Checkpoint` asks. Never imports jax."""
