"""Encoders of multimodal models apart from their language models: embeddings of media go through an object store."""
