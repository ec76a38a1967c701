"""Anthropic's Messages API over the same jobs as chat."""
