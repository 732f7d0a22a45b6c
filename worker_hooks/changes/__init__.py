"""Where the registered tensors change: their versions, an audit of their content, their copies."""
