"""Scaling of workers on Kubernetes: the API over HTTPS, and what is done with it."""
