"""The choice of a fleet for each request: which workers of one model are cheap enough, and soon enough."""
