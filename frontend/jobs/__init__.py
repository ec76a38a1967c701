"""Stored jobs as the frontend knows them: rendered by the APIs, and read by their clients."""
