"""Structured output without a model: texts that a JSON schema, a pattern or a structural tag allows, drawn from a key."""
