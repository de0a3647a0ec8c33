"""What a model's text means: reasoning, tool calls, content. Pure text machines; nothing here knows HTTP or the engine."""
