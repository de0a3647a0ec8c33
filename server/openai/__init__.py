"""OpenAI's HTTP API: chat, completions, models, and the shapes of their answers."""
