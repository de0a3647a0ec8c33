"""Whoever watches the engine: metrics for Prometheus, a line for the log. Subscribes; the core knows none of it."""
