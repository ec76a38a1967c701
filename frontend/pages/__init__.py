"""Pages for people: what this server is, and a description of its routes."""
