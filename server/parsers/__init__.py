"""What a model's text means: reasoning, tool calls, content. Pure text machines that know no HTTP and no engine."""
