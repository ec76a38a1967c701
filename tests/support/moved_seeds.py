"""Names the property by which a test tells that the seed in its table shows nothing any more, and which one does."""

MOVED_SEED = "moved seed"
