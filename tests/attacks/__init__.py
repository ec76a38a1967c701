"""Attacks that were tried, the tests that make them, and the remedies without which those tests fail."""
