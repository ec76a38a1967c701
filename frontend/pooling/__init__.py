"""Requests that end in vectors: embeddings, scores, rankings, classes."""
