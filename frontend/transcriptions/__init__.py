"""Serves transcriptions and translations of speech, by chat models that hear."""
