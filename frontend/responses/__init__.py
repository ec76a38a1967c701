"""OpenAI's Responses API over the same jobs as chat: items in, items out, and answers that can be continued by their id."""
