"""The pooling APIs, whose answers are made of vectors: embeddings, scores, rankings, classes."""
