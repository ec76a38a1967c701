"""Predictions of first tokens, what is learnt of their errors, and the promises that come of them."""
