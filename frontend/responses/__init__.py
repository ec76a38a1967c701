"""OpenAI's Responses API over the same jobs as chat: items in, items out, and responses that can be continued by their id."""
